"""Whether a compiled graph pays on this machine: a few calls run both ways, compared, and then never again.

A graph that is not faster than the eager block, or whose output is not the eager one's within
tolerance, is given up. Costs one eager call of one block for each of the first `ROUNDS` calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

ROUNDS = 3
SLOWER = 1.05
"""Compiled time over eager time above which a graph is given up; below it is noise."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest difference by dtype, relative to the largest value: sums in another order, and fused steps that
round once where eager rounds each time. A wrong graph is off by the size of the values themselves."""


class Probe:
    """Compares one graph with its block over its first calls; `verdict` is None until it gives the graph up."""

    def __init__(self) -> None:
        self._compiled: list[float] = []
        self._eager: list[float] = []
        self.rounds_left = ROUNDS
        self.verdict: str | None = None

    def call(self, compiled: Callable[[], Any], eager: Callable[[], Any], device: torch.device) -> Any:
        """The output for this call, from the compiled graph unless it is given up.

        eager: must leave the call's own tensors as they are.
        """
        expected, eager_seconds = _timed(eager, device)
        out, compiled_seconds = _timed(compiled, device)
        self.rounds_left -= 1
        difference = largest_difference(out, expected)
        if difference is not None:
            self.verdict = f"its compiled output differs from the eager one by {difference:.1e} of the largest value"
            return expected
        if self.rounds_left < ROUNDS - 1:  # the first call of a kernel is not like the others
            self._compiled.append(compiled_seconds)
            self._eager.append(eager_seconds)
        if self.rounds_left == 0:
            fast, plain = statistics.median(self._compiled), statistics.median(self._eager)
            if fast > plain * SLOWER:
                self.verdict = f"compiled it takes {fast * 1e3:.2f} ms a call and eagerly {plain * 1e3:.2f} ms"
        return out

    @property
    def done(self) -> bool:
        return self.rounds_left == 0 or self.verdict is not None


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
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    wait(device)
    started = time.perf_counter()
    out = function()
    wait(device)
    return out, time.perf_counter() - started
