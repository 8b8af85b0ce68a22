"""LoRA: what wrappers around the layers of a block add to its weights, read at each call of the block.

The merged weights are computed for the call, by one matrix product for each wrapped layer and adapter, and not kept.
They are rounded to the dtype of the layer's weight, as merging for good does: the error is about that of rounding a
layer's output in float16 and bfloat16, and negligible in float32.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from typing import Any

import torch

from ..core.errors import one_line
from ..core.reasons import Reason, RunEagerly
from ..fingerprint.code_facts import facts_of
from ..fingerprint.plain_values import is_plain_object
from ..modules import wrapped_layers
from ..modules.opaque_layers import OpaqueLayer
from ..modules.wrapped_layers import LowRank, Reader, Wraps

Added = Sequence[tuple[int, int | None, Sequence[LowRank]]]
"""(index of the weight, index of the bias or None, low-rank terms) of each layer to which something is added."""


class AddedWeights:
    """Reads the wrappers in one block, and finds them again when its submodules have been replaced. names: of the
    block's weights, without its wrappers, in the order in which its graphs take them."""

    def __init__(self, block: torch.nn.Module, names: Sequence[str], wraps: Wraps):
        index: Any = {name: at for at, name in enumerate(names)}
        parts = {part: f"{path}." if path else "" for path, part in wrapped_layers.modules(block, wraps)}
        self._wraps = wraps
        self._indices = {part: (index.get(f"{path}weight"), index.get(f"{path}bias")) for part, path in parts.items()}
        self._places = [
            (part, part._modules, name) for part in parts for name, child in part._modules.items() if child is not None
        ]
        self._layers = [wrapped_layers.find_shown_part(modules[name], wraps) for _, modules, name in self._places]
        self._children: list[torch.nn.Module | None] = []
        self._readers: list[tuple[int, int | None, Reader]] = []
        self._refusal: Reason | None = None

    def read(self) -> Added:
        """What is added in this call. Raises RunEagerly: a wrapper does more, or the block was changed in another
        way."""
        children = [modules.get(name) for _, modules, name in self._places]
        if children != self._children:
            wrapped: dict[torch.nn.Module, torch.nn.Module] = {}
            self._refusal = self._why_not(children, wrapped)
            self._readers = [
                (*self._indices[layer], self._wraps.reader(wrapper, layer))
                for layer, wrapper in wrapped.items()
                if self._refusal is None and not isinstance(layer, OpaqueLayer)  # called with what is around it
            ]
            self._children = children
        if self._refusal is not None:
            raise RunEagerly(self._refusal)
        if not self._readers:
            return ()
        added = [(weight, bias, items) for weight, bias, read in self._readers if (items := read())]
        if torch.is_grad_enabled():
            values = (value for _, _, items in added for item in items for value in item)
            if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
                raise RunEagerly(Reason("gradients"))
        return added

    def _why_not(
        self, children: Sequence[torch.nn.Module | None], wrapped: dict[torch.nn.Module, torch.nn.Module]
    ) -> Reason | None:
        """Why nothing can be added to the block's weights as it is now; None where it can. wrapped: gets the wrapped
        layers, each with its wrapper."""
        bare: set[torch.nn.Module] = set()
        for (parent, _, name), layer, child in zip(self._places, self._layers, children, strict=True):
            if child is None or wrapped_layers.find_shown_part(child, self._wraps) is not layer:
                return Reason("layer_wrapped", layer=name, how="was replaced after the model was analysed")
            if child is layer:
                bare.add(layer)
                continue
            if wrapped.setdefault(layer, child) is not child:
                return Reason("layer_wrapped", layer=name, how="is wrapped in two ways")
            if _may_read_weights(parent):
                how = f"is wrapped, and {type(parent).__name__} reads weights of its parts"
                return Reason("layer_wrapped", layer=name, how=how)
        owners = [id(tensor) for layer in self._indices for tensor in layer._parameters.values() if tensor is not None]
        for layer in wrapped:
            shared = any(owners.count(id(tensor)) > 1 for tensor in layer._parameters.values())
            is_read = not isinstance(layer, OpaqueLayer)
            if layer in bare or shared or (is_read and self._indices[layer][0] is None):
                how = "is wrapped, and its weight is used elsewhere too"
                return Reason("layer_wrapped", layer=type(layer).__name__, how=how)
        return None


def add_updates(weights: Sequence[torch.Tensor], added: Added) -> Sequence[torch.Tensor]:
    """The weights plus what is added to them, of the same shapes, dtypes, devices and layouts. Raises RunEagerly: it
    does not fit them, or memory is short."""
    if not added:
        return weights
    made = list(weights)
    try:
        for weight, bias, items in added:
            for item in items:
                made[weight] = _add_update(made[weight], item)
                if item.bias is not None:
                    if bias is None:
                        raise RunEagerly(Reason("not_addable", why="a layer has no bias"))
                    made[bias] = made[bias] + (item.bias * item.scale).to(made[bias].dtype)
    except RuntimeError as error:  # another device or shape, too little memory
        reason = Reason("not_addable", why=one_line(error))
    else:
        return made
    raise RunEagerly(reason)  # outside of the handler, whose exception would keep the weights made so far


def _add_update(weight: torch.Tensor, item: LowRank) -> torch.Tensor:
    up, down, scale = item.up, item.down, item.scale
    if isinstance(scale, torch.Tensor):
        up, scale = up * scale, 1
    if weight.ndim > 2:
        up, down = up.flatten(1), down.flatten(1)
    if down.dtype is weight.dtype and weight.is_contiguous():
        if weight.ndim == 2:
            return torch.addmm(weight, up, down, alpha=scale)
        return torch.addmm(weight.flatten(1), up, down, alpha=scale).view(weight.shape)
    plus = torch.add(weight, (up @ down).view(weight.shape), alpha=scale).to(weight.dtype)
    if plus.stride() != weight.stride():
        raise RunEagerly(Reason("not_addable", why="a weight has gaps in memory"))
    return plus


def _may_read_weights(parent: torch.nn.Module) -> bool:
    """Whether the code that calls a module's children may read their weights itself, and so miss what is added."""
    objects = (value for value in vars(parent).values() if is_plain_object(value) and callable(value))
    called = map(inspect.unwrap, (type(parent).forward, *(type(value).__call__ for value in objects)))
    codes = [function.__code__ for function in called if isinstance(function, types.FunctionType)]
    return any(not facts_of(code).names.isdisjoint(("weight", "bias")) for code in codes)
