"""Layers that no compiler can look into, such as those of weights that nothing explains: graphs call them.

In the copy of a block that is compiled, another module stands for such a layer. Its operator calls the layer that is at
its place in the block when the graph runs, wrappers such as a LoRA included. So a graph depends neither on how the
layer's weight is stored nor on what is around it.
"""

from __future__ import annotations

import ast
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..kernels.operators import define
from ..signature.tensors import PLAIN_TENSORS
from .stored_form import Opaque, form_of

_called = threading.local()
"""block: a weak reference to the block that this thread calls."""


class OpaqueLayer(torch.nn.Module):
    """Stands for a layer that gives a tensor of its first input's type and size.

    features: of the result, where its last size is another than the input's. path: of the layer in its block.
    """

    def __init__(self, features: int | None = None):
        super().__init__()
        define("opaque_layer", "(Tensor[] given, str path, str how, SymInt? features) -> Tensor", _run, _fake)
        self.path, self.features = "", features

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given: list[torch.Tensor] = []
        how = _written(_without((args, kwargs), given))
        return torch.ops.accel.opaque_layer(given, self.path, how, self.features)


def begin(block: torch.nn.Module) -> None:
    """This block is called in this thread."""
    _called.block = weakref.ref(block)


class OpaqueLayers:
    """What stands for layers, the same module for a layer each time."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, bool, OpaqueLayer]]
        self._of = weakref.WeakKeyDictionary()

    def linear(self, layer: torch.nn.Module, is_wrapped: bool = False) -> OpaqueLayer | None:
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

    def any(self, layer: torch.nn.Module, features: int | None = None) -> OpaqueLayer:
        """What stands for a layer. features: as of `OpaqueLayer`."""
        if layer not in self._of:
            self._of[layer] = None, True, OpaqueLayer(features)
        return self._of[layer][2]


def _is_opaque(weight: torch.Tensor) -> bool:
    try:
        form_of(weight)
    except Opaque:
        return True
    return False


def _without(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with ... in place of its tensors, which go to the list in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ...
    if isinstance(value, (tuple, list)):
        return type(value)([_without(item, tensors) for item in value])
    if isinstance(value, dict):
        return {name: _without(item, tensors) for name, item in value.items()}
    return value


def _with(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if value is ...:
        return next(tensors)
    if isinstance(value, (tuple, list)):
        return type(value)([_with(item, tensors) for item in value])
    if isinstance(value, dict):
        return {name: _with(item, tensors) for name, item in value.items()}
    return value


@torch.compiler.assume_constant_result
def _written(how: Any) -> str:
    """A call without its tensors as text. Raises ValueError: it has other values than plain ones."""
    text = repr(how).replace("Ellipsis", "...")
    ast.literal_eval(text)
    return text


def _run(given: Sequence[torch.Tensor], path: str, how: str, features: int | None) -> torch.Tensor:
    args, kwargs = _with(ast.literal_eval(how), iter(given))
    out = _called.block().get_submodule(path)(*args, **kwargs)
    first, size = given[0], _size(given, features)
    if type(out) is not torch.Tensor or out.shape != size or out.dtype is not first.dtype:
        got = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, torch.Tensor) else type(out).__name__
        raise TypeError(f"{path} gives {got} for {first.dtype} {tuple(first.shape)}")
    storages = {tensor.untyped_storage().data_ptr() for tensor in given}
    return out.clone() if out.untyped_storage().data_ptr() in storages else out.contiguous()


def _fake(given: Sequence[torch.Tensor], path: str, how: str, features: int | None) -> torch.Tensor:
    return given[0].new_empty(_size(given, features))


def _size(given: Sequence[torch.Tensor], features: int | None) -> tuple[int, ...]:
    size = given[0].shape
    return size if features is None else (*size[:-1], features)
