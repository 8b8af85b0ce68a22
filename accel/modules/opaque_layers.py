"""Linear layers that no compiler can look into, such as those of weights that nothing explains: graphs call them.

In the copy of a block that is compiled, another module stands for such a layer. Its operator calls the layer that is at
its place in the block when the graph runs, wrappers such as a LoRA included. So a graph depends neither on how the
layer's weight is stored nor on what is around it.
"""

from __future__ import annotations

import threading
import weakref

import torch

from ..kernels.operators import define
from ..signature.tensors import PLAIN_TENSORS
from .stored_form import Opaque, form_of

_called = threading.local()
"""block: a weak reference to the block that this thread calls."""


class OpaqueLayer(torch.nn.Module):
    """Stands for a linear layer. x: [..., I] to [..., features], of the same type.

    path: of the layer in its block.
    """

    def __init__(self, features: int):
        super().__init__()
        define("opaque_layer", "(Tensor x, str path, SymInt features) -> Tensor", _run, _fake)
        self.path, self.features = "", features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.accel.opaque_layer(x, self.path, self.features)


def begin(block: torch.nn.Module) -> None:
    """This block is called in this thread."""
    _called.block = weakref.ref(block)


class OpaqueLayers:
    """What stands for layers, the same module for a layer each time."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[torch.nn.Module, tuple[type, bool, OpaqueLayer]]
        self._of = weakref.WeakKeyDictionary()

    def of(self, layer: torch.nn.Module, is_wrapped: bool = False) -> OpaqueLayer | None:
        """What stands for the layer; None where it can be traced, or is no linear layer.

        is_wrapped: something around the layer adds to its result, which can be traced on plain weights alone.
        """
        weight = layer._parameters.get("weight")
        if weight is None or type(weight) in PLAIN_TENSORS or not isinstance(layer, torch.nn.Linear):
            return None
        known = self._of.get(layer)
        if known is None or known[0] is not type(weight):
            known = self._of[layer] = type(weight), _is_opaque(weight), OpaqueLayer(layer.out_features)
        _, is_opaque, stand_in = known
        return stand_in if is_opaque or is_wrapped else None


def _is_opaque(weight: torch.Tensor) -> bool:
    try:
        form_of(weight)
    except Opaque:
        return True
    return False


def _run(x: torch.Tensor, path: str, features: int) -> torch.Tensor:
    out = _called.block().get_submodule(path)(x)
    if out.shape != (*x.shape[:-1], features) or out.dtype is not x.dtype:
        raise TypeError(f"{path} gives {out.dtype} {tuple(out.shape)} for {x.dtype} {tuple(x.shape)}")
    return out.contiguous()


def _fake(x: torch.Tensor, path: str, features: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], features))
