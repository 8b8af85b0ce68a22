"""Writes docs/benchmarks.md from the rows of `bench gpu`, and says what failed. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .gpu_cases import CONTENDERS, EAGER, FLAGS
from .report import Row, markdown

SHOWN = 0.1
"""Share of a step from which on a kernel is on the page."""

NO_GPU = """\
**No GPU was measured.** This is a trial run, on a CPU (`--quick`) with tiny models of the same families and a compiler
that compiles nothing, or on a made-up device whose kernels do nothing: what is counted (compilations, captured calls,
on a CPU differences too) is exact, and the seconds, ratios and shares say nothing."""

LEGEND = """\
- steps/s: one over the median of at least ten steps, taken in turns with the other contenders, after warm-up; at
  Balanced and Fast over the mean, since their steps differ by design.
- flags: ComfyUI's. default: none, so that memory comes from cudaMallocAsync, and no CUDA graph is captured; native:
  --disable-cuda-malloc; channels-last: that and --force-channels-last.
- host ms, device ms: of the model's calls in a step, until Python has queued their work and from the first kernel to
  the last. Where both are alike, the device waits for Python.
- x eager: steps a second over those of eager at the same case in the same run.
- of peak: floating-point operations of an eager step over its seconds, as a share of what a large square matrix
  product reached in the same run.
- difference: of the model's output in a run's first step, before guidance, from the eager one, over its largest value;
  eager's own is that of a second run. Balanced and Fast compute the first step in full.
- peak MB: what tensors held at most, without what captured calls keep; graphs MB: what these keep beside it.
- Weights are random, at the models' published sizes; CFG 5 everywhere. What Balanced and Fast skip of trained weights
  differs.
- First images: cold with nothing compiled, warm the same image once more. Ours share their compiler's folders: the
  first of them starts cold.
- Ours: *Accelerate Model*'s defaults without `check_gain`, which would run some calls of the first images twice.
  Speed Up: as the node installs it."""


def failures(rows: Iterable[Row]) -> list[str]:
    """A sentence for each output that is not eager's within tolerance, and for each contender that failed."""
    found = []
    for row in rows:
        where = f"{row['model']}, {_place(row)}{CONTENDERS[row['contender']].label}"
        if "failed" in row:
            found.append(f"{where}: {row['failed']}")
        elif _is_compared(row) and not row["answer_diff"] <= row["tolerance"]:
            off = f"{row['answer_diff']:.1e} of the largest value, more than {row['tolerance']:.0e}"
            found.append(f"{where}: differs from eager by {off}")
    return found


def _outputs(rows: Sequence[Row]) -> str:
    checked = [row for row in rows if _is_compared(row) and row["contender"] != EAGER]
    if not checked:
        return "No output was compared with eager's."
    worst = max(checked, key=lambda row: row["answer_diff"])
    place = f"{_place(worst)}{CONTENDERS[worst['contender']].label}"
    return (
        f"{len(checked)} outputs were compared with eager's, the worst is off by {worst['answer_diff']:.1e} ({place})."
    )


def _is_compared(row: Row) -> bool:
    """Whether its output has a value that should be eager's; on the made-up device none has."""
    return row.get("answer_diff") is not None and row.get("tolerance") is not None


def _ran(row: Row) -> bool:
    return "step_ms" in row


def _of_eager(row: Row) -> float | None:
    """How many times as fast as eager, as eager was in the same turns."""
    return row["eager_ms"] and row["eager_ms"] / row["step_ms"]


def _place(row: Row) -> str:
    """Where in its part: the case, the size or the start."""
    if row["part"] == "cold":
        return f"{row['start']} start, "
    return f"size {row['number']} of 40, " if "number" in row else f"{row['size']} batch {row['batch']}, "


