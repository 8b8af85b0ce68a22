"""What must be equal for two calls to share a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..signature.tree_spec import Spec
    from .kinds import Kind


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its sizes: what a shape-generic graph is specialised on."""

    dtype: torch.dtype
    device: torch.device
    ndim: int
    layout: str | tuple[int, ...]
    """"contiguous", "channels last", or the order of the dimensions by stride."""


@dataclass(frozen=True)
class GraphKey:
    """The key of one compiled graph.

    call: how the call is made of tensors, without its values (`tree_spec.without_values`); few graphs are
        kept for the values of one key. inputs: the block's weights, then the call's tensors.
    sizes: the inputs' shapes for an exact-size graph, None for one that serves any size.
    Not part of it, because only values depend on them: sigma, seeds, uuids, LoRA strength.
    """

    kind: Kind
    call: Spec
    inputs: tuple[TensorSpec, ...]
    backend: str
    sizes: tuple[torch.Size, ...] | None = None


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """What a graph is specialised on in this tensor."""
    last = _CHANNELS_LAST.get(tensor.ndim)
    layout: str | tuple[int, ...]
    if tensor.is_contiguous():
        layout = "contiguous"
    elif last is not None and tensor.is_contiguous(memory_format=last):
        layout = "channels last"
    else:
        strides = tensor.stride()
        layout = tuple(sorted(range(tensor.ndim), key=lambda d: -strides[d]))
    return TensorSpec(tensor.dtype, tensor.device, tensor.ndim, layout)
