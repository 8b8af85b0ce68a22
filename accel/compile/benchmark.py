"""Whether a compiled graph is right, and faster than its block on this machine: some calls run both ways.

What is right at one size may not be at another, so a graph's values are compared at the first two sizes of each
pattern (`pattern_of`), and in one call of the last block of a kind: what is right with the weights of the first may
have them in it. A graph that differs beyond rounding is used at no size.

Where asked for, a graph is timed once for each power of two in size, and not used at that size where it is slower. The
cost is one eager call of a block for each of at most `ROUNDS + 1` calls, for `CLEAR_ROUNDS + 1` where the gain is
clear. Where another program's code runs in the block, which must not run twice for one call, calls of one size are made
one way or the other by turns.

On a CUDA device the two are queued one behind the other between events, behind a pause that lets the host get ahead. So
the device's time is free of the host's, and what counts is what a run would notice: the larger of the two, and where
whole model calls are captured the device's alone.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..core.events import log
from ..core.reasons import Reason
from ..core.torch_internals import SLEEP
from ..signature.output_check import compare_to_rounding

SIZES = 2
"""Sizes of one pattern that are compared: what a graph has of one of them shows at another."""

ROUNDS = 7
"""Calls timed both ways before a graph is judged slow."""

CLEAR_ROUNDS = 3
"""Calls after which a graph that was faster in each of them is judged fast."""

SLOWER = 1.05
"""Ratio of compiled to eager time above which a graph is slow; less is noise."""

LONGEST_PAUSE = 0.02
"""Seconds: where the host needs longer for two calls, the device is not what they wait for."""

WIDEST_TILE = 128
"""Elements that a kernel handles as one along a dimension; a size that is no multiple leaves a tail."""

ASKED_AGAIN = 600.0
"""Seconds after which a slow graph is timed again, since the machine may have been busy; each time twice as many."""

CYCLES = 2e9
"""A GPU's clock cycles a second, roughly; a slower one pauses longer."""


