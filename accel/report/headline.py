"""What a run gained, in a few words for the nodes that did it."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.reasons import Reason
from .run import LEAST_SAVED, Run, Saving

FEW_STEPS = 12
"""Sampler steps below which neighbouring ones differ too much for DeepCache's defaults to skip many."""

SEPARATOR = " · "


def headlines(run: Run, uncompiled: Sequence[Reason] = ()) -> dict[str, list[Reason]]:
    """The line of each node that took part in a run that is over: id → its parts, to be joined by `SEPARATOR`.

    A run that failed has none, nor has a node with nothing new to say: the line of the run before stays.

    A node that compiles tells of compiling, one that skips steps of that, and one that does both of both.

    uncompiled: why blocks ran uncompiled, the most frequent reason first.
    """
    compiles, skips = (settings.get("node") if settings else None for settings in (run.compiling, run.caching))
    lines = {}
    if run.failed:
        return lines
    for node in dict.fromkeys(node for node in (compiles, skips) if node is not None):
        own = [run.by_compiling] if node == compiles else []
        own += [run.by_skipping] if node == skips else []
        parts = [*_gain(run, own)]
        parts += _compiled(run, uncompiled) if node == compiles else []
        parts += _skipped(run) if node == skips else []
        if parts:
            lines[node] = parts
    return lines


def as_text(line: Sequence[Reason]) -> str:
    """The line in English."""
    return SEPARATOR.join(map(str, line))


def _gain(run: Run, savings: Sequence[Saving]) -> list[Reason]:
    times = run.times_by(*savings)
    if times is None:
        return []
    saved = (times - 1) * run.working_seconds
    if abs(saved) < LEAST_SAVED:
        return [Reason("line_equal")]
    if saved < 0:
        return [Reason("line_slower", seconds=_number(-saved))]
    return [Reason("line_times", times=f"{times:.2f}"), Reason("line_saved", seconds=_number(saved))]


def _compiled(run: Run, uncompiled: Sequence[Reason]) -> list[Reason]:
    if not run.compiled_calls and not run.replays:
        left = sorted(run.left_eager, key=run.left_eager.__getitem__, reverse=True)
        return [Reason("line_not_compiled", why=[*uncompiled, *left, Reason("compiling_unused")][0])]
    if not run.compiled_total:
        return [Reason("line_loaded")] if run.loaded else []
    parts = [Reason("line_compiled", seconds=_number(run.compiled_total))]
    if run.by_compiling.seconds is None:
        return [*parts, Reason("line_unmeasured")] if run.compilations else parts
    images = run.pays_back_after
    if images is None:
        return parts
    return [*parts, Reason("line_paid_back", images=images) if images > 1 else Reason("line_paid_back_at_once")]


def _skipped(run: Run) -> list[Reason]:
    steps, skipped = len(run.steps_taken), run.steps_taken.count("S")
    if not steps:
        return []
    if skipped:
        return [Reason("line_skipped", skipped=skipped, steps=steps)]
    if run.why_full is not None:
        return [Reason("line_all_full", why=run.why_full)]
    return [Reason("line_few_steps") if steps < FEW_STEPS else Reason("line_none_skipped")]


def _number(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"
