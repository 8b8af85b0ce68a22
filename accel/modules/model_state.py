"""Where a model's weights lie and how it is put together: what a recording of its calls takes for granted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch

from ..signature.tensors import PLAIN_TENSORS
from .substitution import StandIn, has_foreign_forward

_SAMPLED = 48
"""Weights that are looked at before each replay, evenly spread over the model: one that was moved as a whole, or in
large parts, is noticed before anything reads addresses that are free."""

_address = torch.Tensor.data_ptr


class Unrecordable(Exception):
    """Recordings cannot hold on to this model; the message says why."""


class ModelState:
    """A model as it is now, to be compared with what it is later.

    Raises Unrecordable for weights whose address cannot be told or which are not in one place.

    digest: of the address, shape, strides and type of every weight, buffer and tensor that a module holds.
    """

    def __init__(self, model: torch.nn.Module):
        modules = list(model.modules())
        holders = [holder for m in modules for holder in (m._parameters, m._buffers, m.__dict__)]
        places = [
            (holder, name) for holder in holders for name, value in holder.items() if isinstance(value, torch.Tensor)
        ]
        self._holders, self._names = [holder for holder, _ in places], [name for _, name in places]
        # Whoever puts a forward or a hook on a module changes the length of one of these.
        self._attributes = [m.__dict__ for m in modules]
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        tensors = self.tensors()
        odd = next((t for t in tensors if type(t) not in PLAIN_TENSORS), None)
        if odd is not None:
            raise Unrecordable(f"its weights are of the type {type(odd).__name__}")
        self.devices = {tensor.device for tensor in tensors if tensor.numel()}
        if len(self.devices) > 1:
            raise Unrecordable(f"its weights are on {' and '.join(sorted(map(str, self.devices)))}")
        self._addresses = list(map(_address, tensors))
        step = max(len(places) // _SAMPLED, 1)
        self._sample = self._holders[::step], self._names[::step], self._addresses[::step]
        layout = [(t.data_ptr(), tuple(t.shape), t.stride(), str(t.dtype)) for t in tensors]
        self.digest = hashlib.sha256(repr(layout).encode()).hexdigest()

    def tensors(self) -> list[torch.Tensor]:
        """The weights, buffers and other tensors that modules hold, as they are now."""
        return list(map(getitem, self._holders, self._names))

    def seems_same(self) -> bool:
        """Whether a sample of the weights is where it was; some microseconds."""
        return _are_at(*self._sample)

    def is_same(self) -> bool:
        """Whether every weight is where it was; about a tenth of a microsecond for each."""
        return _are_at(self._holders, self._names, self._addresses)

    def outline(self) -> int:
        """A number that changes when an attribute or a hook is put on a module or taken from it."""
        hooks = map(len, self._hooks) if any(self._hooks) else ()
        return hash((*map(len, self._attributes), *hooks))


def _are_at(holders: Sequence[dict[str, Any]], names: Sequence[str], addresses: list[int]) -> bool:
    try:
        return list(map(_address, map(getitem, holders, names))) == addresses
    except (KeyError, TypeError):  # none is there any more, or something else
        return False


def obstacle(model: torch.nn.Module, of_module: Callable[[torch.nn.Module], str | None] = lambda module: None):
    """Why a call of the model may run Python code that must run in each call; None where nothing says so.

    of_module: what else the host has against a module.
    """
    if model.training:
        return "it is being trained"
    anywhere = torch.nn.modules.module
    if anywhere._global_forward_hooks or anywhere._global_forward_pre_hooks:
        return "somebody's hooks are on all modules"
    for path, module in model.named_modules():
        name = f"{type(module).__name__} {path}".rstrip()
        if module._forward_hooks or module._forward_pre_hooks:
            return f"somebody's hook is on {name}"
        if has_foreign_forward(module) or any(_is_override(module, key, value) for key, value in vars(module).items()):
            return f"another extension has replaced code of {name}"
        reason = of_module(module)
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _is_override(module: torch.nn.Module, name: str, value: object) -> bool:
    """Whether the attribute stands before a method of the module's class."""
    return callable(value) and not isinstance(value, StandIn) and callable(getattr(type(module), name, None))