class Benchmark:
    """Compares one graph with its block over its first calls of about one size.

    done: no more calls are compared. verdict: why the graph is not used at this size; None where it is.
    seconds: cost of comparing so far. calls: of the graph since it was done, by their number of elements.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._compiled: list[float] = []
        self._eager: list[float] = []
        self._host = 0.0
        """Seconds that the host needed for the two calls, last."""
        self.done = False
        self.verdict: Reason | None = None
        self.seconds = 0.0
        self.calls: dict[int, Calls] = {}
        self._judged, self._stands = 0.0, ASKED_AGAIN

    def find_calls(self, elements: int) -> Calls:
        """The counter of the calls with so many elements; the first calls are those that are compared."""
        return self.calls.get(elements) or self.calls.setdefault(elements, Calls(self, elements))

    @property
    def times(self) -> tuple[float, float] | None:
        """Median seconds of a compiled call and of an eager one; None where too few calls were compared."""
        if self.verdict is not None or len(self._eager) < CLEAR_ROUNDS:
            return None
        return statistics.median(self._compiled), statistics.median(self._eager)

    @property
    def gain(self) -> float | None:
        """Seconds that the graph saves a call; None where too few calls were compared."""
        return None if (times := self.times) is None else times[1] - times[0]

    def ask_again(self) -> bool:
        """Whether a graph that was slow a while ago is timed anew from now on."""
        with self._lock:
            is_due = self.verdict is not None and self.verdict.code == "slower"
            if not is_due or time.perf_counter() - self._judged < self._stands:
                return False
            self._calls, self._compiled, self._eager = 0, [], []
            self.calls.clear()
            self.done, self.verdict, self._stands = False, None, 2 * self._stands
            return True

    def call(
        self,
        compiled: Callable[[], Any],
        eager: Callable[[], Any],
        device: torch.device,
        captured: bool = False,
        difference: Callable[[Any, Any], float | None] = compare_to_rounding,
    ) -> Any:
        """The output of this call, from the compiled graph unless it is wrong.

        The two must not share tensors that they write to; they take turns in running first. captured: calls like this
        one are captured later, so that the host's time for them is no matter. difference: of the two outputs.
        """
        number, started = self._count(), time.perf_counter()
        ways = {"compiled": compiled, "eager": eager}
        order = ["compiled", "eager"] if number % 2 else ["eager", "compiled"]  # the second finds warm caches
        timed, self._host = _time_each([ways[way] for way in order], device, captured, self._host)
        results = dict(zip(order, timed, strict=True))
        (out, compiled_seconds), (expected, eager_seconds) = results["compiled"], results["eager"]
        excess = difference(out, expected)
        with self._lock:
            self.seconds += time.perf_counter() - started - compiled_seconds
            if excess is not None:
                self.done = True
                self.verdict = Reason("wrong_output", times=f"{excess:.1f}")
            elif number and not self.done:  # the first call of a kernel is not like the others
                self._compiled.append(compiled_seconds)
                self._eager.append(eager_seconds)
                self._judge()
        return out if excess is None else expected

    def call_one_way(
        self, compiled: Callable[[], Any], eager: Callable[[], Any], device: torch.device, captured: bool = False
    ) -> Any:
        """The output of this call, made one way only; captured: as for `call`."""
        number = self._count()
        is_eager = number % 4 in (1, 2)  # not every other call, which may be those of one block
        call = eager if is_eager else compiled
        [(out, seconds)], self._host = _time_each([call], device, captured, self._host)
        with self._lock:
            if number > 1 and not self.done:  # the first call of each way is not like the others
                (self._eager if is_eager else self._compiled).append(seconds)
                self._judge()
        return out

    def _count(self) -> int:
        with self._lock:
            self._calls += 1
            return self._calls - 1

    def _judge(self) -> None:
        ratios = [fast / plain for fast, plain in zip(self._compiled, self._eager, strict=False)]
        if len(ratios) == CLEAR_ROUNDS and max(ratios) * SLOWER < 1:
            self.done = True
        elif len(ratios) >= ROUNDS:
            self.done = True
            ratio = statistics.median(ratios)
            if ratio > SLOWER:
                self._judged = time.perf_counter()
                plain = statistics.median(self._eager)
                fast = ratio * plain  # the median of the compiled calls may be the smaller one all the same
                self.verdict = Reason("slower", compiled=f"{fast * 1e3:.2f}", eager=f"{plain * 1e3:.2f}")


@dataclass(eq=False)
class Calls:
    """Calls of a graph with one number of elements; hits: since the benchmark was done."""

    benchmark: Benchmark
    elements: int
    hits: int = 0

    @property
    def seconds(self) -> tuple[float, float] | None:
        """Seconds of one of them, compiled and eager, as of those that were timed, by elements; None if unknown."""
        times, (timed, *_) = self.benchmark.times, self.benchmark.calls
        return times and (times[0] * self.elements / timed, times[1] * self.elements / timed)


@dataclass(eq=False)
class Pattern:
    """Calls of one graph with these sizes. compared: sizes like them (`pattern_of`) at which a call was compared."""

    sizes: Hashable
    compared: set[Hashable]

    @property
    def is_settled(self) -> bool:
        """Whether no more of them is compared."""
        return len(self.compared) >= SIZES or self.sizes in self.compared


class Benchmarks:
    """One graph's record against its block: values by pattern of sizes, times by size. wrong: why the graph is used at
    no size. is_last_compared: whether a call of the last block of the kind was compared."""

    def __init__(self) -> None:
        self._by_size: dict[tuple[int, bool, bool], Benchmark] = {}
        self._untimed_seconds = 0.0
        self.wrong: Reason | None = None
        self.is_last_compared = False
        self._compared: dict[bytes, set[Hashable]] = {}

    def get_or_create(self, inputs: Sequence[torch.Tensor], captured: bool = False, one_way: bool = False) -> Benchmark:
        """The benchmark for calls of this power of two in size, or of exactly this size where each is made one way
        only. captured: the calls are of a model that is captured, where other times count on a CUDA device."""
        elements = elements_of(inputs)  # of all, since one's may never change
        size = elements if one_way else elements.bit_length()
        return self._by_size.setdefault((size, captured, one_way), Benchmark())

    def pattern(self, tensors: Sequence[torch.Tensor], dense: Sequence[bool] = ()) -> Pattern:
        """What is known of calls with tensors of these sizes. dense: whether each input was given so, or copied."""
        sizes = tuple([tensor.shape for tensor in tensors])
        return Pattern(sizes, self._compared.setdefault(pattern_of(tensors) + bytes(dense), set()))

    def judge(self, pattern: Pattern, excess: float | None) -> float | None:
        """Note how far a call of the pattern was beyond rounding (`compare_to_rounding`), and return it."""
        if excess is not None:
            self.wrong = Reason("wrong_output", times=f"{excess:.1f}")
        pattern.compared.add(pattern.sizes)
        return excess

    def compare(
        self,
        pattern: Pattern,
        compiled: Callable[[], Any],
        eager: Callable[[], Any],
        difference: Callable[[Any, Any], float | None],
    ) -> Any:
        """The output of this call, as of `Benchmark.call`, untimed. difference: calls `judge`. Where memory is too
        short for the block itself, which would end the run without us, the output is the graph's."""
        started, expected = time.perf_counter(), None
        with suppress(torch.OutOfMemoryError):
            expected = eager()  # first: it may need more memory, and the other output takes some
        if expected is None:
            log.warning("A compiled block is used unchecked: there is too little memory to run it uncompiled.")
            pattern.compared.add(pattern.sizes)
            return compiled()
        eager_seconds = time.perf_counter() - started
        out = compiled()
        started = time.perf_counter()
        excess = difference(out, expected)
        self._untimed_seconds += eager_seconds + time.perf_counter() - started
        return out if excess is None else expected

    def all(self) -> list[Benchmark]:
        return list(self._by_size.values())

    @property
    def seconds(self) -> float:
        return self._untimed_seconds + sum(benchmark.seconds for benchmark in self.all())

    @property
    def hits(self) -> int:
        return sum(calls.hits for benchmark in self.all() for calls in list(benchmark.calls.values()))


