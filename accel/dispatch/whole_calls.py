"""Which blocks of a model have their stand-ins in place in a call: none that would only let the block's call pass by.

A graph that is left aside ("slower", say) is so for every call like that one in the run. Asking for it again takes
Python longer than many a kernel takes the device. So calls of one size are looked at until nothing more is compared in
them, at least once in each run; from then on they are made without the stand-ins of blocks that ran uncompiled in them,
until the code changes or a graph leaves the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..cache.graph_cache import GraphCache
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason
from ..core.torch_internals import seen_through
from ..modules.substitution import Forward, Layer, Order, Substitution
from .block_runner import COMPARED, COMPILED, BlockRunner
from .current_code import CurrentCode


class WholeCalls:
    """What stands in for one model's blocks in its calls of one run, which are made by one thread at a time.

    layers: of the blocks, and of the model unless its own is in place around these.
    """

    def __init__(self, layers: Mapping[torch.nn.Module, Layer], cache: GraphCache):
        self._layers, self._cache = layers, cache
        self._all = Substitution(layers, Order.COMPILED)
        self._runners = {block: layer for block, layer in layers.items() if isinstance(layer, BlockRunner)}
        self._code = next((runner.code for runner in self._runners.values()), None)
        self._plans: dict[Hashable, _Plan] = {}
        self._made: list[_Plan] = []

    @contextmanager
    def in_place(self, given: Iterable[Any], phase: Hashable = None, are_alike: bool = True) -> Iterator[None]:
        """A context for one call with these arguments. are_alike: calls of the same sizes and phase call the same
        blocks, and will not be captured."""
        if not are_alike or self._code is None or not self._code.is_first:
            with self._all.in_place():
                yield
            return
        key = phase, *map(_sizes, given)
        plan = self._plans.get(key)
        if plan is not None and plan.generation == self._cache.generation:
            with plan.substitution.in_place():
                yield
            return
        runners = list(self._runners.values())
        before = [runner.eager_calls for runner in runners]
        for runner in runners:
            runner.ways.clear()
        with self._all.in_place():
            yield
        ways = set().union(*(runner.ways for runner in runners))
        if ways and COMPARED not in ways:
            self._plans[key] = self._plan(before)

    @property
    def eager_calls(self) -> int:
        """Calls of blocks whose stand-ins were away."""
        return sum(plan.passes * plan.left.total() for plan in self._made)

    def note(self) -> None:
        """Tell of them, at the end of the run."""
        for plan in self._made:
            for (name, reason), calls in plan.left.items():
                if reason is not None:
                    fallbacks.note(name, reason, calls=calls * plan.passes)

    def _plan(self, before: Iterable[int]) -> _Plan:
        """What calls like the last one are made with. before: `eager_calls` of the runners then."""
        left: Counter[tuple[str, Reason | None]] = Counter()
        blocks = []
        for (block, runner), calls in zip(self._runners.items(), before, strict=True):
            if runner.ways and COMPILED not in runner.ways:
                left[runner.kind.name, next(iter(runner.ways))] += runner.eager_calls - calls
                blocks.append(block)
        self._made.append(_Plan(self._layers, blocks, left, self._code, self._cache.generation))
        return self._made[-1]


class _Plan:
    """What is in place in calls of one size.

    without: the blocks that are left alone. left: calls of them in one of the model, by name and reason. passes: calls
    of the model that got as far as the first of them. generation: of the cache.
    """

    def __init__(
        self,
        layers: Mapping[torch.nn.Module, Layer],
        without: Collection[torch.nn.Module],
        left: Counter[tuple[str, Reason | None]],
        code: CurrentCode,
        generation: int,
    ):
        self.left, self.generation, self.passes = left, generation, 0
        self._code, self._first = code, next(iter(without), None)
        layers = {module: layer for module, layer in layers.items() if module not in without}
        if self._first is not None:
            layers[self._first] = self._passed
        self.substitution = Substitution(layers, Order.COMPILED)

    @seen_through
    def _passed(self, inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """A call of the first block that is left alone: the one that still asks for the code, and counts."""
        if not torch.compiler.is_dynamo_compiling():
            self.passes += 1
            if self._code.is_due:
                self._code.compare(self._first, again=False)
        return inner(*args, **kwargs)


def _sizes(value: Any) -> Hashable:
    """What of an argument decides the sizes of what blocks are called with."""
    if isinstance(value, torch.Tensor):
        return value.shape
    return tuple(map(_sizes, value)) if isinstance(value, (list, tuple)) else value is None
