"""What of a tensor matters to a graph: its class, dtype, device and memory layout, and the memory it covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""The classes of tensors that are no more than their data; compare with `type(tensor) in PLAIN_TENSORS`."""

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels-last memory format by number of dimensions: images [B, C, H, W], videos [B, C, T, H, W]."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its sizes: what a shape-generic graph is specialised on."""

    dtype: torch.dtype
    device: torch.device
    ndim: int
    layout: str | tuple[int, ...]
    """"contiguous", "channels last", or the order of the dimensions by stride."""


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """The spec of this tensor."""
    layout: str | tuple[int, ...]
    if tensor.is_contiguous():
        layout = "contiguous"
    elif is_channels_last(tensor):
        layout = "channels last"
    else:
        strides = tensor.stride()
        layout = tuple(sorted(range(tensor.ndim), key=lambda d: -strides[d]))
    return TensorSpec(tensor.dtype, tensor.device, tensor.ndim, layout)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    """Equal for tensors in the same memory."""
    return tensor.untyped_storage()._cdata


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether the tensor is contiguous with channels last, and not contiguous otherwise."""
    last = CHANNELS_LAST.get(tensor.ndim)
    return last is not None and tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor is contiguous, or an image or video that is contiguous with channels last."""
    return tensor.is_contiguous() or is_channels_last(tensor)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy if it is not dense: slices and transposed tensors have strides of their own (at
    a batch of 1, meaningless ones), and each would need a graph of its own."""
    return tensor if is_dense(tensor) else tensor.contiguous()


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether one element in memory stands for several, so that nobody can write to it."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def copy_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the tensor's strides; dense where it is expanded."""
    if is_expanded(tensor):
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def have_equal_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one size are equal; NaN equals itself."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def empty_dense_like(
    tensor: torch.Tensor, shape: Sequence[int] | None = None, device: str | None = None
) -> torch.Tensor:
    """An uninitialised tensor in the layout of a dense one, with exactly the strides that the layout implies; the shape
    and device are the tensor's by default."""
    last = CHANNELS_LAST.get(tensor.ndim)
    return torch.empty(
        tensor.shape if shape is None else shape,
        dtype=tensor.dtype,
        device=device or tensor.device,
        memory_format=torch.contiguous_format if last is None or tensor.is_contiguous() else last,
    )


def share_memory(tensors: Sequence[torch.Tensor], changed: Sequence[int]) -> bool:
    """Whether one of the changed tensors overlaps another tensor in memory: a graph may write its changes at the end,
    where the block would have read them before."""
    return overlap(tensors, pairs(changed, [extent(tensor) for tensor in tensors]))


Pairs = Sequence[tuple[int, int, int, int]]
"""(one, another, low, high), each pair once: they overlap where the other starts between these bytes, seen from where
the one does."""


def pairs(changed: Sequence[int], extents: Sequence[int]) -> Pairs:
    """Each changed tensor with each other one. extents: of all tensors."""
    return [
        (one, other, -extents[other], extents[one])
        for at, one in enumerate(changed)
        for other in range(len(extents))
        if other not in changed[: at + 1]
    ]


def overlap(tensors: Sequence[torch.Tensor], pairs: Pairs) -> bool:
    """Whether the two tensors of a pair overlap in memory."""
    starts = list(map(torch.Tensor.data_ptr, tensors))
    for one, other, low, high in pairs:
        if low < starts[other] - starts[one] < high:
            return True
    return False


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the start of the tensor's first element to the end of its last one; 0 if it is empty."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