def page(rows: Sequence[Row], skips: Sequence[Row], facts: dict[str, Any]) -> str:
    """The whole page. facts: date, command, device (`gpu_device.described`), versions."""
    device, versions = facts["device"], facts["versions"]
    driver = f", driver {device['driver']}" if device["driver"] else ""
    cuda = f" (CUDA {device['cuda']})" if device["cuda"] else ""
    lines = ["# Benchmarks", "", *([] if cuda else [NO_GPU, ""])]
    last = ", the last of the runs that it adds to," if "--add" in facts["command"] else ""
    lines += [
        f"Written by `{facts['command']}`{last} on {facts['date']}: {device['name']}{driver}; ComfyUI "
        f"{versions['comfyui']}, torch {device['torch']}{cuda}, triton {versions['triton'] or 'none'}. A "
        f"{device['matrix_side']} x {device['matrix_side']} product in {device['matrix_dtype']}: "
        f"{device['matrix_tflops']:.4g} TFLOP/s. "
        "Every row: `benchmarks.json`.",
        *("", _outputs(rows)),
    ]
    wrong = failures(rows)
    if wrong:
        lines += ["", "## What failed", "", *(f"- {sentence}" for sentence in wrong)]
    for model in dict.fromkeys(row["model"] for row in rows):
        lines += ["", f"## {model}"]
        for part, write in TABLES.items():
            own = [row for row in rows if (row["model"], row["part"]) == (model, part)]
            lines += ["", write(own)] if own else []
    if skips:
        lines += ["", "## Left out", "", markdown(skips, ("model", "part", "what", "contender", "why"))]
    reasons = dict.fromkeys(f"{row['model']}: {reason}" for row in rows for reason in row.get("reasons", ()))
    if reasons:
        lines += ["", "## Why calls or blocks ran as they are", "", *(f"- {reason}" for reason in reasons)]
    return "\n".join([*lines, "", "## How to read this", "", LEGEND, ""])


def steps_table(rows: Sequence[Row]) -> str:
    """By batch, size as first measured, and contender."""
    sizes, names, flags = list(dict.fromkeys(row["size"] for row in rows)), list(CONTENDERS), list(FLAGS)

    def order(row: Row) -> tuple[int, ...]:
        places = sizes.index(row["size"]), flags.index(row["flags"]), names.index(row["contender"])
        return row["batch"], *places

    timed = sorted(filter(_ran, rows), key=order)
    columns = {
        **{"size": "size", "batch": "batch", "flags": "flags", "contender": _label},
        **{"steps/s": "steps_per_s", "x eager": _of_eager},
        **{"host ms": lambda row: row.get("host_ms"), "device ms": lambda row: row.get("device_ms")},
        "of peak": lambda row: None if row["share_of_matrix"] is None else f"{row['share_of_matrix']:.1%}",
        **{"first image s": "first_image_s", "compiled": "compilations", "peak MB": "peak_mb"},
        **{"graphs MB": "graphs_mb", "difference": lambda row: f"{row['answer_diff']:.1e}", "ran as": _ran_as},
    }
    clip = next((f", clips of {row['frames']} latent frames" for row in rows if row.get("frames")), "")
    return f"### Steps ({rows[0].get('dtype', '')}{clip})\n\n{_table(timed, columns)}"


def profile_table(rows: Sequence[Row]) -> str:
    columns = {
        **{"size": "size", "flags": "flags", "contender": _label, "kernel": lambda row: f"`{row['kernel']}`"},
        **{"calls a step": "calls", "ms a step": "kernel_ms", "share": lambda row: f"{row['share']:.1%}"},
    }
    long = [row for row in rows if row.get("share", 0) >= SHOWN]
    return f"### Kernels of at least {SHOWN:.0%} of a step\n\n{_table(long, columns)}"


def cold_table(rows: Sequence[Row]) -> str:
    columns = {
        **{"flags": "flags", "contender": _label, "start": "start", "first image s": "first_image_s"},
        **{"compiled": "compilations", "peak MB": "peak_mb", "ran as": "ran_as"},
        **{"by kind": lambda row: _seconds(row, "kinds_s"), "by stage": lambda row: _seconds(row, "stages_s")},
    }
    table = _table([row for row in rows if "first_image_s" in row], columns)
    return f"### First images at {rows[0]['size']}\n\n{table}"


def attention_table(rows: Sequence[Row]) -> str:
    columns = {
        **{"size": "size", "batch": "batch", "flags": "flags", "q": "q", "chosen by": "chosen_by"},
        **{"kernel": lambda row: row.get("kernel", row.get("without")), "ms": lambda row: row.get("attention_ms")},
        "TFLOP/s": lambda row: row.get("tflops"),
    }
    asked = [row for row in rows if "chosen_by" in row]
    return f"### The longest attention\n\n{_table(asked, columns)}"


