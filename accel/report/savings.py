"""The time that a run saved, from measurements in it or before; unknown without any."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..compile.benchmark import Probe
from ..step_cache.run import FULL, SKIPPED


class Saving(NamedTuple):
    """seconds: None where unknown; negative where the run was slower. how: a sentence on how this is known."""

    seconds: float | None
    how: str


def by_compiling(calls: int, measured: Mapping[Probe, int], is_measured: bool = True) -> Saving:
    """The time saved by compiled calls of blocks, against running the same blocks eagerly.

    calls: of compiled graphs. measured: those of them at sizes at which the graph was compared with its block.
    is_measured: whether graphs are compared at all.
    """
    known = [(probe.gain, count) for probe, count in measured.items() if probe.gain is not None]
    if not calls:
        return Saving(None, "No compiled block ran.")
    if not known:
        why = "too few calls were run both ways yet" if is_measured else "check_gain is off, so none was run both ways"
        return Saving(None, f"What compiling saved is not known: {why}.")
    covered = sum(count for _, count in known)
    part = "" if covered == calls else f" ({covered} of {calls} calls; the others are not counted)"
    return Saving(
        sum(gain * count for gain, count in known),
        f"Compiling: the median time of a block's call, uncompiled less compiled, times its calls{part}; "
        "both were measured on this machine. The time to compile is not taken off.",
    )


def by_skipping(steps: str, began: Sequence[float], disturbed: Sequence[float] = ()) -> Saving:
    """The time saved by skipped steps, against full ones.

    steps: FULL or SKIPPED for each step, in order. began: the start of each, in seconds of one clock. The first step
        and the last, whose end is unknown, are left out.
    disturbed: times at which something was compiled, loaded or compared; steps that contain one are left out.
    """
    if SKIPPED not in steps:
        return Saving(None, "DeepCache skipped no step.")
    taken: dict[str, list[float]] = {FULL: [], SKIPPED: []}
    for index in range(1, min(len(steps), len(began)) - 1):
        start, end = began[index], began[index + 1]
        if not any(start <= moment <= end for moment in disturbed):
            taken[steps[index]].append(end - start)
    if not taken[FULL] or not taken[SKIPPED]:
        return Saving(None, "What DeepCache saved is not known: too few steps of this run could be compared.")
    full, skipped = statistics.median(taken[FULL]), statistics.median(taken[SKIPPED])
    count = steps.count(SKIPPED)
    return Saving(
        count * (full - skipped),
        f"DeepCache: {count} skipped steps of {skipped:.3g} s each, beside {full:.3g} s for a full one "
        "(medians of this run, without its first and last step and those in which something was compiled).",
    )


def together(parts: Sequence[Saving]) -> Saving:
    """The sum of what is known."""
    known = [part.seconds for part in parts if part.seconds is not None]
    return Saving(sum(known) if known else None, " ".join(part.how for part in parts))
