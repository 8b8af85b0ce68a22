"""The shape of a call without its tensors: what is constant in it, and where the tensors go.

Whole numbers from 2 on (frames, text tokens, a window's height) change from one image to the next
like the sizes of tensors do, so they travel as the size of an empty tensor. 0, 1 and negative ones
are flags, counts of nothing and dimensions: constants. Other numbers and texts are values: a graph is
made for each, so the spec without them (`without_values`) is the key, and few are kept for each key.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Spec = tuple
"""A nested, hashable tuple; its first item tells the sort of node it is."""

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)

_VALUES = (float, str, torch.Size)

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class UnsupportedArgument(TypeError):
    """A call carries something that a graph over tensors cannot take."""


@functools.lru_cache(maxsize=4096)
def _size_tensor(size: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(size, 0)


def flatten(value: Any, tensors: list[torch.Tensor], replace: Callable[[dict], Any] | None = None) -> Spec:
    """Describe `value` and append its tensors, each once and in order, to `tensors`.

    `replace` may put something simpler in place of a dict (a host's per-call options, say).
    Raises UnsupportedArgument for anything but tensors, plain constants, tuples, lists, dicts and
    dataclasses of these.
    """
    if isinstance(value, torch.Tensor):
        for index, known in enumerate(tensors):
            if known is value:
                return ("same", index)
        tensors.append(value)
        return ("tensor",)
    kind = type(value)
    if kind is int and value > 1:
        tensors.append(_size_tensor(value))
        return ("size",)
    if kind in CONSTANTS or isinstance(value, enum.Enum):
        # With the type, since True, 1 and 1.0 are equal; and -0.0 equals 0.0.
        return ("value", value, repr(value)) if kind in _VALUES else ("constant", value, kind)
    if kind is tuple or kind is list:
        return (kind.__name__, *[flatten(item, tensors, replace) for item in value])
    if kind is dict:
        if replace is not None:
            value = replace(value)
        return ("dict", *[(key, flatten(item, tensors, replace)) for key, item in value.items()])
    if dataclasses.is_dataclass(kind):
        fields = _fields(kind)
        if fields is not None:
            return ("object", kind, *[(name, flatten(getattr(value, name), tensors, replace)) for name in fields])
    raise UnsupportedArgument(f"an argument of type {kind.__module__}.{kind.__qualname__}")


@functools.lru_cache(maxsize=1024)
def _fields(kind: type) -> tuple[str, ...] | None:
    """The fields that make an instance of a dataclass; None where they do not say all there is about it."""
    fields = dataclasses.fields(kind)
    if hasattr(kind, "__post_init__") or not all(field.init for field in fields):
        return None
    return tuple(field.name for field in fields)


def rebuild(spec: Spec, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `flatten`; plain enough for a compiler to trace through."""
    value, used = _rebuild(spec, tensors, 0)
    assert used == len(tensors)
    return value


def _rebuild(spec: Spec, tensors: Sequence[torch.Tensor], at: int) -> tuple[Any, int]:
    sort = spec[0]
    if sort == "tensor":
        return tensors[at], at + 1
    if sort == "same":
        return tensors[spec[1]], at
    if sort == "size":
        return tensors[at].shape[0], at + 1
    if sort == "constant" or sort == "value":
        return spec[1], at
    if sort == "dict" or sort == "object":
        mapping = {}
        for key, item in spec[1:] if sort == "dict" else spec[2:]:
            mapping[key], at = _rebuild(item, tensors, at)
        return (mapping if sort == "dict" else spec[1](**mapping)), at
    items = []
    for item in spec[1:]:
        value, at = _rebuild(item, tensors, at)
        items.append(value)
    return (tuple(items) if sort == "tuple" else items), at


def without_values(spec: Spec) -> tuple[Spec, tuple[str, ...]]:
    """A spec that is equal for calls which differ in values alone, and these values as text, in order."""
    values: list[str] = []
    return _without_values(spec, values), tuple(values)


def _without_values(spec: Spec, values: list[str]) -> Spec:
    sort = spec[0]
    if sort == "value":
        values.append(spec[2])
        return ("value", type(spec[1]))
    if sort == "tuple" or sort == "list":
        return (sort, *[_without_values(item, values) for item in spec[1:]])
    if sort == "dict" or sort == "object":
        first = 1 if sort == "dict" else 2
        return (*spec[:first], *[(key, _without_values(item, values)) for key, item in spec[first:]])
    return spec


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor is contiguous, or an image or video that is contiguous with channels last."""
    if tensor.is_contiguous():
        return True
    last = _CHANNELS_LAST.get(tensor.ndim)
    return last is not None and tensor.is_contiguous(memory_format=last)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy where it is not dense.

    A graph is made for one layout. Slices and transposed tensors come with strides of their own
    (and, at a batch of 1, with strides that say nothing), so each would need another graph.
    """
    return tensor if is_dense(tensor) else tensor.contiguous()


def sizes_in(spec: Spec) -> list[int]:
    """Which of the call's tensors stand for whole numbers."""
    return [at for at, sort in enumerate(_tensor_sorts(spec)) if sort == "size"]


def has_tensors(spec: Spec) -> bool:
    """Whether there are tensors in it, or whole numbers that travel as tensors."""
    return next(_tensor_sorts(spec), None) is not None


def _tensor_sorts(spec: Spec) -> Iterator[str]:
    sort = spec[0]
    if sort == "tensor" or sort == "size":
        yield sort
    elif sort == "tuple" or sort == "list":
        for item in spec[1:]:
            yield from _tensor_sorts(item)
    elif sort == "dict" or sort == "object":
        for _, item in spec[1 if sort == "dict" else 2 :]:
            yield from _tensor_sorts(item)


def outline(value: Any) -> Any:
    """What lists, dicts and dataclasses hold: equal as long as nobody puts something else into them."""
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(outline, value))
    if isinstance(value, dict):
        return ("dict", *((key, outline(item)) for key, item in value.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ("object", *((field.name, outline(getattr(value, field.name))) for field in dataclasses.fields(value)))
    return value


def has_lists(spec: Spec) -> bool:
    """Whether there is a list among the arguments."""
    return spec[:1] == ("list",) or any(isinstance(item, tuple) and has_lists(item) for item in spec)


def canonical(tensor: torch.Tensor, shape: Sequence[int] | None = None, device: str | None = None) -> torch.Tensor:
    """An unfilled tensor of the shape in the layout of a dense one, with the strides that the layout implies."""
    last = _CHANNELS_LAST.get(tensor.ndim)
    return torch.empty(
        tensor.shape if shape is None else shape,
        dtype=tensor.dtype,
        device=device or tensor.device,
        memory_format=torch.contiguous_format if last is None or tensor.is_contiguous() else last,
    )


def share_memory(tensors: Sequence[torch.Tensor], changed: Sequence[int]) -> bool:
    """Whether one of the changed tensors overlaps another of them in memory.

    A graph may write its changes at the end, where the block would have read them before.
    """
    spans = [_span(tensor) for tensor in tensors]
    return any(
        other != index and spans[index][0] < end and start < spans[index][1]
        for index in changed
        for other, (start, end) in enumerate(spans)
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the tensor's first element begins and its last one ends, as addresses; equal where it has none."""
    start = tensor.data_ptr()
    return start, start + extent(tensor)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of the tensor's first element to the end of its last one."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