def rope_table(rows: Sequence[Row]) -> str:
    columns = {
        **{"size": "size", "flags": "flags", "embedding": "embedding", "step ms": "step_ms", "host ms": "host_ms"},
        **{"device ms": "device_ms", "compiled": "compilations", "uncompiled": "uncompiled"},
    }
    table = _table(list(filter(_ran, rows)), columns)
    return f"### Rotary embedding of comfy-kitchen, four layers in compiled blocks\n\n{table}"


def forty_table(rows: Sequence[Row]) -> str:
    own = [row for row in rows if "held_mb" in row]
    columns = {
        **{"number": "number", "size": "size", "seconds": "image_s", "cache MB": "cache_mb", "budget MB": "budget_mb"},
        **{"held MB": "held_mb", "compiled": "compilations", "captured": "captures", "let go so far": "evictions"},
        "ran as": "ran_as",
    }
    late = sum(row["compilations"] for row in own[1:])
    text = f"With CUDA graphs. Of {len(own)} sizes some; after the first, {late} graphs were compiled."
    if len(own) == 40:
        held = [row["held_mb"] for row in own]
        text += f" The last ten sizes held {max(held[-10:]) / max(held[:-10]):.3f} of the most memory before."
    table = _table([row for row in own if row["number"] in (1, 2, 5, 10, 20, 30, 40)], columns)
    return f"### Forty sizes in a row\n\n{text}\n\n{table}"


TABLES = {
    "steps": steps_table,
    "profile": profile_table,
    "cold": cold_table,
    "sizes40": forty_table,
    "attention": attention_table,
    "rope": rope_table,
}


def line(row: Row) -> str:
    """One row in words, while the bench runs."""
    if "why" in row:
        return f"{row['model']}, {row['part']}, {row['what']}, {row['contender']}: left out, {row['why']}"
    names = ("size", "batch", "number", "start", "flags", "contender", "chosen_by", "embedding", "kernel")
    figures = (
        *("failed", "without", "step_ms", "eager_ms", "host_ms", "device_ms", "calls", "kernel_ms", "attention_ms"),
        *("first_image_s", "image_s", "full_steps", "skipped_steps", "compilations", "kinds_s", "stages_s"),
        *("uncompiled", "ran_as", "answer_diff"),
    )
    told = [f"{name} {row[name]:{'.3g' if isinstance(row[name], float) else ''}}" for name in figures if name in row]
    return ", ".join([row["model"], row["part"], *(str(row[name]) for name in names if name in row), *told])


def _table(rows: Sequence[Any], columns: Mapping[str, str | Callable[[Any], Any]]) -> str:
    """A Markdown table; columns: heading → a field of the row, or a function of it; without those that are empty."""
    shown = [{heading: pick(row) if callable(pick) else row[pick] for heading, pick in columns.items()} for row in rows]
    filled = [heading for heading in columns if any(row[heading] not in (None, "") for row in shown)]
    return markdown(shown, filled) if rows else "-"


def is_telling(kernel: str) -> bool:
    """Whether a kernel is attention's, or converts a layout."""
    return any(part in kernel.lower() for part in ("sdpa", "flash", "fmha", "attention", "tonhwc", "tonchw"))


def _seconds(row: Row, name: str) -> str:
    return ", ".join(f"{of} {seconds}" for of, seconds in row.get(name, {}).items())


def _label(row: Row) -> str:
    return CONTENDERS[row["contender"]].label


def _ran_as(row: Row) -> str:
    notes = [row["ran_as"]] if row["ran_as"] != _label(row) else []
    if row["gave_up"]:
        notes.append("recompile limit reached, eager from there")
    if row.get("skipped_steps") is not None:
        notes.append(f"{row['skipped_steps']} of {row['full_steps'] + row['skipped_steps']} steps skipped")
    if row["uncompiled"]:
        notes.append(f"{row['uncompiled']} block calls uncompiled")
    return ", ".join(notes)
