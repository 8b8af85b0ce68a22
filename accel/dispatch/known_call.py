"""A call of a block as it came before, with the graph that was found for it then.

Most calls of a block in a run are like the one before. They are recognised here, and all that would send them
elsewhere is asked again, in a few microseconds: how the call is made, what the host's options say, the weights'
types, devices and sizes and the inputs', the mode that torch is in, and whether a changed input shares its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch

from ..fingerprint.kinds import WeightSlots
from ..signature.argument_guard import ArgumentGuard, tensor_guard
from ..signature.tensors import extent, is_dense
from ..signature.tree_spec import Spec
from .resolver import Found


class KnownCall:
    """Later calls like one of a block, whose weights and given (not yet dense) inputs these were.

    found: what runs them. No tensor is kept.
    """

    def __init__(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        spec: Spec,
        inputs: Sequence[torch.Tensor],
        slots: WeightSlots,
        replace: Callable[[dict], Any] | None,
        found: Found,
    ):
        self.found = found
        self._guard = ArgumentGuard(args, kwargs, spec, inputs, replace)
        self._holders, self._names = slots.holders, slots.names
        weights, given = slots.read(), self._guard.match(args, kwargs) or ()
        self._check = tensor_guard((*weights, *given))
        self._wants_gradients = any(tensor.requires_grad for tensor in (*weights, *given))
        self._has_sizes = len(given) != len(inputs)
        self._weights = len(weights)
        self._loose = [at for at, tensor in enumerate(inputs, len(weights)) if not is_dense(tensor)]
        changed = found.graph.facts.changed
        self._changed = changed
        self._extents = [extent(tensor) for tensor in inputs] if changed else []

    def tensors(self, args: tuple, kwargs: dict[str, Any]) -> Sequence[torch.Tensor] | None:
        """What the graph takes in this call; None where the call is not known to be one for it.

        Raises `RunEagerly` where the host's options say so, and what `tree_spec.flatten` does.
        """
        given = self._guard.match(args, kwargs)
        if given is None:
            return None
        tensors = (*map(getitem, self._holders, self._names), *given)
        if not self._check(*tensors) or (self._wants_gradients and torch.is_grad_enabled()):
            return None
        if self._changed and self._shares_memory(self._guard.with_numbers(given)):
            return None
        if not (self._has_sizes or self._loose):
            return tensors
        tensors = [*tensors[: self._weights], *self._guard.with_numbers(given)]
        for at in self._loose:
            if at - self._weights in self._changed:
                return None
            tensors[at] = tensors[at].contiguous()
        return tensors

    def _shares_memory(self, inputs: Sequence[torch.Tensor]) -> bool:
        """As `share_memory`, for sizes that are known."""
        starts = [tensor.data_ptr() for tensor in inputs]
        for index in self._changed:
            start, end = starts[index], starts[index] + self._extents[index]
            for other, (begin, length) in enumerate(zip(starts, self._extents, strict=True)):
                if other != index and begin < end and start < begin + length:
                    return True
        return False
