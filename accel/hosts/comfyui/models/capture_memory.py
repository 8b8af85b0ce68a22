"""Recorded calls as one more loaded model of ComfyUI's, so that it may ask their memory back as it does a model's.

Core has no other way to ask: when it wants memory it goes through its private list of loaded models
(`comfy.model_management.current_loaded_models`): for low memory, for another model, for `/free`, after a shortage. So
while recordings exist one entry for each device stands in the list. It takes the memory that is already taken, so
core unloads nothing for it, and it is what core unloads first, since recordings cost least to make again.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch

from ....cache.graph_cache import GraphCache

log = logging.getLogger("accel")

_FIRST = 1 << 62
"""More bytes than any model has outside of the device; core begins with the model that has most."""

_SHARE = 8
"""Of a device's memory one part in so many is for recordings, where nobody has set a budget."""

_LoadedModel: Any = getattr(comfy.model_management, "LoadedModel", object)


class RecordedCalls(torch.nn.Module):
    """Stands for the model; core's log calls it by this name. Keeps neither the cache nor any model alive.

    device: of the recordings. asked: how often core has taken recordings.
    """

    def __init__(self, cache: GraphCache, device: torch.device):
        super().__init__()
        self._cache = weakref.ref(cache)
        self.device = device
        self.asked = 0

    def nbytes(self) -> int:
        """Bytes that the recordings hold on the device."""
        cache = self._cache()
        return 0 if cache is None else cache.captures.nbytes_on(self.device)

    def let_go(self) -> int:
        """Drop the recordings: the bytes that they had. Their memory is shared, so it goes back with the last alone.

        Waits for a replay under way. Core empties torch's cache when it has gone through its list (`soft_empty_cache`),
        which is what gives the memory back to the device. An error is not core's, which has others to unload.
        """
        cache, freed = self._cache(), self.nbytes()
        if not freed:
            return 0
        self.asked += 1
        try:
            with cache.captures.capturer.lock:
                cache.captures.drop_device(cache, self.device)
        except Exception as error:
            log.warning("The memory of recorded calls is not given back: %s", error)
            return 0
        return freed


class _Patcher(comfy.model_patcher.ModelPatcher):
    """The RecordedCalls as core handles models; what it asks beside this is answered by its own class."""

    def model_size(self) -> int:
        return self.model.nbytes()

    def loaded_size(self) -> int:
        return self.model.nbytes()

    def partially_load(self, device_to: torch.device, extra_memory: float = 0, **options: Any) -> int:
        return 0

    def partially_unload(self, device_to: torch.device, memory_to_free: float = 0, **options: Any) -> int:
        return self.model.let_go()

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        if unpatch_all:  # not where core takes the entry out to put it in again
            self.model.let_go()
        return self.model


class _Loaded(_LoadedModel):
    """Core's entry for it."""

    def model_offloaded_memory(self) -> int:
        return _FIRST

    def model_memory_required(self, device: torch.device) -> int:
        return 0

    def model_unload(self, *args: Any, **options: Any) -> bool:
        """True: core takes the entry from its list."""
        self.model.model.let_go()
        self.model_finalizer.detach()
        return True


class CaptureMemory:
    """A cache's recordings in core's list."""

    def __init__(self, cache: GraphCache):
        self._cache = weakref.ref(cache)
        self._patchers: dict[torch.device, _Patcher] = {}

    @property
    def asked(self) -> int:
        """How often core has taken recordings."""
        return sum(patcher.model.asked for patcher in self._patchers.values())

    def stand(self, device: torch.device) -> None:
        """A recording has been made on the device: from now on core can have its memory."""
        try:
            self._stand(device)
        except Exception as error:  # a core that keeps its models otherwise
            log.debug("ComfyUI cannot ask for the memory of recorded calls: %s", error)

    def leave_if_empty(self) -> None:
        """Take entries without recordings out of core's list. Not to be called while core goes through it."""
        for patcher in self._patchers.values():
            if not patcher.model.nbytes():
                _take_out(patcher)

    def _stand(self, device: torch.device) -> None:
        patcher = self._patchers.get(device)
        if patcher is None:
            model = RecordedCalls(self._cache(), device)
            patcher = self._patchers[device] = _Patcher(model, load_device=device, offload_device=torch.device("cpu"))
        known = comfy.model_management.current_loaded_models
        if any(entry.model is patcher for entry in known):
            return
        entry = _Loaded(patcher)
        entry.model_load()
        entry.currently_used = False  # core hands those that are to whoever wants them loaded again
        known.append(entry)


def room_for_recordings(device: torch.device) -> int:
    """Bytes that recordings may have on the device beside compiled blocks; 0 where there are none."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(device).total_memory // _SHARE


def _take_out(patcher: _Patcher) -> None:
    known = getattr(comfy.model_management, "current_loaded_models", [])
    for index in reversed(range(len(known))):
        if known[index].model is patcher:
            known.pop(index).model_finalizer.detach()


_memories: weakref.WeakKeyDictionary[GraphCache, CaptureMemory] = weakref.WeakKeyDictionary()


def memory_of(cache: GraphCache) -> CaptureMemory:
    """The one of this cache, which has a pool of recordings; made, and told of recordings, from now on."""
    memory = _memories.get(cache)
    if memory is None:
        memory = _memories[cache] = CaptureMemory(cache)
        cache.captures.on_admitted = memory.stand
    return memory
