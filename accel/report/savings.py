"""The time that a run saved, from what was measured in it or before; nothing where nothing was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..compile.benchmark import Probe
from ..step_cache.run import FULL, SKIPPED


class Saving(NamedTuple):
    """seconds: None where nobody can tell; negative where it was slower. how: the sentence that goes with it."""

    seconds: float | None
    how: str


def by_compiling(calls: int, measured: Mapping[Probe, int], is_measured: bool = True) -> Saving:
    """What the compiled calls of a run took less than the plain blocks would have.

    calls: of compiled graphs. measured: those of them at sizes at which a graph was compared with its block.
    is_measured: whether the user wants graphs compared at all.
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
    """What DeepCache's skipped steps took less than full ones.

    steps: FULL or SKIPPED for each, in the order in which they came. began: when each did, seconds of one clock. The
        last step has no end there, and the first is not like the others: both are left out.
    disturbed: moments at which something was compiled, loaded or compared; the steps that they fall in are left out.
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
