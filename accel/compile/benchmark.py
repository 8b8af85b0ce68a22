"""Whether a compiled graph is faster than its block on this machine: a few calls run both ways and are compared.

What is faster at one size may not be at another, so each graph is judged once for each power of two in size. A graph
that is slower than the eager block is not used at that size; one whose output differs beyond rounding, at no size.
The cost is one eager call of a block for each of at most `ROUNDS + 1` calls of a graph and size, for
`CLEAR_ROUNDS + 1` where the gain is clear.

On a CUDA device the two are queued one behind the other between events, behind a pause that lets the host get ahead. So
the device's time is free of the host's, and what counts is what a run would notice: the larger of the two, and where
whole model calls are captured the device's alone.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.reasons import Reason
from ..core.torch_internals import SLEEP
from ..signature.output_check import beyond_rounding

ROUNDS = 7
"""Calls timed both ways before a graph is judged slow."""

CLEAR_ROUNDS = 3
"""Calls after which a graph that was faster in each of them is judged fast."""

SLOWER = 1.05
"""Ratio of compiled to eager time above which a graph is slow; less is noise."""

LONGEST_PAUSE = 0.02
"""Seconds: where the host needs longer for two calls, the device is not what they wait for."""

_CYCLES = 2e9
"""A GPU's clock cycles a second, roughly; a slower one pauses longer."""


class Benchmark:
    """Compares one graph with its block over its first calls at one size.

    done: no more calls are compared. verdict: why the graph is not used at this size; None where it is.
    wrong: the verdict is about its output. seconds: cost of comparing so far. hits: calls of the graph at this size
        since it was done.
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
        self.wrong = False
        self.seconds = 0.0
        self.hits = 0

    @property
    def gain(self) -> float | None:
        """Seconds that the graph saves a call; None where too few calls were compared."""
        if self.verdict is not None or len(self._eager) < CLEAR_ROUNDS:
            return None
        return statistics.median(self._eager) - statistics.median(self._compiled)

    def call(
        self,
        compiled: Callable[[], Any],
        eager: Callable[[], Any],
        device: torch.device,
        captured: bool = False,
        difference: Callable[[Any, Any], float | None] = beyond_rounding,
    ) -> Any:
        """The output of this call, from the compiled graph unless it is wrong.

        The two must not share tensors that they write to; they take turns in running first. captured: calls like this
        one are captured later, so that the host's time for them is no matter. difference: of the two outputs.
        """
        with self._lock:
            number = self._calls
            self._calls += 1
        started = time.perf_counter()
        calls = (compiled, eager) if number % 2 else (eager, compiled)
        if device.type == "cuda":
            timed, self._host = _timed_on_device(calls, device, captured, self._host)
        else:
            timed = [_timed(call, device) for call in calls]
        (out, compiled_seconds), (expected, eager_seconds) = timed if number % 2 else reversed(timed)
        excess = difference(out, expected)
        with self._lock:
            self.seconds += time.perf_counter() - started - compiled_seconds
            if excess is not None:
                self.done = self.wrong = True
                self.verdict = Reason("wrong_output", times=f"{excess:.1f}")
            elif number and not self.done:  # the first call of a kernel is not like the others
                self._compiled.append(compiled_seconds)
                self._eager.append(eager_seconds)
                self._judge()
        return out if excess is None else expected

    def _judge(self) -> None:
        ratios = [fast / plain for fast, plain in zip(self._compiled, self._eager, strict=True)]
        if len(ratios) == CLEAR_ROUNDS and max(ratios) * SLOWER < 1:
            self.done = True
        elif len(ratios) >= ROUNDS:
            self.done = True
            ratio = statistics.median(ratios)
            if ratio > SLOWER:
                plain = statistics.median(self._eager)
                fast = ratio * plain  # the median of the compiled calls may be the smaller one all the same
                self.verdict = Reason("slower", compiled=f"{fast * 1e3:.2f}", eager=f"{plain * 1e3:.2f}")


class Benchmarks:
    """The benchmarks of one graph, by size."""

    def __init__(self) -> None:
        self._by_size: dict[tuple[int, bool], Benchmark] = {}

    def of(self, inputs: Sequence[torch.Tensor], captured: bool = False) -> Benchmark:
        """The benchmark for calls of about this size; one that found the graph wrong stands for all sizes.

        captured: in calls of a model that are captured, where other times count on a CUDA device.
        """
        return self.wrong or self._by_size.setdefault((order_of_size(inputs), captured), Benchmark())

    @property
    def wrong(self) -> Benchmark | None:
        """One that found the graph wrong; None where none did."""
        return next((benchmark for benchmark in self.all() if benchmark.wrong), None)

    def all(self) -> list[Benchmark]:
        return list(self._by_size.values())

    @property
    def seconds(self) -> float:
        return sum(benchmark.seconds for benchmark in self.all())

    @property
    def hits(self) -> int:
        return sum(benchmark.hits for benchmark in self.all())


def order_of_size(inputs: Sequence[torch.Tensor]) -> int:
    """The exponent of the power of two next above the number of elements in the first tensor that has any."""
    return next((tensor.numel().bit_length() for tensor in inputs if tensor.numel()), 0)


def _timed_on_device(
    calls: Sequence[Callable[[], Any]], device: torch.device, captured: bool, host: float
) -> tuple[list[tuple[Any, float]], float]:
    """The output and the seconds of each call; and the host's seconds for all of them, for the next time.

    host: as it was the last time. The device pauses for twice as long before the calls, and so works without gaps.
    """
    outs, seconds = [], []
    with torch.cuda.device(device):
        moments = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        pause = SLEEP.get(None)
        if pause is not None:
            pause(int(min(2 * host, LONGEST_PAUSE) * _CYCLES))
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


def _timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    _wait(device)
    started = time.perf_counter()
    out = function()
    _wait(device)
    return out, time.perf_counter() - started


def _wait(device: torch.device) -> None:
    """Return once the device has done all queued work; the CPU queues none."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
