"""The time that a run saved, from measurements in it or before; unknown without any."""

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

    def as_json(self) -> dict[str, Any]:
        """{"seconds", "how"}, the latter as text."""
        return {"seconds": self.seconds, "how": "" if self.how is None else str(self.how)}


def by_compiling(calls: int, measured: Mapping[Benchmark, int], is_measured: bool = True) -> Saving:
    """The time saved by compiled calls of blocks, against running the same blocks eagerly.

    calls: of compiled graphs. measured: those of them at sizes at which the graph was compared with its block.
    is_measured: whether graphs are compared at all.
    """
    known = [(benchmark.gain, count) for benchmark, count in measured.items() if benchmark.gain is not None]
    if not calls:
        return Saving(None, Reason("compiling_unused"))
    if not known:
        return Saving(None, Reason("compiling_unsure") if is_measured else Reason("compiling_unmeasured"))
    covered = sum(count for _, count in known)
    is_all = covered == calls
    how = Reason("compiling_saved") if is_all else Reason("compiling_saved_in_part", covered=covered, calls=calls)
    return Saving(sum(gain * count for gain, count in known), how)


def by_skipping(steps: str, began: Sequence[float], disturbed: Sequence[float] = ()) -> Saving:
    """The time saved by skipped steps, against full ones.

    steps: FULL or SKIPPED for each step, in order. began: the start of each, in seconds of one clock. The first step
        and the last, whose end is unknown, are left out.
    disturbed: times at which something was compiled, loaded or compared; steps that contain one are left out.
    """
    if SKIPPED not in steps:
        return Saving(None, Reason("skipping_unused"))
    taken: dict[str, list[float]] = {FULL: [], SKIPPED: []}
    for index in range(1, min(len(steps), len(began)) - 1):
        start, end = began[index], began[index + 1]
        if not any(start <= moment <= end for moment in disturbed):
            taken[steps[index]].append(end - start)
    if not taken[FULL] or not taken[SKIPPED]:
        return Saving(None, Reason("skipping_unsure"))
    full, skipped = statistics.median(taken[FULL]), statistics.median(taken[SKIPPED])
    count = steps.count(SKIPPED)
    how = Reason("skipping_saved", steps=count, skipped=f"{skipped:.3g}", full=f"{full:.3g}")
    return Saving(count * (full - skipped), how)


def together(parts: Sequence[Saving]) -> dict[str, Any]:
    """The sum of what is known, for pages: {"saved_seconds", "saved_how", "saved_reasons"}; None, text, JSON."""
    known = [part.seconds for part in parts if part.seconds is not None]
    reasons = [part.how for part in parts if part.how is not None] or [Reason("saved_unmeasured")]
    return {
        "saved_seconds": sum(known) if known else None,
        "saved_how": " ".join(map(str, reasons)),
        "saved_reasons": [reason.as_json() for reason in reasons],
    }