def elements_of(inputs: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in inputs)


def pattern_of(tensors: Sequence[torch.Tensor]) -> bytes:
    """The features of the tensors' sizes on which a kernel's code path may depend.

    Of each dimension, the largest power of two that divides it, up to `WIDEST_TILE` (whether loads are aligned, and
    which tiles have a tail), and the next power of two (how large blocks are, and whether one holds all of it); of each
    tensor, whether 32 bits count its elements. So 1 is like no other size, and 64, 96, 77 and 154 differ.
    """
    pattern = bytearray()
    for tensor in tensors:
        pattern.append(tensor.numel() >= 1 << 31)
        for size in tensor.shape:
            pattern += bytes((min(size & -size, WIDEST_TILE), (size - 1).bit_length()))
    return bytes(pattern)


def draws_again(device: torch.device) -> Callable[[], None]:
    """A function that sets torch's generators back to their present state: both ways of a call draw the same."""
    generators = [torch.default_generator]
    if device.type in ("cuda", "xpu"):
        generators.append(getattr(torch, device.type).default_generators[device.index or 0])
    states = [(generator, generator.get_state()) for generator in generators]

    def restore() -> None:
        for generator, state in states:
            generator.set_state(state)

    return restore


def _time_each(
    calls: Sequence[Callable[[], Any]], device: torch.device, captured: bool, host: float
) -> tuple[list[tuple[Any, float]], float]:
    """Each call's output and seconds; and the host's seconds for all of them, to be given as `host` the next time: a
    CUDA device first pauses for twice as long, and then works without gaps."""
    if device.type != "cuda":
        return [_time(call, device) for call in calls], 0.0
    outs, seconds = [], []
    with torch.cuda.device(device):
        moments = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        pause = SLEEP.get(None)
        if pause is not None:
            pause(int(min(2 * host, LONGEST_PAUSE) * CYCLES))
        moments[0].record()
        for call, moment in zip(calls, moments[1:], strict=True):
            started = time.perf_counter()
            outs.append(call())
            seconds.append(time.perf_counter() - started)
            moment.record()
        moments[-1].synchronize()
    at_work = [start.elapsed_time(end) / 1e3 for start, end in zip(moments, moments[1:], strict=False)]
    counted = at_work if captured else map(max, at_work, seconds)
    return list(zip(outs, counted, strict=True)), sum(seconds)


def _time(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    wait = torch.accelerator.synchronize if device.type not in ("cpu", "meta") else lambda device: None
    wait(device)
    started = time.perf_counter()
    out = function()
    wait(device)
    return out, time.perf_counter() - started
