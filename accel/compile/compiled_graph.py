"""One compiled callable over tensors, and which calls it is right for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core.reasons import Refusal
from ..fingerprint.block_call import Call
from ..signature.tensors import empty_dense_like
from .backend import Pending
from .specialization import holds

_MOST_ANSWERS = 128
"""Calls whose answer a graph keeps, the latest ones: more than the blocks of a kind at a few sizes have."""


class CompileFailed(Refusal):
    """The block could not be compiled."""

    @property
    def is_of_compiler(self) -> bool:
        """Whether the compiler gave up; other sizes, or the block without others' parts, may succeed."""
        return self.reason.code in ("compile_failed", "untraceable")


@dataclass(frozen=True)
class Facts:
    """What a compiled graph is good for, beside its guards; plain enough to be kept as JSON.

    static_ones: (tensor, dimension) pairs that were 1 in the example and are taken as 1.
    weights: how many of the tensors are weights; the inputs follow.
    changed: indices of the inputs that the block writes to, the first input being 0.
    dynamic: the graph serves any size.
    values: the numbers and texts among the call's arguments that are compiled in (`tree_spec.remove_values`).
    fixed: (tensor, dimension, size) of the sizes that the graph is specialised on: its weights', and others that it
        fixed though they might vary.
    grown: (tensor, dimension, size) of the sizes above 1, in the call it was made for, that a batch of 2 doubles.
    ones: (tensor, dimension, size) of each size that may be 1, or is so in a batch of 1, and what the block's code then
        asks of the others, as `specialization.Trace.asked`; of calls for which the block is known to do the same.
    asked: what code that was made beside asks of sizes, and its guards do not; as `specialization.Trace.asked`.
    """

    static_ones: tuple[tuple[int, int], ...] = ()
    weights: int = 0
    changed: tuple[int, ...] = ()
    dynamic: bool = True
    values: tuple[str, ...] = ()
    fixed: tuple[tuple[int, int, int], ...] = ()
    grown: tuple[tuple[int, int, int], ...] = ()
    ones: tuple[tuple[tuple[tuple[int, int, int], ...], str], ...] = ()
    asked: str = ""

    def allow(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the graph may be right for these weights and inputs; its guards may still say no."""
        sizes = (*((i, d, 1) for i, d in self.static_ones), *self.fixed)
        return all(i < len(tensors) and tensors[i].shape[d] == size for i, d, size in sizes)


@dataclass(eq=False)
class CompiledGraph:
    """One compiled callable: `run(tensors)` for calls that `accepts(tensors)`.

    nbytes: memory that its code takes, bytes; 0 when unknown.
    save: gives the bytes that the graph can be loaded from (`block_compiler.load_block`), or raises
        `backend.NotSavable`; None for a graph that was saved or loaded, or cannot leave the process.
    identity: what it is saved under (`GraphStore.identify`). saved_as: its name in the store, where it is there.
    pending: its code, which is being made beside; it runs no call until that is taken.
    with_ones: `block_compiler._Block.find_conditions_on_ones` of the block.
    """

    run: Callable[[Sequence[torch.Tensor]], Any]
    guards: Callable[[Sequence[torch.Tensor]], bool]
    facts: Facts = Facts()
    nbytes: int = 0
    save: Callable[[], bytes] | None = None
    identity: tuple[str, dict[str, str]] | None = None
    saved_as: str | None = None
    with_ones: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], str | None] = lambda ones, twos: ""
    pending: Pending | None = None
    _answers: dict[tuple, bool] = field(default_factory=dict, init=False, repr=False)
    _asked_with: dict[tuple, str | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._asked_with = dict(self.facts.ones)

    def take_code(self) -> None:
        """Take the pending code; `block_compiler.take_code` calls it."""
        asked, self.nbytes = self.pending.take()
        self.facts, self.pending = replace(self.facts, asked=asked), None
        self._answers.clear()

    def serves(self, call: Call) -> bool:
        """Whether the graph is right for the call."""
        return self.facts.values == call.values and self.accepts(call.tensors)

    def accepts(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the graph is right for these weights and dense inputs.

        Where sizes of 1 were not in the trace the guards say little of them: torch leaves some that a size is not 1,
        most of them needless, and none for code to which 1 is special (`squeeze`). So such a call is accepted if the
        block does the same with them, and the guards let it pass, or let 2 and 3 pass in place of each 1. What has two
        rows for an image (time steps of a picture and of its references) then has 4 and 6.

        Each block of each run asks. The answer is kept: it follows from what is in its key here and from the graph,
        whose guards and template nobody changes, so nothing makes it untrue.
        """
        if not self.facts.allow(tensors):
            return False
        weights, inputs = tensors[: self.facts.weights], tensors[self.facts.weights :]
        key = (
            *((tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset()) for tensor in weights),
            *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs),
        )
        answer = self._answers.pop(key, None)
        if answer is None:
            answer = self._is_right_for(weights, inputs)
            if len(self._answers) >= _MOST_ANSWERS:
                self._answers.pop(next(iter(self._answers)), None)
        self._answers[key] = answer
        return answer

    def _is_right_for(self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
        ones = [empty_dense_like(tensor, device="meta") for tensor in inputs]
        accepts = self._lets_pass((*weights, *ones))
        if not self.facts.dynamic:
            return accepts
        inputs_at = list(enumerate(ones, self.facts.weights))
        twos, threes = ([self._replace_ones(index, tensor, size) for index, tensor in inputs_at] for size in (2, 3))
        sizes = tuple(
            (index, dimension, size)
            for (index, tensor), larger in zip(inputs_at, twos, strict=True)
            for dimension, size in enumerate(tensor.shape)
            if size != larger.shape[dimension]
        )
        if not sizes:
            return accepts
        if not accepts and not (self._lets_pass((*weights, *twos)) and self._lets_pass((*weights, *threes))):
            return False
        if sizes not in self._asked_with:
            self._asked_with[sizes] = self.with_ones((*weights, *inputs), (*weights, *twos))
            known = ((kept, asked) for kept, asked in self._asked_with.items() if asked is not None)
            self.facts = replace(self.facts, ones=tuple(known))
        asked = self._asked_with[sizes]
        return asked is not None and holds(asked, (*weights, *ones))

    def _lets_pass(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self.guards(tensors) and holds(self.facts.asked, tensors)

    def _replace_ones(self, index: int, tensor: torch.Tensor, instead: int) -> torch.Tensor:
        static = {d for i, d in self.facts.static_ones if i == index}
        grown = {d for i, d, size in self.facts.grown if i == index and size == tensor.shape[d]}
        shape = [
            size * instead if (size == 1 and d not in static) or d in grown else size
            for d, size in enumerate(tensor.shape)
        ]
        return empty_dense_like(tensor, shape)
