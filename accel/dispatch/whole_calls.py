"""Which blocks of a model have their stand-ins in place in a call: none that would only let the block's call pass by.

To find out that a graph is left aside takes Python longer than many a kernel takes the device. So calls of one size are
looked at until nothing more is compared in them. From then on they are made without the stand-ins of blocks that ran
uncompiled, in later runs too, until the code changes or a graph leaves the cache.

Blocks are timed one by one, again and again. In a step, whose code does not fit the processor's caches, Python takes
longer, and blocks that are faster may make a step that is slower. So where graphs are timed and the device waits for
Python, whole calls are timed too, with stand-ins and without by turns.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..cache.graph_cache import GraphCache
from ..compile.benchmark import CallTime
from ..core.compile_settings import CompileSettings
from ..core.events import emit
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason
from ..core.torch_internals import seen_through
from ..modules.substitution import Forward, Layer, Order, Substitution
from .block_runner import COMPARED, COMPILED, BlockRunner
from .current_code import CurrentCode

CALLS = 3
"""Calls that are timed with stand-ins, and as many without; of each the least time counts."""

FASTER, LEANING, CLOSE, RUNS = 0.98, 0.02, 0.05, 20
"""Calls are made without stand-ins unless they take less than FASTER times as long with them, where another decision
than the last one takes LEANING more. What is as CLOSE to it is timed anew after so many RUNS."""

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
        self._all = _InPlace(layers, {}, self._code)
        self._made: dict[tuple[_Known, bool, int], _InPlace] = {}
        self._met: set[_Known] = set()
        self.unspared: Reason | None = None
        """Why the allocator forbids the CUDA graphs that would spare Python its part of a call, where it does."""

    @contextmanager
    def in_place(self, given: Sequence[Any], phase: Hashable = None, are_alike: bool = True) -> Iterator[None]:
        """A context for one call with these arguments. are_alike: those of the same sizes and phase call the same
        blocks, and will not be captured."""
        known = self._known(phase, given) if are_alike and self._code is not None else None
        used, pause, is_bare = self._all, None, False
        if known is not None:
            is_bare = known.is_timed and known.verdict is not None
            device = next((value.device for value in given if isinstance(value, torch.Tensor)), None)
            if self._settings.measured and known.left is not None and _is_timeable(device):
                if not known.is_timed and len(known.left) < len(known.called):
                    is_bare, pause = known.next_is_bare, 0.0
                elif self.unspared is not None and known.spared is None:
                    pause = 2 * known.wall
            if is_bare or known.left is not None:
                used = self._without(known, is_bare)
        used.asked.clear()
        if used is self._all or pause is not None:
            for runner in self.runners.values():
                runner.ways.clear()
        call = None if pause is None else CallTime(device, pause)
        with used.substitution.in_place():
            yield
        if call is not None:
            call.stop()
        if known is None or self._code.known is None:  # other code ran in this call than what is known is about
            return
        if used is self._all:
            known.look(self._left(), self._called())
        elif call is not None:
            if used.asked | self._called() != used.ends | (known.called - used.left.keys()) or self._left() not in (
                None,
                {},
            ):
                known.left = None  # calls like it call other blocks now, or compare some: they are looked at anew
            elif known.is_timed or len(known.left) == len(known.called):
                known.add_unspared(call)
            else:
                known.add(call, is_bare)

    def end(self) -> int:
        """Tell of the calls of blocks that had no stand-in, and how many they were; and what CUDA graphs would give."""
        times = max((known.spared for known in self._met if known.spared is not None), default=0.0)
        if self.unspared is not None and times >= WORTH_IT:
            emit("graphs_would_give", times=times)
        for (known, is_bare, _), used in self._made.items():
            slow = known.verdict
            if slow is not None and self.unspared is not None:
                slow = Reason("host_bound_without_graphs", slow=slow)
            for block, reason in used.left.items():
                name, why = (self._name, slow) if is_bare else (self.runners[block].kind.name, reason)
                if used.passes and why is not None:
                    fallbacks.note(name, why, calls=used.passes)
        return sum(used.passes * len(used.left) for used in self._made.values())

    def _known(self, phase: Hashable, given: Sequence[Any]) -> _Known | None:
        """What is known of calls like this one; None where nothing can be."""
        of_model = self._code.known
        if of_model is None:
            return None
        if len(of_model) >= MOST_KNOWN:
            of_model.clear()
        known = of_model.setdefault((self._cache, self._settings, phase, *map(_sizes, given)), _Known())
        if known not in self._met:
            self._met.add(known)
            known.begin_run()
        if known.generation != self._cache.generation:
            known.left, known.generation = None, self._cache.generation
        return known

    def _without(self, known: _Known, is_bare: bool) -> _InPlace:
        how = known, is_bare, known.looks
        if how not in self._made:
            left = dict.fromkeys(block for block in self.runners if block in known.called) if is_bare else known.left
            self._made[how] = _InPlace(self._layers, left, self._code)
        return self._made[how]

    def _called(self) -> set[torch.nn.Module]:
        """The blocks whose stand-ins the last call has asked."""
        return {block for block, runner in self.runners.items() if runner.ways}

    def _left(self) -> dict[torch.nn.Module, Reason | None] | None:
        """The blocks that the last call left uncompiled, as calls like it will; None where it compared some, or called
        none."""
        of_blocks = {block: runner.ways for block, runner in self.runners.items()}
        ways = set().union(*of_blocks.values())
        if not ways or COMPARED in ways:
            return None
        return {block: next(iter(of)) for block, of in of_blocks.items() if of and COMPILED not in of}


class _Known:
    """What runs have found of a model's calls of one size.

    left: the blocks that need no stand-in, each with the reason, unless that was told before; None until nothing is
    compared in them. called: the blocks that such calls call. looks: how often that was found. generation: of the cache
    then. is_timed: whether whole calls need not be timed. verdict: why they
    are made without any stand-in. wall: seconds that a call takes, where it waits for Python. spared: how many times as
    long as the device works in it; None until that is known.
    """

    def __init__(self) -> None:
        self.left: dict[torch.nn.Module, Reason | None] | None = None
        self.called: set[torch.nn.Module] = set()
        self.looks, self.generation, self._runs = 0, 0, 0
        self.is_timed, self.verdict = False, None
        self.wall, self.spared = 0.0, None
        self._ratio: float | None = None
        self._seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}

    @property
    def next_is_bare(self) -> bool:
        return sum(map(len, self._seconds.values())) % 4 in (
            1,
            2,
        )  # else every other call of a kind would count one way

    def look(self, left: dict[torch.nn.Module, Reason | None] | None, called: set[torch.nn.Module]) -> None:
        self.left, self.called, self.looks = left, called, self.looks + 1

    def begin_run(self) -> None:
        self._runs += 1
        if self._runs > RUNS and self._ratio is not None and abs(self._ratio - FASTER) < CLOSE:
            self.is_timed, self._runs, self._seconds = False, 0, {True: [], False: []}
        if self.left and None in self.left.values():  # which may be otherwise in this run
            self.left = None

    def add(self, call: CallTime, is_bare: bool) -> None:
        """A timed call. Where the device is what compiled ones wait for, the verdicts of their blocks stand."""
        if not is_bare and not call.device_waited:
            self.is_timed, self.verdict, self._ratio, self.spared = True, None, None, 1.0
            return
        least = 0.0 if call.device_waited else call.device
        self._seconds[is_bare].append((max(call.thread, least), max(call.wall, least)))
        if min(map(len, self._seconds.values())) < CALLS:
            return
        compiled, normal = (list(map(min, zip(*self._seconds[way], strict=True))) for way in (False, True))
        bound = FASTER + (0 if self._ratio is None else LEANING if self.verdict is None else -LEANING)
        # A clock may stand still in a call.
        self.is_timed, self._ratio = (
            True,
            max(one / other for one, other in zip(compiled, normal, strict=True) if other),
        )
        slow = Reason("host_bound", compiled=f"{compiled[-1] * 1e3:.1f}", normal=f"{normal[-1] * 1e3:.1f}")
        self.verdict, self.wall = (None, compiled[-1]) if self._ratio < bound else (slow, normal[-1])

    def add_unspared(self, call: CallTime) -> None:
        """A call that CUDA graphs would spare Python's part of: timed as it is, then behind a pause."""
        if self.wall:
            self.spared = self.wall / max(call.device, 1e-6)
        elif call.device_waited:
            self.wall = call.wall
        else:
            self.spared = 1.0


class _InPlace:
    """What is in place in calls. left: blocks that have no stand-in. passes: calls of the first of them."""

    def __init__(self, layers: Mapping[torch.nn.Module, Layer], left: Mapping, code: CurrentCode | None):
        self.left, self.passes, self._code = left, 0, code
        kept = {module: layer for module, layer in layers.items() if module not in left}
        self.ends, self.asked = {*list(left)[:1], *list(left)[-1:]}, set()
        kept.update({block: functools.partial(self._passed, block) for block in self.ends})
        self.substitution = Substitution(kept, Order.COMPILED)

    @seen_through
    def _passed(self, block: torch.nn.Module, inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
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


def _is_timeable(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
