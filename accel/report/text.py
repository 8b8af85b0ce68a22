"""The report as text: what the last image gained, and what to change for more. Pure: facts in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.sentences import counted
from ..step_cache.run import SKIPPED
from .run import Run, Skipping
from .savings import together

ALIKE_DB = 40.0
"""PSNR above which a difference between two images is hard to see; at 30 dB it is visible side by side."""

_MOST_REASONS = 8
_LONGEST_TIMELINE = 100


def text(
    run: Run | None,
    cache: Mapping[str, Any],
    store: Mapping[str, Any] | None,
    diagnosis: Sequence[str],
    comparison: str | None = None,
) -> str:
    """The report, a few short paragraphs.

    run: the last one. cache, store: what `statistics` gives. diagnosis: sentences on what to change, in that order.
    comparison: a sentence on the image and its reference.
    """
    gained = [["No image was made with an accelerated model yet."]] if run is None else [_image(run), _saved(run)]
    compared = [] if comparison is None else [comparison]
    done = [] if run is None else [_compiled(run), _skipped(run), _uncompiled(run)]
    parts = [["Accel Report"], *gained, compared, _advice(diagnosis), *done, _cache(cache, store)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def size_of(run: Run) -> str:
    """The size of a run's images, such as "512x512, batch 2"; that of its latent where they have none."""
    latent = run.latent
    if run.pixels:
        return f"{run.pixels[0]}x{run.pixels[1]}, batch {latent[0]}"
    if len(latent) < 3:
        return "latent " + "x".join(map(str, latent)) if latent else "latent unknown"
    return f"latent {'x'.join(map(str, latent[2:]))}, batch {latent[0]}"


def _image(run: Run) -> list[str]:
    contexts = run.totals.contexts
    steps = "" if run.steps is None else f", {counted(run.steps, 'step')}"
    sampler = f" of {run.sampler}" if run.sampler and steps else ""
    tokens = f", prompt of {' and '.join(map(str, contexts))} tokens" if contexts else ""
    samplers = f" in {run.samplings} samplers" if run.samplings > 1 else ""
    stopped = f" until it was stopped after {run.steps_done}" if run.failed and run.steps_done is not None else ""
    told = f"{run.model}, {size_of(run)}{tokens}{steps}{sampler}{samplers}"
    return [f"Last image: {told}: {seconds(run.seconds)}{stopped}."]


def _compiled(run: Run) -> list[str]:
    if run.compiling is None:
        return []
    told, word = run.totals, "traced" if run.is_traced else "compiled"
    calls = told.compiled_calls + told.eager_calls
    share = f" ({told.compiled_calls / calls:.0%})" if calls else ""
    how = "traced but uncompiled (backend eager)" if run.is_traced else "compiled"
    lines = [f"Compiling: {told.compiled_calls} of {calls} block calls{share} ran {how}."]
    if run.blocks:
        lines.append(f"  {counted(run.blocks, 'block')} of {counted(run.kinds, 'type')} can be {word}.")
    if run.compilations:
        lines.append(f"  This run {word} {counted(run.compilations, 'graph')} in {seconds(run.compile_seconds)}.")
    if run.loaded:
        lines.append(f"  It loaded {counted(run.loaded, 'graph')} from disk in {seconds(run.load_seconds)}.")
    if told.model_calls:
        lines.append(f"  {told.replays} of {counted(told.model_calls, 'model call')} replayed a CUDA graph.")
    if run.captures:
        lines.append(f"  It captured {counted(run.captures, 'CUDA graph')} in {seconds(run.capture_seconds)}.")
    if not run.compilations and not run.loaded and told.compiled_calls:
        lines.append("  All graphs were there already.")
    return lines


