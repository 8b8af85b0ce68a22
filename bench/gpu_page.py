"""docs/benchmarks.md, from the rows of `bench gpu`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .gpu_cases import CONTENDERS, EAGER
from .gpu_goals import Goal, speedups
from .report import Row, markdown

NO_GPU = """\
**No GPU was measured.** This is a trial run, on a CPU (`--quick`) with tiny models of the same families and a compiler
that compiles nothing, or on a made-up device whose kernels do nothing: what is counted (compilations, recorded calls,
on a CPU differences too) is exact, and the seconds, ratios and shares say nothing."""

LEGEND = """\
- steps/s: one over the median of at least ten steps, taken in turns with the other contenders, after warm-up; with
  DeepCache and EasyCache over the mean, since their steps differ by design. A step has cond and uncond in it.
- x eager: steps a second over those of eager at the same case in the same run.
- of peak: floating-point operations of an eager step (torch's count) over the step's seconds, as a share of what a
  large square matrix product reached in the same run on the same device.
- difference: of the model's output in a run's first step, before guidance, from the eager one, over its largest value;
  eager's own is that of a second run. With DeepCache and EasyCache the first step is computed in full, and the image
  is another by design: PSNR to the eager one after three steps stands beside, of random weights, which says nothing
  of pictures.
- Graph caches: 24 GB for each contender, for the forty sizes 6 GB.
- peak MB: what tensors held at most while the contender ran, without what recorded calls keep, its own or others';
  graphs MB: what these keep beside it, all sizes so far together.
- as shipped: Accelerate Model with its inputs as they come.
- ran as: a contender whose model calls were not replayed is named for what it was.
- Weights are random, at the models' published sizes. CFG everywhere, also where a model is published for use without.
  Wan: clips of 17 frames (5 latent frames). DeepCache: uniform schedule, so that the interval is what is measured.
- Cold starts have folders of their own, empty at first. Ours share theirs among them: the first of them starts cold,
  the others trace for themselves and find its kernels on disk; those with a cache policy are "CUDA graphs" with one
  node more, in its graph cache.
- Ours: *Accelerate Model*'s defaults without `check_gain`, which would run some calls of the first images twice.
- A prompt's stall: its seconds minus those of the same prompt once more."""

_TEXTS = ("contender", "kernel", "size", "start", "ran as", "notes", "model", "part", "what", "why")


def page(
    rows: Sequence[Row],
    skips: Sequence[Row],
    goals: Sequence[Goal],
    wrong: Sequence[str],
    facts: dict[str, Any],
) -> str:
    """The whole page. facts: date, command, device (`gpu_device.described`), versions."""
    device, versions = facts["device"], facts["versions"]
    named = f"{device['name']}" + (f", driver {device['driver']}" if device["driver"] else "")
    lines = ["# Benchmarks", ""]
    if device["cuda"] is None:
        lines += [NO_GPU, ""]
    lines += [
        f"Written by `{facts['command']}` on {facts['date']}: {named}; ComfyUI {versions['comfyui']}, "
        f"torch {device['torch']}"
        + (f" (CUDA {device['cuda']})" if device["cuda"] else "")
        + f", triton {versions['triton'] or 'none'}. A {device['matrix_side']} x {device['matrix_side']} product in "
        f"{device['matrix_dtype']}: {device['matrix_tflops']:.4g} TFLOP/s. Every row: `benchmarks.json`.",
        "",
        "## Goals",
        "",
        *(f"- {goal.sentence}" for goal in goals),
    ]
    if wrong:
        lines += ["", "## What failed", "", *(f"- {sentence}" for sentence in wrong)]
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        lines += ["", f"## {model}"]
        for part, table in TABLES.items():
            of_part = [row for row in own if row["part"] == part]
            if of_part:
                lines += ["", table(of_part)]
    if skips:
        lines += ["", "## Left out", "", markdown(skips, ("model", "part", "what", "contender", "why"), _TEXTS)]
    reasons = dict.fromkeys(f"{row['model']}: {reason}" for row in rows for reason in row.get("reasons", ()))
    if reasons:
        lines += ["", "## Why calls or blocks ran as they are", "", *(f"- {reason}" for reason in reasons)]
    return "\n".join([*lines, "", "## How to read this", "", LEGEND, ""])


def steps_table(rows: Sequence[Row]) -> str:
    times = {name: speedups(rows, name, EAGER) for name in CONTENDERS}
    shown = []
    for row in sorted(rows, key=_by_case(rows)):
        if "step_ms" not in row:
            continue
        factor = times[row["contender"]].get((row["model"], row["size"], row["batch"]))
        shown.append(
            {
                "size": row["size"],
                "batch": row["batch"],
                "contender": CONTENDERS[row["contender"]].label,
                "steps/s": row["steps_per_s"],
                "x eager": factor,
                "of peak": _percent(row["share_of_matrix"]),
                "first image s": row["first_image_s"],
                "compiled": row["compilations"],
                "peak MB": row["peak_mb"],
                "graphs MB": row["graphs_mb"],
                "difference": f"{row['answer_diff']:.1e}",
                "ran as": _ran_as(row),
            }
        )
    clip = next((f", clips of {row['frames']} latent frames" for row in rows if row.get("frames")), "")
    return f"### Steps ({rows[0].get('dtype', '')}{clip})\n\n{_table(shown)}"


def cold_table(rows: Sequence[Row]) -> str:
    shown = [
        {
            "contender": CONTENDERS[row["contender"]].label,
            "start": row["start"],
            "first image s": row["first_image_s"],
            "compiled": row["compilations"],
            "loaded": row["loaded"],
            "peak MB": row["peak_mb"],
            "held MB": row["held_mb"],
            "ran as": row["ran_as"],
        }
        for row in rows
        if "first_image_s" in row
    ]
    size = next((f" at {row['size']}" for row in rows if "size" in row), "")
    text = (
        "cold: with nothing compiled. warm: the same image once more. new process: the first image of another process, "
        "which finds what the cold one left on disk. held MB: all that torch holds in a process of the contender's "
        "own, recorded calls included."
    )
    return f"### First images{size}\n\n{text}\n\n{_table(shown)}"


def session_table(rows: Sequence[Row]) -> str:
    shown = []
    for contender in dict.fromkeys(row["contender"] for row in rows):
        own = [row for row in rows if row["contender"] == contender and "stall_s" in row]
        if not own:
            continue
        shown.append(
            {
                "contender": CONTENDERS[contender].label,
                "prompts": len(own),
                "stalls s": sum(row["stall_s"] for row in own),
                "after the first s": sum(row["stall_s"] for row in own[1:]),
                "worst after it s": max((row["stall_s"] for row in own[1:]), default=None),
                "compiled": sum(row["compilations"] for row in own),
                "after the first": sum(row["compilations"] for row in own[1:]),
                "recorded": sum(row["captures"] for row in own),
                "difference": f"{max(row['answer_diff'] for row in own):.1e}",
                "notes": next((f"recompile limit at {row['step']}" for row in own if row["gave_up"]), ""),
            }
        )
    return f"### Session\n\n{_table(shown)}"


def forty_table(rows: Sequence[Row]) -> str:
    own = [row for row in rows if "held_mb" in row]
    picked = [row for row in own if row["number"] in (1, 2, 5, 10, 20, 30, 40)]
    shown = [
        {
            "number": row["number"],
            "size": row["size"],
            "seconds": row["image_s"],
            "cache MB": row["cache_mb"],
            "budget MB": row["budget_mb"],
            "held MB": row["held_mb"],
            "compiled": row["compilations"],
            "recorded": row["captures"],
            "let go so far": row["evictions"],
            "ran as": row["ran_as"],
        }
        for row in picked
    ]
    late = sum(row["compilations"] for row in own[1:])
    text = f"With CUDA graphs. Of {len(own)} sizes some; after the first, {late} graphs were compiled."
    return f"### Forty sizes in a row\n\n{text}\n\n{_table(shown)}"


def profile_table(rows: Sequence[Row]) -> str:
    shown = [
        {
            "size": row["size"],
            "contender": CONTENDERS[row["contender"]].label,
            "kernel": f"`{row['kernel']}`",
            "calls a step": row["calls"],
            "ms a step": row["kernel_ms"],
            "share": f"{row['share']:.1%}",
        }
        for row in rows
        if "kernel" in row
    ]
    return f"### Kernels\n\n{_table(shown)}"


TABLES = {
    **{"steps": steps_table, "profile": profile_table, "cold": cold_table},
    **{"session": session_table, "sizes40": forty_table},
}


def line(row: Row) -> str:
    """One row as it is told while the bench runs."""
    if "why" in row:
        return f"{row['model']}, {row['part']}, {row['what']}, {row['contender']}: left out, {row['why']}"
    names = ("size", "batch", "number", "step", "start", "contender")
    figures = (
        "failed",
        "step_ms",
        "kernel_ms",
        "first_image_s",
        "stall_s",
        "image_s",
        "compilations",
        "ran_as",
        "answer_diff",
    )
    told = [
        f"{name} {row[name]:.3g}" if isinstance(row[name], float) else f"{name} {row[name]}"
        for name in _in(row, figures)
    ]
    return ", ".join([row["model"], row["part"], *(str(row[name]) for name in _in(row, names)), *told])


def _table(rows: Sequence[Row]) -> str:
    return markdown(rows, list(rows[0]), _TEXTS) if rows else "-"


def _in(row: Row, names: Iterable[str]) -> list[str]:
    return [name for name in names if name in row]


def _by_case(rows: Sequence[Row]) -> Callable[[Row], tuple]:
    """Sorts by batch, size as first measured, and contender."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    names = list(CONTENDERS)
    return lambda row: (row["batch"], sizes.index(row["size"]), names.index(row["contender"]))


def _ran_as(row: Row) -> str:
    notes = [row["ran_as"]] if row["ran_as"] != CONTENDERS[row["contender"]].label else []
    if row["gave_up"]:
        notes.append("recompile limit reached, eager from there")
    if row.get("skipped_steps") is not None:
        notes.append(f"{row['skipped_steps']} of {row['full_steps'] + row['skipped_steps']} steps skipped")
    if row["psnr_db"] is not None:
        notes.append(f"{row['psnr_db']:.1f} dB")
    if row["uncompiled"]:
        notes.append(f"{row['uncompiled']} block calls uncompiled")
    return ", ".join(notes)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
