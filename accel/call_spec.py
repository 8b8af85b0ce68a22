"""The shape of a call without its tensors: what is constant in it, and where the tensors go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Spec = tuple
"""A nested, hashable tuple; its first item tells the sort of node it is."""

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


class UnsupportedArgument(TypeError):
    """A call carries something that a graph over tensors cannot take."""


def flatten(value: Any, tensors: list[torch.Tensor], replace: Callable[[dict], Any] | None = None) -> Spec:
    """Describe `value` and append its tensors, in order, to `tensors`.

    `replace` may put something simpler in place of a dict (a host's per-call options, say).
    Raises UnsupportedArgument for anything but tensors, plain constants, tuples, lists and dicts.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor",)
    if type(value) in CONSTANTS:
        return ("constant", value)
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind.__name__, *(flatten(item, tensors, replace) for item in value))
    if kind is dict:
        if replace is not None:
            value = replace(value)
        return ("dict", *((key, flatten(item, tensors, replace)) for key, item in value.items()))
    raise UnsupportedArgument(f"an argument of type {kind.__module__}.{kind.__qualname__}")


def rebuild(spec: Spec, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `flatten`; plain enough for a compiler to trace through."""
    value, used = _rebuild(spec, tensors, 0)
    assert used == len(tensors)
    return value


def _rebuild(spec: Spec, tensors: Sequence[torch.Tensor], at: int) -> tuple[Any, int]:
    sort = spec[0]
    if sort == "tensor":
        return tensors[at], at + 1
    if sort == "constant":
        return spec[1], at
    if sort == "dict":
        mapping = {}
        for key, item in spec[1:]:
            mapping[key], at = _rebuild(item, tensors, at)
        return mapping, at
    items = []
    for item in spec[1:]:
        value, at = _rebuild(item, tensors, at)
        items.append(value)
    return (tuple(items) if sort == "tuple" else items), at
