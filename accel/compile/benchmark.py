"""Whether a compiled graph pays on this machine: a few calls run both ways, compared, and then never again.

What pays at one size may not at another, so each graph is judged once for each power of two in
size. A graph that is slower than the eager block at a size is left alone there; one whose output is
not the eager one's within tolerance, at every size. Costs one eager call of one block for each of
at most `ROUNDS + 1` calls of a graph and size, of four where the gain is clear.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.reasons import Reason

ROUNDS = 7
"""Calls timed both ways before a graph is called slow."""

CLEAR_ROUNDS = 3
"""Calls after which a graph that was faster in each of them is left in peace."""

SLOWER = 1.05
"""Compiled time over eager time above which a graph is given up; below it is noise."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest difference by dtype, relative to the largest value: sums in another order, and fused steps that
round once where eager rounds each time. A wrong graph is off by the size of the values themselves."""


class Probe:
    """Compares one graph with its block over its first calls at one size.

    done: no further call need be compared. verdict: why the graph is not used at this size; None
        where it is. wrong: the verdict is about its output. seconds: what comparing has cost.
        hits: calls of the graph at this size since then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._compiled: list[float] = []
        self._eager: list[float] = []
        self.done = False
        self.verdict: Reason | None = None
        self.wrong = False
        self.seconds = 0.0
        self.hits = 0

    @property
    def gain(self) -> float | None:
        """Seconds that a call of the graph takes less than one of its block; None where too few were compared."""
        if self.verdict is not None or len(self._eager) < CLEAR_ROUNDS:
            return None
        return statistics.median(self._eager) - statistics.median(self._compiled)

    def call(self, compiled: Callable[[], Any], eager: Callable[[], Any], device: torch.device) -> Any:
        """The output for this call, from the compiled graph unless it is wrong.

        The two must not touch each other's tensors; they take turns in going first.
        """
        with self._lock:
            number = self._calls
            self._calls += 1
        started = time.perf_counter()
        if number % 2:
            out, compiled_seconds = _timed(compiled, device)
            expected, eager_seconds = _timed(eager, device)
        else:
            expected, eager_seconds = _timed(eager, device)
            out, compiled_seconds = _timed(compiled, device)
        difference = largest_difference(out, expected)
        with self._lock:
            self.seconds += time.perf_counter() - started - compiled_seconds
            if difference is not None:
                self.done = self.wrong = True
                self.verdict = Reason("wrong_output", difference=f"{difference:.1e}")
            elif number and not self.done:  # the first call of a kernel is not like the others
                self._compiled.append(compiled_seconds)
                self._eager.append(eager_seconds)
                self._judge()
        return out if difference is None else expected

    def abandon(self) -> None:
        """Compare no more, and hold nothing against the graph."""
        self.done = True

    def _judge(self) -> None:
        ratios = [fast / plain for fast, plain in zip(self._compiled, self._eager, strict=True)]
        if len(ratios) == CLEAR_ROUNDS and max(ratios) * SLOWER < 1:
            self.done = True
        elif len(ratios) >= ROUNDS:
            self.done = True
            if statistics.median(ratios) > SLOWER:
                fast, plain = statistics.median(self._compiled), statistics.median(self._eager)
                self.verdict = Reason("slower", compiled=f"{fast * 1e3:.2f}", eager=f"{plain * 1e3:.2f}")


class Probes:
    """The probes of one graph, by size."""

    def __init__(self) -> None:
        self._by_size: dict[int, Probe] = {}

    def of(self, inputs: Sequence[torch.Tensor]) -> Probe:
        """The probe for calls of about the size of these inputs; one that found the graph wrong is for all."""
        wrong = next((probe for probe in self.all() if probe.wrong), None)
        return wrong or self._by_size.setdefault(order_of_size(inputs), Probe())

    def all(self) -> list[Probe]:
        return list(self._by_size.values())

    @property
    def seconds(self) -> float:
        return sum(probe.seconds for probe in self.all())

    @property
    def hits(self) -> int:
        return sum(probe.hits for probe in self.all())


def order_of_size(inputs: Sequence[torch.Tensor]) -> int:
    """The power of two next above the number of elements of a call's first tensor that has any."""
    return next((tensor.numel().bit_length() for tensor in inputs if tensor.numel()), 0)


def largest_difference(out: Any, expected: Any) -> float | None:
    """The largest relative difference beyond tolerance between two outputs (tensors, or nested tuples of
    them); None when all are within it. NaN where the eager output has none counts as infinite."""
    if isinstance(expected, torch.Tensor):
        if out.shape != expected.shape or out.dtype != expected.dtype:
            return float("inf")
        if not expected.is_floating_point() or not expected.numel():
            return None
        scale = expected.abs().max().float()
        difference = (out.float() - expected.float()).abs().max() / scale.clamp_min(1e-6)
        if not scale.isfinite():
            return None  # the model itself overflows here: nothing can be said of the graph
        value = float(difference)
        return None if value <= TOLERANCE.get(expected.dtype, 8e-2) else (value if value == value else float("inf"))
    if isinstance(expected, (tuple, list)):
        found = [largest_difference(one, other) for one, other in zip(out, expected, strict=True)]
        return max((value for value in found if value is not None), default=None)
    return None


def _timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    _wait(device)
    started = time.perf_counter()
    out = function()
    _wait(device)
    return out, time.perf_counter() - started


def _wait(device: torch.device) -> None:
    """Until the device has done what was asked of it; the CPU has at once."""
    if device.type in ("cpu", "meta"):
        return
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6 and later
    current = accelerator.current_accelerator() if accelerator is not None else None
    if current is not None and current.type == device.type:
        accelerator.synchronize(device)
    else:
        synchronize = getattr(getattr(torch, device.type, None), "synchronize", None)
        if synchronize is not None:
            synchronize()
