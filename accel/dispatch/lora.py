"""What the wrappers in a block add to its weights, read anew at each call of the block.

The weights that a graph gets are made for the call, by one matrix product for each wrapped layer and adapter,
and no copy of them is kept. They are rounded to the type of the layer's weight, as by merging: in float16 and
bfloat16 that costs about what rounding a layer's output costs, in float32 nothing to speak of.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..core.errors import one_line
from ..core.reasons import Reason, RunEagerly
from ..fingerprint.plain_values import is_plain_object
from ..modules import wrapped_layers
from ..modules.wrapped_layers import LowRank, Reader, Wraps

Added = Sequence[tuple[int, int | None, Sequence[LowRank]]]
"""(index of the weight, index of the bias, what is added to them), of the layers to which something is added."""


class AddedWeights:
    """Asks the wrappers in one block, and looks for others when its parts are no longer those that it had.

    names: of the block's weights, without its wrappers, in the order in which its graphs take them.
    """

    def __init__(self, block: torch.nn.Module, names: Sequence[str], wraps: Wraps):
        index = {name: at for at, name in enumerate(names)}
        parts = {part: f"{path}." if path else "" for path, part in wrapped_layers.modules(block, wraps)}
        self._wraps = wraps
        self._indices = {part: (index.get(f"{path}weight"), index.get(f"{path}bias")) for part, path in parts.items()}
        self._places = [
            (part, part._modules, name) for part in parts for name, child in part._modules.items() if child is not None
        ]
        self._layers = [wrapped_layers.bare(held[name], wraps) for _, held, name in self._places]
        self._children: list[torch.nn.Module | None] = []
        self._readers: list[tuple[int, int | None, Reader]] = []
        self._refusal: Reason | None = None

    def now(self) -> Added:
        """What is added in this call.

        Raises:
            RunEagerly: it cannot be had by adding to weights, or the block was changed in another way.
        """
        children = [held.get(name) for _, held, name in self._places]
        if children != self._children:
            self._look(children)
        if self._refusal is not None:
            raise RunEagerly(self._refusal)
        if not self._readers:
            return ()
        added = [(weight, bias, items) for weight, bias, read in self._readers if (items := read())]
        if torch.is_grad_enabled() and any(_wants_gradients(item) for _, _, items in added for item in items):
            raise RunEagerly(Reason("gradients"))
        return added

    def _look(self, children: list[torch.nn.Module | None]) -> None:
        self._children, self._readers = children, []
        wrapped: dict[torch.nn.Module, torch.nn.Module] = {}
        self._refusal = self._unlike(children, wrapped)
        if self._refusal is None:
            for layer, wrapper in wrapped.items():
                self._readers.append((*self._indices[layer], self._wraps.reader(wrapper, layer)))

    def _unlike(
        self, children: Sequence[torch.nn.Module | None], wrapped: dict[torch.nn.Module, torch.nn.Module]
    ) -> Reason | None:
        """Why nothing can be added to the block's weights as it is now; else None.

        wrapped: gets the layers that are wrapped, with their wrappers.
        """
        bare: set[torch.nn.Module] = set()
        for (parent, _, name), layer, child in zip(self._places, self._layers, children, strict=True):
            if child is None or wrapped_layers.bare(child, self._wraps) is not layer:
                return Reason("layer_replaced", layer=name)
            if child is layer:
                bare.add(layer)
                continue
            if wrapped.setdefault(layer, child) is not child:
                return Reason("layer_wrapped_twice", layer=name)
            if _reads_weights(parent):
                return Reason("wrapped_layer_read", layer=name, reader=type(parent).__name__)
        owners = [id(tensor) for layer in self._indices for tensor in layer._parameters.values() if tensor is not None]
        for layer in wrapped:
            shared = any(owners.count(id(tensor)) > 1 for tensor in layer._parameters.values())
            if layer in bare or shared or self._indices[layer][0] is None:
                return Reason("wrapped_weight_shared", layer=type(layer).__name__)
        return None


def with_added(weights: Sequence[torch.Tensor], added: Added) -> Sequence[torch.Tensor]:
    """The weights with what is added to them; shapes, types, devices and layouts stay.

    Raises:
        RunEagerly: it does not fit them.
    """
    if not added:
        return weights
    made = list(weights)
    try:
        for weight, bias, items in added:
            for item in items:
                made[weight] = _plus(made[weight], item)
                if item.bias is not None:
                    if bias is None:
                        raise RunEagerly(Reason("added_to_no_bias"))
                    made[bias] = made[bias] + (item.bias * item.scale).to(made[bias].dtype)
    except RuntimeError as error:  # another device or shape, too little memory
        reason = Reason("nothing_addable", error=one_line(error))
    else:
        return made
    raise RunEagerly(reason)  # outside of the handler, whose exception would keep the weights made so far


def _plus(weight: torch.Tensor, item: LowRank) -> torch.Tensor:
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
        raise RunEagerly(Reason("added_to_gaps"))
    return plus


def _wants_gradients(item: LowRank) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in item)


def _reads_weights(parent: torch.nn.Module) -> bool:
    """Whether the code that calls a module's parts may look at weights itself: it would not see what is added."""
    called = [type(parent).forward, *(type(held).__call__ for held in vars(parent).values() if _is_called(held))]
    return any(not {"weight", "bias"}.isdisjoint(_names(inspect.unwrap(function))) for function in called)


def _is_called(value: Any) -> bool:
    return is_plain_object(value) and callable(value)


def _names(function: Any) -> Iterator[str]:
    codes = [function.__code__] if isinstance(function, types.FunctionType) else []
    for code in codes:
        yield from code.co_names
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
