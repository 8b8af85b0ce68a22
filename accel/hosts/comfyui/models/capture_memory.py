"""Captured graphs as one more entry in ComfyUI's list of loaded models, so that it can take their memory back.

Core frees memory (for another model, for `/free`, after a shortage) by unloading entries of its private list
`comfy.model_management.current_loaded_models`; there is no other hook. From the first capture on, the list has one
entry per device. Core unloads nothing for it, because its memory is already taken, and unloads it first, because
captures are the cheapest to make again; last where weights are streamed, since these give way by themselves.
"""

from __future__ import annotations

import weakref
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch

from ....cache.graph_cache import GraphCache
from ....core.events import log
from ..versions import is_dynamic

_FIRST, _LAST = 1 << 62, -1
"""More and fewer bytes than any model has offloaded; core first unloads the model that has most."""

_SHARE = 8  # one part in this many of a device's memory is for captures, unless the user has set a budget


class CapturedCalls(torch.nn.Module):
    """The model of our entry; core's log shows this class name. Keeps neither the cache nor any model alive."""

    def __init__(self, cache: weakref.ref[GraphCache], device: torch.device):
        super().__init__()
        self._cache = cache
        self.device = device

    def nbytes(self) -> int:
        """Bytes that the captures take on the device."""
        cache = self._cache()
        return 0 if cache is None else cache.captures.nbytes_on(self.device)

    def drop(self) -> int:
        """Drop all captures once a running replay is over; returns the bytes that they took. They share memory, which
        core then returns to the device (`soft_empty_cache`). An error is only logged: core has others to unload."""
        cache, freed = self._cache(), self.nbytes()
        if not freed:
            return 0
        try:
            cache.captures.give_way(cache, self.device)
        except Exception as error:
            log.warning("The memory of captured calls is not given back: %s", error)
            return 0
        return freed


class _Patcher(comfy.model_patcher.ModelPatcher):
    """The patcher of `CapturedCalls`; what core asks beyond these methods is answered by its own class."""

    def model_size(self) -> int:
        return self.model.nbytes()

    loaded_size = model_size

    def partially_load(self, device_to: torch.device, extra_memory: float = 0, **options: Any) -> int:
        return 0

    def partially_unload(self, device_to: torch.device, memory_to_free: float = 0, **options: Any) -> int:
        return self.model.drop()

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        if unpatch_all:  # False if core removes the entry to insert it again
            self.model.drop()
        return self.model


class _Loaded(comfy.model_management.LoadedModel):
    """Core's list entry."""

    def model_offloaded_memory(self) -> int:
        """Last where models stream their weights: core counts these as free, but only once it has come to them."""
        loaded = comfy.model_management.current_loaded_models
        is_streaming = any(is_dynamic(entry.model) for entry in loaded if entry.device == self.device)
        return _LAST if is_streaming else _FIRST

    def model_memory_required(self, device: torch.device) -> int:
        return 0

    def model_unload(self, *args: Any, **options: Any) -> bool:
        """True: core removes the entry from its list."""
        self.model.model.drop()
        self.model_finalizer.detach()
        return True


def let_core_take_memory(cache: GraphCache) -> None:
    """Have core's list get an entry for each device at the first capture there, from now on."""
    if cache.captures.on_admitted is not None:
        return
    patchers: dict[torch.device, _Patcher] = {}
    weak = weakref.ref(cache)

    def enter(device: torch.device) -> None:
        try:
            if device not in patchers:
                patchers[device] = _Patcher(CapturedCalls(weak, device), device, torch.device("cpu"))
            known = comfy.model_management.current_loaded_models
            if any(entry.model is patchers[device] for entry in known):
                return
            entry = _Loaded(patchers[device])
            entry.model_load()
            entry.currently_used = False  # core passes used ones on to be loaded again
            known.append(entry)
        except Exception as error:  # a core with another way of keeping models
            log.debug("ComfyUI cannot ask for the memory of captured calls: %s", error)

    cache.captures.on_admitted = enter


def room_for_captures(device: torch.device) -> int:
    """Bytes that captures may take on the device in addition to compiled blocks; 0 if it has no CUDA graphs."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(device).total_memory // _SHARE
