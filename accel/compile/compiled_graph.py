"""One compiled callable over tensors, and which calls it is right for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.reasons import Refusal
from ..fingerprint.block_call import Call
from ..signature.tensors import empty_dense_like
from .specialization import OpTrace, scales_evenly

_MOST_ANSWERS = 128
"""Calls whose answer a graph keeps, the latest ones: more than the blocks of a kind at a few sizes have."""


class CompileFailed(Refusal):
    """The block could not be compiled."""


@dataclass(frozen=True)
class Facts:
    """What a compiled graph is good for, beside its guards; plain enough to be kept as JSON.

    static_ones: (tensor, dimension) pairs that were 1 in the example and are taken as 1.
    weights: how many of the tensors are weights; the inputs follow.
    changed: indices of the inputs that the block writes to, the first input being 0.
    dynamic: the graph serves any size.
    values: the numbers and texts among the call's arguments that are compiled in (`tree_spec.without_values`).
    fixed: (tensor, dimension, size) of the sizes that the graph is specialised on, though they might vary.
    grown: (tensor, dimension, size) of the sizes above 1, in the call it was made for, that a batch of 2 doubles.
    """

    static_ones: tuple[tuple[int, int], ...] = ()
    weights: int = 0
    changed: tuple[int, ...] = ()
    dynamic: bool = True
    values: tuple[str, ...] = ()
    fixed: tuple[tuple[int, int, int], ...] = ()
    grown: tuple[tuple[int, int, int], ...] = ()

    def allow(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the graph may be right for these weights and inputs; its guards may still say no."""
        sizes = (*((i, d, 1) for i, d in self.static_ones), *self.fixed)
        return all(i < len(tensors) and tensors[i].shape[d] == size for i, d, size in sizes)

    def may_serve(self, call: Call) -> bool:
        """Whether a graph with these facts might run the call."""
        return self.values == call.values and self.allow(call.tensors)


@dataclass(eq=False)
class CompiledGraph:
    """One compiled callable: `run(tensors)` for calls that `accepts(tensors)`.

    nbytes: memory that its code takes, bytes; 0 when unknown.
    trace: the block's operations in such a call, or None where it needs their values; None for a graph of one size.
    save: gives the bytes that the graph can be loaded from (`block_compiler.load_block`), or raises
        `backend.NotSavable`; None for a graph that was saved or loaded, or cannot leave the process.
    saved_as: its name in the store; None where it is not there.
    does_the_same: whether the block does the same in such a call with other `Kind.numbers` on it.
    """

    run: Callable[[Sequence[torch.Tensor]], Any]
    guards: Callable[[Sequence[torch.Tensor]], bool]
    facts: Facts = Facts()
    nbytes: int = 0
    trace: Callable[[Sequence[torch.Tensor]], OpTrace | None] | None = None
    save: Callable[[], bytes] | None = None
    saved_as: str | None = None
    does_the_same: Callable[[Sequence[torch.Tensor], Sequence[int]], bool] = lambda tensors, numbers: False
    _answers: dict[tuple, bool] = field(default_factory=dict, init=False, repr=False)

    def serves(self, call: Call) -> bool:
        """Whether the graph is right for the call."""
        if self.facts.values == call.values:
            return self.accepts(call.tensors)
        of_the_call = len(call.values) - len(call.numbers)
        if self.facts.values[:of_the_call] != call.values[:of_the_call] or not self.accepts(call.tensors):
            return False
        key = (call.numbers, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in call.tensors))
        return self._answer(key, lambda: self.does_the_same(call.tensors, call.numbers))

    def accepts(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the graph is right for these weights and dense inputs.

        Tracing leaves guards that a size is not 1, most of them needless: torch asks it of layouts. Where they alone
        refuse a call, it is accepted if the block itself does the same with 2 and with 3 in place of each 1. What has
        two rows for an image (time steps of a picture and of its references) then has 4 and 6.

        That takes tens of milliseconds, and each block of each run asks. The answer is kept: it follows from what is in
        its key here and from the graph, whose guards and template nobody changes, so nothing makes it untrue.
        """
        if not self.facts.allow(tensors):
            return False
        weights, inputs = tensors[: self.facts.weights], tensors[self.facts.weights :]
        key = (
            *((tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset()) for tensor in weights),
            *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs),
        )
        return self._answer(key, lambda: self._is_right_for(weights, inputs))

    def _answer(self, key: tuple, find: Callable[[], bool]) -> bool:
        answer = self._answers.pop(key, None)
        if answer is None:
            answer = find()
            if len(self._answers) >= _MOST_ANSWERS:
                self._answers.pop(next(iter(self._answers)), None)
        self._answers[key] = answer
        return answer

    def _is_right_for(self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
        ones = [empty_dense_like(tensor, device="meta") for tensor in inputs]
        if self.guards((*weights, *ones)):
            return True
        if self.trace is None:
            return False
        twos, threes = (
            [self._without_ones(index, tensor, size) for index, tensor in enumerate(ones, self.facts.weights)]
            for size in (2, 3)
        )
        if not self.guards((*weights, *twos)) or not self.guards((*weights, *threes)):
            return False
        return scales_evenly([self.trace((*weights, *same)) for same in (ones, twos, threes)])

    def _without_ones(self, index: int, tensor: torch.Tensor, instead: int) -> torch.Tensor:
        static = {d for i, d in self.facts.static_ones if i == index}
        grown = {d for i, d, size in self.facts.grown if i == index and size == tensor.shape[d]}
        shape = [
            size * instead if (size == 1 and d not in static) or d in grown else size
            for d, size in enumerate(tensor.shape)
        ]
        return empty_dense_like(tensor, shape)
