"""The report as text: what the last image gained, and what to change for more. Pure: a state in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from ..core.sentences import counted
from ..step_cache.run import COMPARED, FULL, HALF, SKIPPED

ALIKE_DB = 40.0
"""PSNR above which a difference between two images is hard to see; at 30 dB it is visible side by side."""

_MOST_REASONS = 8
_LONGEST_TIMELINE = 100
_MOST_STRETCHES = 40
_WORDS = {FULL: "full", HALF: "half skipped", SKIPPED: "skipped", COMPARED: "full, compared"}


def text(state: Mapping[str, Any], diagnosis: Sequence[str], comparison: str | None = None) -> str:
    """The report, a few short paragraphs.

    state: as in `GET /accel/state`. diagnosis: sentences on what to change, in that order. comparison: a sentence on
        the image and its reference.
    """
    run = state["last_run"]
    parts = [
        ["Accel Report"],
        _image(run),
        _saved(run),
        [] if comparison is None else [comparison],
        _advice(diagnosis),
        _compiled(run),
        _skipped(run),
        _uncompiled(run),
        _cache(state["graph_cache"], state["graph_store"]),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def size_of(run: Mapping[str, Any]) -> str:
    """The size of a run's images, such as "512x512, batch 2"; that of its latent where they have none."""
    latent = run["latent"]
    if run.get("pixels"):
        return f"{run['pixels'][0]}x{run['pixels'][1]}, batch {latent[0]}"
    if len(latent) < 3:
        return "latent " + "x".join(map(str, latent)) if latent else "latent unknown"
    return f"latent {'x'.join(map(str, latent[2:]))}, batch {latent[0]}"


def _image(run: Mapping[str, Any] | None) -> list[str]:
    if run is None:
        return ["No image was made with an accelerated model yet."]
    steps = "" if run["steps"] is None else f", {counted(run['steps'], 'step')}"
    sampler = f" of {run['sampler']}" if run["sampler"] and steps else ""
    tokens = f", prompt of {' and '.join(map(str, run['contexts']))} tokens" if run["contexts"] else ""
    samplers = f" in {run['samplings']} samplers" if run["samplings"] > 1 else ""
    return [f"Last image: {run['model']}, {size_of(run)}{tokens}{steps}{sampler}{samplers}: {seconds(run['seconds'])}."]


def _compiled(run: Mapping[str, Any] | None) -> list[str]:
    if run is None or run["compiling"] is None:
        return []
    is_traced = run["compiling"]["backend"] == "eager"
    word = "traced" if is_traced else "compiled"
    calls = run["compiled_calls"] + run["eager_calls"]
    share = f" ({run['compiled_calls'] / calls:.0%})" if calls else ""
    how = "traced but uncompiled (backend eager)" if is_traced else "compiled"
    lines = [f"Compiling: {run['compiled_calls']} of {calls} block calls{share} ran {how}."]
    if run["blocks"]:
        lines.append(f"  {counted(run['blocks'], 'block')} of {counted(run['kinds'], 'type')} can be {word}.")
    if run["compilations"]:
        lines.append(f"  This run {word} {counted(run['compilations'], 'graph')} in {seconds(run['compile_seconds'])}.")
    if run["loaded"]:
        lines.append(f"  It loaded {counted(run['loaded'], 'graph')} from disk in {seconds(run['load_seconds'])}.")
    if run["model_calls"]:
        lines.append(f"  {run['replays']} of {counted(run['model_calls'], 'model call')} replayed a CUDA graph.")
    if run["captures"]:
        lines.append(f"  It captured {counted(run['captures'], 'CUDA graph')} in {seconds(run['capture_seconds'])}.")
    if not run["compilations"] and not run["loaded"] and run["compiled_calls"]:
        lines.append("  All graphs were there already.")
    return lines


def _skipped(run: Mapping[str, Any] | None) -> list[str]:
    if run is None or run["caching"] is None:
        return []
    steps = run["steps_taken"]
    shown = steps if len(steps) <= _LONGEST_TIMELINE else f"{steps[:_LONGEST_TIMELINE]}..."
    lines = [f"DeepCache: {skipped_of(steps)}."]
    legend = "F full, H half skipped, S skipped" if HALF in shown else "F full, S skipped"
    return [*lines, f"  {shown}   ({legend})", *_plan(run)] if steps else lines


def skipped_of(letters: Sequence[str]) -> str:
    """How many of a run's steps were skipped: "8 of 20 steps skipped, 5 half skipped"."""
    halves = f", {letters.count(HALF)} half skipped" if HALF in letters else ""
    return f"{letters.count(SKIPPED)} of {counted(len(letters), 'step')} skipped{halves}"


def quality_of(run: Mapping[str, Any]) -> str:
    """What a run with a quality target came to: "40 dB asked, 43.2 by estimate, 46% of the work skipped"."""
    reached = "nothing skipped" if run["estimated_db"] is None else f"{run['estimated_db']:.1f} by estimate"
    return f"{run['target_db']:g} dB asked, {reached}, {max(run['skipped_work'], 0):.0%} of the work skipped"


def _plan(run: Mapping[str, Any]) -> list[str]:
    """What a quality target decided for each stretch of steps, and what by."""
    if not run["plan"]:
        return []
    lines, first = [f"  {quality_of(run)}"], 1
    for letter, rows in groupby(run["plan"], key=lambda row: row[0]):
        levels, decibels = zip(*((level, known) for _, level, known in rows), strict=True)
        last = first + len(levels) - 1
        places = f"{first}" if last == first else f"{first} to {last}"
        noise = f"{levels[0]:.3g}" if last == first else f"{levels[0]:.3g} to {levels[-1]:.3g}"
        known = [value for value in decibels if value is not None]
        estimate = f"{known[-1]:.1f} dB by estimate{'' if letter == SKIPPED else ' if skipped'}" if known else ""
        lines.append(f"  {places:>8}  {_WORDS[letter]:<14}  noise {noise:<16}  {estimate}".rstrip())
        first = last + 1
    return lines if len(lines) <= _MOST_STRETCHES else [*lines[:_MOST_STRETCHES], "  ..."]


def _saved(run: Mapping[str, Any] | None) -> list[str]:
    if run is None:
        return []
    saved = run["saved_seconds"]
    if saved is None:
        return [f"Time saved: not known. {run['saved_how']}"]
    without = run["seconds"] + saved
    if saved < 0:
        first = f"Time saved: none; it took about {seconds(-saved)} longer."
    else:
        share = f" ({saved / without:.0%})" if without > 0 else ""
        first = f"Time saved: about {seconds(saved)} of the {seconds(without)} that it would have taken{share}."
    return [first, f"  How this is known: {run['saved_how']}"]


def comparison(psnr: float) -> str:
    """What a PSNR means, in dB; 100 and above is equal."""
    if psnr >= 100:
        return "Compared with the reference: equal."
    seen = "hard to see" if psnr >= ALIKE_DB else "visible side by side"
    return f"Compared with the reference: {psnr:.1f} dB PSNR ({seen})."


def _uncompiled(run: Mapping[str, Any] | None) -> list[str]:
    rows = sorted(run["fallbacks"], key=lambda row: -row["calls"]) if run is not None else []
    left = sorted(run["left_eager_reasons"], key=lambda row: -row["blocks"]) if run is not None else []
    if not rows and not left:
        return []
    lines = [f"  {row['block']}: {row['reason']} ({counted(row['calls'], 'time')})" for row in rows[:_MOST_REASONS]]
    lines += [f"  {counted(row['blocks'], 'block')}: {row['reason']}" for row in left[:_MOST_REASONS]]
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
