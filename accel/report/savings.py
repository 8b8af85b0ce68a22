"""The time that a run saved, and how that is known."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..compile.benchmark import Benchmark
from ..core.reasons import Reason
from ..step_cache.run import FULL, SKIPPED


class Saving(NamedTuple):
    """seconds: None where unknown; negative where the run was slower. how: how this is known;
    None where nothing was to be saved."""

    seconds: float | None = None
    how: Reason | None = None

    def with_next(self, other: Saving) -> Saving:
        """The sum of what is known of two samplings of one prompt."""
        if self.seconds is not None and other.seconds is not None:
            return Saving(self.seconds + other.seconds, self.how)
        if self.seconds is not None or other.seconds is None and other.how is None:
            return self
        return other


def by_compiling(
    calls: int, measured: Mapping[Benchmark, int], is_measured: bool = True, is_traced: bool = False
) -> Saving:
    """The time saved by compiled calls of blocks, against running the same blocks eagerly.

    calls: of compiled graphs. measured: those of them at sizes at which the graph was timed against its block.
    is_measured: whether graphs are timed at all. is_traced: the backend traces blocks and compiles nothing.
    """
    gains = [benchmark.gain * count for benchmark, count in measured.items() if benchmark.gain is not None]
    if not calls:
        return Saving(None, Reason("compiling_unused"))
    if is_traced:
        return Saving(None, Reason("compiling_traced"))
    if not gains:
        return Saving(None, Reason("compiling_unsure") if is_measured else Reason("compiling_unmeasured"))
    return Saving(sum(gains), Reason("compiling_saved"))


def by_skipping(steps: str, began: Sequence[float], disturbed: Sequence[float] = ()) -> Saving:
    """The time saved by steps that were skipped, against full ones.

    steps: FULL or SKIPPED for each step, in order. began: the start of each, in seconds of one clock. The first step
        and the last, whose end is unknown, are left out.
    disturbed: times at which something was compiled, loaded or compared; steps that contain one are left out.
    """
    if SKIPPED not in steps:
        return Saving(None, Reason("skipping_unused"))
    lengths: dict[str, list[float]] = {FULL: [], SKIPPED: []}
    for index in range(1, min(len(steps), len(began)) - 1):
        start, end = began[index], began[index + 1]
        if not any(start <= moment <= end for moment in disturbed):
            lengths[steps[index]].append(end - start)
    if not all(lengths.values()):
        return Saving(None, Reason("skipping_unsure"))
    full, skipped = (statistics.median(lengths[kind]) for kind in (FULL, SKIPPED))
    return Saving(steps.count(SKIPPED) * (full - skipped), Reason("skipping_saved"))


def together(*savings: Saving) -> dict[str, Any]:
    """The sum of what is known, as JSON: {"saved_seconds", "saved_how", "saved_reasons"}; None, text, reasons."""
    measured = [saving.seconds for saving in savings if saving.seconds is not None]
    reasons = [saving.how for saving in savings if saving.how is not None] or [Reason("saved_unmeasured")]
    return {
        "saved_seconds": sum(measured) if measured else None,
        "saved_how": " ".join(map(str, reasons)),
        "saved_reasons": [reason.as_json() for reason in reasons],
    }
