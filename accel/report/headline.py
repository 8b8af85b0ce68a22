"""A run's gain in a few words, for the nodes that took part."""

from __future__ import annotations

from ..core.reasons import Reason
from ..core.sentences import EXPECTED
from .run import Run, Skipping, rounded

MUCH_UNCOMPILED = 0.1
"""Fraction of a run's calls of blocks from which on it matters that they ran uncompiled."""

FEW_STEPS = 12
"""Sampler steps below which neighbouring ones differ too much for DeepCache's defaults to skip many."""


def nodes_of(run: Run) -> list[str]:
    """The ids of the nodes that took part in a run."""
    ids = [settings.get("node") for settings in (run.compiling, run.caching) if settings]
    return list(dict.fromkeys(node for node in ids if node is not None))


def headline(run: Run, node: str) -> list[Reason]:
    """The line of a node that took part in a run that is over, in parts.

    Empty for a run that an error ended, and where the node has nothing new to say: the line of the run before stays.

    A node reports on what it does: compiling, skipping steps, or both.
    """
    if run.failed:
        is_known = run.steps_done is not None and run.steps is not None
        return [Reason("line_stopped", done=run.steps_done, steps=run.steps)] if is_known else []
    compiles, skips = (bool(settings) and settings.get("node") == node for settings in (run.compiling, run.caching))
    own = [saving for saving, is_own in zip(run.savings, (compiles, skips), strict=True) if is_own]
    compiled = [*_compiled(run), *_uncompiled_part(run)] if compiles else []
    return [*run.gain_by(*own), *compiled, *(_skipped(run) if skips else ())]


def why_none_skipped(skipping: Skipping, steps: int, samplings: int = 1) -> Reason:
    """Why a run skipped none of all its `steps`, which it took in so many `samplings`."""
    if skipping.why_full is not None:
        return Reason("line_all_full", why=skipping.why_full)
    return Reason("line_few_steps") if steps / samplings < FEW_STEPS else Reason("line_none_skipped")


def _compiled(run: Run) -> list[Reason]:
    if not run.totals.compiled_calls and not run.totals.replays:
        left = sorted(run.left_eager, key=run.left_eager.__getitem__, reverse=True)
        return [Reason("line_not_compiled", why=[*run.why_uncompiled(), *left, Reason("compiling_unused")][0])]
    if run.is_traced:
        return [Reason("line_traced")]
    if not run.compiled_total:
        return [Reason("line_loaded")] if run.loaded else []
    images = run.pays_back_after
    if not run.compilations and (images is None or run.images > images):
        return []  # it was said, and has paid off, or is not going to
    parts = [Reason("line_compiled", seconds=rounded(run.compiled_total))]
    if run.totals.by_compiling.seconds is None:
        return [*parts, Reason("line_unmeasured")] if run.compilations else parts
    if images is None:
        return parts
    return [*parts, Reason("line_paid_back", images=images) if images > 1 else Reason("line_paid_back_at_once")]


def _uncompiled_part(run: Run) -> list[Reason]:
    """What ran uncompiled beside compiled blocks, where something is wrong with it."""
    compiled, eager = run.totals.compiled_calls, run.totals.eager_calls
    why = next((why for why in run.why_uncompiled() if why.code not in EXPECTED), None)
    if not compiled or eager < MUCH_UNCOMPILED * (compiled + eager) or why is None:
        return []
    return [Reason("line_partly", share=f"{eager / (compiled + eager):.0%}", why=why)]


def _skipped(run: Run) -> list[Reason]:
    told, steps = run.skipping, len(run.skipping.steps_taken)
    if not steps and told.why_full is None:
        return []
    if told.skipped_steps and told.target_db is not None:
        return [Reason("line_quality", asked=f"{told.target_db:g}", share=f"{told.skipped_work:.0%}")]
    if told.skipped_steps:
        return [Reason("line_skipped", skipped=told.skipped_steps, steps=steps)]
    return [why_none_skipped(told, steps, run.samplings)]