def _skipped(run: Run) -> list[str]:
    steps = run.skipping.steps_taken
    if run.caching is None or not steps:
        return []  # the advice has the reason
    shown = steps if len(steps) <= _LONGEST_TIMELINE else f"{steps[:_LONGEST_TIMELINE]}..."
    is_planned = run.skipping.skipped_steps and run.skipping.target_db is not None
    plan = [f"  {plan_of(run.skipping)}"] if is_planned else []
    if run.skipping.kept_bytes:
        plan.append(f"  {megabytes(run.skipping.kept_bytes)} of features kept for it")
    return [f"DeepCache: {skipped_of(steps)}.", f"  {shown}   (F full, S skipped)", *plan]


def skipped_of(letters: Sequence[str]) -> str:
    """How many of a run's steps were skipped: "8 of 20 steps skipped"."""
    return f"{letters.count(SKIPPED)} of {counted(len(letters), 'step')} skipped"


def plan_of(told: Skipping) -> str:
    """What a run planned for, and what that left out: "planned for 40 dB, 46% of the work skipped"."""
    return f"planned for {told.target_db:g} dB, {told.skipped_work or 0:.0%} of the work skipped"


def _saved(run: Run) -> list[str]:
    told = together(*run.savings)
    saved, how = told["saved_seconds"], told["saved_how"]
    if saved is None:
        return [f"Time saved: not known. {how}"]
    without = run.seconds + saved
    if saved < 0:
        first = f"Time saved: none; it took about {seconds(-saved)} longer."
    else:
        share = f" ({saved / without:.0%})" if without > 0 else ""
        first = f"Time saved: about {seconds(saved)} of the {seconds(without)} that it would have taken{share}."
    return [first, f"  How this is known: {how}"]


def comparison(psnr: float) -> str:
    """What a PSNR means, in dB; 100 and above is equal."""
    if psnr >= 100:
        return "Compared with the reference: equal."
    seen = "hard to see" if psnr >= ALIKE_DB else "visible side by side"
    return f"Compared with the reference: {psnr:.1f} dB PSNR ({seen})."


def _uncompiled(run: Run) -> list[str]:
    rows = sorted(run.fallbacks.items(), key=lambda row: -row[1])
    left = sorted(run.left_eager.items(), key=lambda row: -row[1])
    if not rows and not left:
        return []
    lines = [f"  {block}: {why} ({counted(calls, 'time')})" for (block, why), calls in rows[:_MOST_REASONS]]
    lines += [f"  {counted(blocks, 'block')}: {why}" for why, blocks in left[:_MOST_REASONS]]
    more = len(rows) + len(left) - len(lines)
    return ["What ran uncompiled, and why:", *lines, *([f"  and {counted(more, 'more reason')}"] if more else [])]


def _cache(cache: Mapping[str, Any], store: Mapping[str, Any] | None) -> list[str]:
    budget = f"{megabytes(cache['bytes'])} of {megabytes(cache['max_bytes'])}"
    totals = f"{cache['compilations']} compiled in {seconds(cache['seconds'])}, {cache['loaded']} loaded"
    lines = [
        f"Graph cache: {counted(cache['graphs'], 'graph')}, {budget}.",
        f"  Since the start: {totals}, used {counted(cache['hits'], 'time')}, {cache['evictions']} dropped.",
    ]
    if store is not None:
        lines.append(f"  On disk: {store['loaded']} loaded and {store['saved']} saved by this process.")
    return lines


def _advice(diagnosis: Sequence[str]) -> list[str]:
    if not diagnosis:
        return ["Nothing to change."]
    first, *others = diagnosis
    lines = ["Change first:", f"  {first}"]
    return [*lines, "Then:", *(f"  {sentence}" for sentence in others)] if others else lines


def seconds(value: float) -> str:
    """A time in words: 0.02 s, 3.4 s, 2 min 05 s."""
    if value < 60:
        return f"{value:.2g} s" if value < 1 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s"


def megabytes(value: int) -> str:
    """A number of bytes in MB."""
    return f"{value / (1 << 20):.1f} MB" if value < 10 << 20 else f"{value / (1 << 20):.0f} MB"
