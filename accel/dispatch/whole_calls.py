"""Which blocks of a model have their stand-ins in place in a call: none that would only let the block's call pass by.

Calls of one size are looked at until nothing more is compared in them. From then on they are made without the stand-ins
of blocks that ran uncompiled, in later runs too, until the code changes or a graph leaves the cache.

In a step, whose code does not fit the processor's caches, Python takes longer than in a block that is timed alone. So
where graphs are timed and the device waits for Python, whole calls are timed too, with stand-ins and without by turns.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..cache.graph_cache import GraphCache
from ..core.compile_settings import CompileSettings
from ..core.events import emit
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason
from ..core.torch_internals import allow_inlining
from ..modules.substitution import Forward, Layer, Order, Substitution
from .block_runner import COMPARED, COMPILED, BlockRunner
from .call_times import CallTime, CallTimes
from .current_code import CurrentCode

WORTH_IT = 1.1
"""CUDA graphs that would make calls so many times as fast are worth another allocator."""

LOOKS = 8
"""One in so many calls without a block's stand-in asks for the code, which takes longer than all else there; that
decides how calls are made, not what they give."""

MOST_KNOWN = 256
"""Sizes of calls of which something is known; then all is found anew."""


class WholeCalls:
    """What stands in for one model's blocks in its calls of one run, which are made by one thread at a time.

    name: of the model. layers: of the blocks, and of the model unless its own is in place around these.
    settings: with which they were made.
    """

    def __init__(
        self, name: str, layers: Mapping[torch.nn.Module, Layer], cache: GraphCache, settings: CompileSettings
    ):
        self._name, self._layers, self._cache, self._settings = name, layers, cache, settings
        self.runners = {block: layer for block, layer in layers.items() if isinstance(layer, BlockRunner)}
        self._code = next((runner.code for runner in self.runners.values()), None)
        self._all = _StandIns(layers, {}, self._code, is_bare=False)
        self._made: dict[tuple[_Known, bool, int], _StandIns] = {}
        self._met: Counter[_Known] = Counter()
        self.unspared: Reason | None = None
        """Why the allocator forbids the CUDA graphs that would spare Python its part of a call, where it does."""

    @contextmanager
    def put_in_place(self, given: Sequence[Any], are_alike: bool = True) -> Iterator[None]:
        """A context for one call with these arguments. are_alike: those of the same sizes call the same
        blocks, and will not be captured."""
        known = self._find_known(given) if are_alike and self._code is not None else None
        device = next((value.device for value in given if isinstance(value, torch.Tensor)), None)
        used, pause = (self._all, None) if known is None else self._choose_stand_ins(known, device)
        used.asked.clear()
        if used is self._all or pause is not None:
            for runner in self.runners.values():
                runner.ways.clear()
        time = None if pause is None else CallTime(device, pause)
        with used.substitution.put_in_place():
            yield
        if time is not None:
            time.stop()
        if known is not None and self._code.known is not None:  # else other code ran than what is known is about
            self._learn(known, used, time)

    def end(self) -> int:
        """How many calls of blocks had no stand-in, noted with their reasons; emits what CUDA graphs would give."""
        timed = [(calls * known.times.wall, by) for known, calls in self._met.items() if (by := known.times.spared)]
        now, spared = sum(seconds for seconds, _ in timed), sum(seconds / by for seconds, by in timed)
        if self.unspared is not None and now >= WORTH_IT * spared > 0:
            emit("graphs_would_give", times=now / spared)
        for (known, is_bare, _), used in self._made.items():
            slow = known.times.verdict
            if slow is not None and self.unspared is not None:
                slow = Reason("host_bound_without_graphs", slow=slow)
            for block, reason in used.left.items():
                runner = self.runners[block]
                name, why = (self._name, slow) if is_bare else (runner.kind.name, reason or runner.no_graph_reason)
                if used.passes and why is not None:
                    fallbacks.note(name, why, calls=used.passes)
        return sum(used.passes * len(used.left) for used in self._made.values())

    def _choose_stand_ins(self, known: _Known, device: torch.device | None) -> tuple[_StandIns, float | None]:
        """The stand-ins for the next call, and for how many seconds it pauses first, where it is timed."""
        times, left, pause = known.times, known.left, None
        is_bare = not times.is_due and times.verdict is not None
        is_on_card = device is not None and device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        if left is not None and self._settings.measured and is_on_card:
            if times.is_due and len(left) < len(known.called):
                is_bare, pause = times.next_is_bare, 0.0
            elif self.unspared is not None and times.spared is None:
                pause = 2 * times.wall
        return (self._all if left is None and not is_bare else self._make_stand_ins(known, is_bare)), pause

    def _learn(self, known: _Known, used: _StandIns, time: CallTime | None) -> None:
        """Note what a call says of others like it. time: of the call, where it was timed."""
        if used is self._all:
            known.left, known.called, known.looks = self._find_uncompiled(), self._find_called(), known.looks + 1
        elif time is not None:
            calls_others = used.asked | self._find_called() != used.ends | (known.called - used.left.keys())
            if known.left is None or calls_others or self._find_uncompiled() not in (None, {}):
                known.left = None  # calls like it call other blocks now, or compare some: they are looked at anew
            elif known.times.is_due and len(known.left) < len(known.called):
                known.times.add(time, used.is_bare)
            else:
                known.times.add_unspared(time)

    def _find_known(self, given: Sequence[Any]) -> _Known | None:
        """What is known of calls like this one; None where nothing can be."""
        of_model = self._code.known
        if of_model is None:
            return None
        if len(of_model) >= MOST_KNOWN:
            of_model.clear()
        known = of_model.setdefault((self._cache, self._settings, *map(_sizes, given)), _Known())
        self._met[known] += 1
        if self._met[known] == 1 and known.left and None in known.left.values():  # which may be otherwise in this run
            known.left = None
        if known.generation != self._cache.generation:
            known.left, known.generation = None, self._cache.generation
        return known

    def _make_stand_ins(self, known: _Known, is_bare: bool) -> _StandIns:
        how = known, is_bare, known.looks
        if how not in self._made:
            left = dict.fromkeys(at for at in self.runners if at in known.called) if is_bare else known.left or {}
            self._made[how] = _StandIns(self._layers, left, self._code, is_bare)
        return self._made[how]

    def _find_called(self) -> set[torch.nn.Module]:
        """The blocks whose stand-ins the last call has asked."""
        return {block for block, runner in self.runners.items() if runner.ways}

    def _find_uncompiled(self) -> dict[torch.nn.Module, Reason | None] | None:
        """The blocks that the last call left uncompiled, as calls like it will; None where it compared some, or called
        none."""
        of_blocks: dict[torch.nn.Module, set[Any]] = {block: runner.ways for block, runner in self.runners.items()}
        ways = set().union(*of_blocks.values())
        if not ways or COMPARED in ways:
            return None
        return {block: next(iter(of)) for block, of in of_blocks.items() if of and COMPILED not in of}


class _Known:
    """What runs have found of a model's calls of one size.

    left: the blocks that need no stand-in, each with the reason, unless its runner has it; None until nothing is
    compared in them. called: the blocks that such calls call. looks: how often that was found. generation: of the cache
    then.
    """

    def __init__(self) -> None:
        self.left: dict[torch.nn.Module, Reason | None] | None = None
        self.called: set[torch.nn.Module] = set()
        self.looks, self.generation = 0, 0
        self.times = CallTimes()


class _StandIns:
    """What is in place in calls, but for the blocks in `left`. is_bare: these are all that such calls call. passes:
    calls of the first of them."""

    def __init__(self, layers: Mapping[torch.nn.Module, Layer], left: Mapping, code: CurrentCode | None, is_bare: bool):
        self.left, self.is_bare, self.passes, self._code = left, is_bare, 0, code
        kept = {module: layer for module, layer in layers.items() if module not in left}
        self.ends, self.asked = {*list(left)[:1], *list(left)[-1:]}, set()
        kept.update({block: functools.partial(self._call_counted, block) for block in self.ends})
        self.substitution = Substitution(kept, Order.COMPILED)

    @allow_inlining
    def _call_counted(self, block: torch.nn.Module, inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """A call of the first block without a stand-in: where others' code is noticed, and calls are counted."""
        if not torch.compiler.is_dynamo_compiling():
            self.asked.add(block)
            self.passes += len(self.asked) == len(self.ends)
            if self._code.is_due and self.passes % LOOKS == 0:
                self._code.compare(block, again=False)
        return inner(*args, **kwargs)


def _sizes(value: Any) -> Hashable:
    """What of an argument decides the sizes of what blocks are called with."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return tuple(map(_sizes, value)) if isinstance(value, (list, tuple)) else value is None
