"""What the rows of `bench gpu` show: its goals, what failed, and docs/benchmarks.md. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .gpu_cases import CAPTURED, CONTENDERS, CORE, EAGER, NO_REPLAYS, PARTS
from .report import Row, markdown

REACHED, MISSED, NOT_MEASURED = "reached", "missed", "not measured"
JUDGED = "SDXL"
OF_EAGER = {"512x512": 1.3, "1024x1024": 1.15}
WITH_DEEP_CACHE = 2.5
STALLS_OF_CORE = 0.1
MINUTES = 9.0
MOST_GROWTH = 1.03
"""Memory held at the last ten sizes, over the most held before."""

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

Place = tuple[str, str, int]
"""Model, size and batch of steps."""


class Goal(NamedTuple):
    """sentence: with the figures and the state."""

    sentence: str
    state: str


def goals(rows: Sequence[Row], skips: Sequence[Row], has_gpu: bool, seconds: dict[str, float]) -> list[Goal]:
    """All of them. seconds: that each model took; without a GPU only the outputs are judged."""
    judged = [
        *_each(
            rows, "steps", "CUDA graphs at least as fast as core's TorchCompileModel at every size", _beside_core, skips
        ),
        *_beside_eager(rows),
        *_each(
            rows, "session", f"the session's stalls with CUDA graphs at most {STALLS_OF_CORE:.0%} of core's", _stalls
        ),
        *_each(rows, "sizes40", "forty sizes in a row, memory within the budget and flat", _flat),
        _goal(f"{JUDGED}: every part within {MINUTES:.0f} minutes", *_minutes(rows, skips, seconds)),
    ]
    if not has_gpu:
        judged = [_goal(goal.sentence.rpartition(" (")[0].rpartition(": ")[0], None, "no GPU") for goal in judged]
    return [*judged, _goal("Every contender's output is eager's within tolerance", *_outputs(rows))]


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


def speedups(rows: Iterable[Row], contender: str, over: str) -> dict[Place, float]:
    """How many times as many steps a second the contender makes as the other one, place by place.

    Over eager: as eager was in the same turns.
    """
    timed = [row for row in rows if row["part"] == "steps" and "step_ms" in row]
    own = {_case(row): row for row in timed if row["contender"] == contender}
    if over == EAGER:
        return {case: row["eager_ms"] / row["step_ms"] for case, row in own.items() if row["eager_ms"]}
    other = {_case(row): row["step_ms"] for row in timed if row["contender"] == over}
    return {case: other[case] / row["step_ms"] for case, row in own.items() if case in other}


Judgement = tuple[bool | None, str]
"""Whether a goal is reached, None where that is open, and the figures."""


def _each(
    rows: Sequence[Row], part: str, what: str, judge: Callable[..., Judgement], *more: Sequence[Row]
) -> list[Goal]:
    """A goal for each model that has rows of the part, from these rows."""
    models = dict.fromkeys(row["model"] for row in rows if row["part"] == part)
    own = {name: [row for row in rows if (row["part"], row["model"]) == (part, name)] for name in models}
    made = [_goal(f"{name}: {what}", *judge(own[name], *more)) for name in models]
    return made or [_goal(what[0].upper() + what[1:], None, "no rows")]


def _beside_core(rows: Sequence[Row], skips: Sequence[Row]) -> Judgement:
    times = speedups(rows, CAPTURED, CORE)
    if not times:
        return None, "no case has both"
    worst = min(times, key=times.__getitem__)
    figure = f"{times[worst]:.2f} times as fast at the worst of {len(times)} cases, {_name(worst)}"
    unreplayed = [_name(case) for case in times if not _replays(rows, case, CAPTURED)]
    about = "steps", rows[0]["model"]
    out = [
        row["what"] for row in skips if (row["part"], row["model"]) == about and row["contender"] in (CAPTURED, CORE)
    ]
    if unreplayed:
        return None, f"{figure}, but no CUDA graphs at {', '.join(unreplayed)}"
    if times[worst] >= 1 and out:
        return None, f"{figure}; left out: {', '.join(dict.fromkeys(out))}"
    return times[worst] >= 1, figure


def _beside_eager(rows: Sequence[Row]) -> list[Goal]:
    wanted = [(size, CAPTURED, "with CUDA graphs", least) for size, least in OF_EAGER.items()]
    wanted += [(size, "deepcache-3", "with DeepCache 3", WITH_DEEP_CACHE) for size in OF_EAGER]
    made = []
    for size, contender, label, least in wanted:
        case = (JUDGED, size, 1)
        times = speedups(rows, contender, EAGER).get(case)
        judged: Judgement = (None, "no such row") if times is None else (times >= least, f"{times:.2f}")
        if times is not None and not _replays(rows, case, contender):
            judged = None, f"{times:.2f}, but as compiled blocks alone"
        made.append(_goal(f"{JUDGED}, {size}, {label}: at least {least} times eager", *judged))
    return made


def _stalls(rows: Sequence[Row]) -> Judgement:
    own, core = (
        {row["step"]: row["stall_s"] for row in rows if row["contender"] == contender and "stall_s" in row}
        for contender in (CAPTURED, CORE)
    )
    if not own.keys() & core.keys():
        return None, "not run by both"
    ours, theirs = sum(own.values()), sum(core.values())
    figure = f"{ours:.1f} s in {len(own)} prompts, core {theirs:.1f} s in {len(core)}"
    # A session of core's that was cut stalls no less than this; one of ours that was cut proves nothing.
    if len(own) >= len(core) and ours <= STALLS_OF_CORE * theirs:
        return True, figure
    return False if len(own) == len(core) else None, figure


def _flat(rows: Sequence[Row]) -> Judgement:
    own = [row for row in rows if "held_mb" in row]
    if len(own) < 40:
        return None, f"{len(own)} sizes were run"
    most, budget = max(row["cache_mb"] for row in own), own[0]["budget_mb"]
    held = [row["held_mb"] for row in own]
    grown = max(held[-10:]) / max(held[:-10])
    figure = f"{most:.0f} MB of {budget} MB at most; the last ten sizes held {grown:.3f} of the most before"
    if any(row["ran_as"] == NO_REPLAYS for row in own):
        return None, f"{figure}, but not every size was recorded"
    return most <= budget and grown <= MOST_GROWTH, figure


def _minutes(rows: Sequence[Row], skips: Sequence[Row], seconds: dict[str, float]) -> Judgement:
    if JUDGED not in seconds:
        return None, "not run"
    left_out = [row for row in skips if row["model"] == JUDGED]
    figure = f"{seconds[JUDGED] / 60:.1f} minutes, {len(left_out)} things left out"
    if seconds[JUDGED] > 60 * MINUTES or left_out:
        return False, figure
    parts = {row["part"] for row in rows if row["model"] == JUDGED}
    missing = ", ".join(part for part in PARTS if part not in parts)
    return (None, f"{figure}; parts not run: {missing}") if missing else (True, figure)


def _outputs(rows: Sequence[Row]) -> Judgement:
    checked = [row for row in rows if _is_compared(row) and row["contender"] != EAGER]
    if not checked:
        return None, "nothing was compared"
    wrong = failures(rows)
    worst = max(checked, key=lambda row: row["answer_diff"])
    place = f"{_place(worst)}{CONTENDERS[worst['contender']].label}"
    figure = f"{len(checked)} outputs compared, the worst off by {worst['answer_diff']:.1e} ({place})"
    return not wrong, f"{figure}; {len(wrong)} failures" if wrong else figure


def _goal(what: str, reached: bool | None, figure: str) -> Goal:
    state = NOT_MEASURED if reached is None else REACHED if reached else MISSED
    return Goal(f"{what}: {state} ({figure}).", state)


def _is_compared(row: Row) -> bool:
    """Whether its output has a value that should be eager's; on the made-up device none has."""
    return row.get("answer_diff") is not None and row.get("tolerance") is not None


def _replays(rows: Sequence[Row], case: Place, contender: str) -> bool:
    own = (row for row in rows if row["part"] == "steps" and row["contender"] == contender and "step_ms" in row)
    return next(row for row in own if _case(row) == case)["ran_as"] != NO_REPLAYS


def _case(row: Row) -> Place:
    return row["model"], row["size"], row["batch"]


def _name(case: Place) -> str:
    return f"{case[1]} batch {case[2]}"


def _place(row: Row) -> str:
    """Where in its part: the case, the prompt or the start."""
    if row["part"] in ("steps", "profile"):
        return f"{_name(_case(row))}, "
    if row["part"] == "session":
        return f"session, {row['step']}, "
    return f"{row['start']} start, " if row["part"] == "cold" else f"size {row['number']} of 40, "


def page(rows: Sequence[Row], skips: Sequence[Row], facts: dict[str, Any], seconds: dict[str, float]) -> str:
    """The whole page. facts: date, command, device (`gpu_device.described`), versions. seconds: as of `goals`."""
    device, versions = facts["device"], facts["versions"]
    driver = f", driver {device['driver']}" if device["driver"] else ""
    cuda = f" (CUDA {device['cuda']})" if device["cuda"] else ""
    lines = ["# Benchmarks", ""]
    if not cuda:
        lines += [NO_GPU, ""]
    lines += [
        f"Written by `{facts['command']}` on {facts['date']}: {device['name']}{driver}; ComfyUI {versions['comfyui']}, "
        f"torch {device['torch']}{cuda}, triton {versions['triton'] or 'none'}. A {device['matrix_side']} x "
        f"{device['matrix_side']} product in {device['matrix_dtype']}: {device['matrix_tflops']:.4g} TFLOP/s. "
        "Every row: `benchmarks.json`.",
        *("", "## Goals", ""),
        *(f"- {goal.sentence}" for goal in goals(rows, skips, bool(cuda), seconds)),
    ]
    wrong = failures(rows)
    if wrong:
        lines += ["", "## What failed", "", *(f"- {sentence}" for sentence in wrong)]
    for model in dict.fromkeys(row["model"] for row in rows):
        lines += ["", f"## {model}"]
        for part, write in TABLES.items():
            own = [row for row in rows if (row["model"], row["part"]) == (model, part)]
            if own:
                lines += ["", write(own)]
    if skips:
        lines += ["", "## Left out", "", markdown(skips, ("model", "part", "what", "contender", "why"), _TEXTS)]
    reasons = dict.fromkeys(f"{row['model']}: {reason}" for row in rows for reason in row.get("reasons", ()))
    if reasons:
        lines += ["", "## Why calls or blocks ran as they are", "", *(f"- {reason}" for reason in reasons)]
    return "\n".join([*lines, "", "## How to read this", "", LEGEND, ""])


def steps_table(rows: Sequence[Row]) -> str:
    """By batch, size as first measured, and contender."""
    times = {name: speedups(rows, name, EAGER) for name in CONTENDERS}
    sizes, names = list(dict.fromkeys(row["size"] for row in rows)), list(CONTENDERS)
    timed = [row for row in rows if "step_ms" in row]
    timed.sort(key=lambda row: (row["batch"], sizes.index(row["size"]), names.index(row["contender"])))
    shown = [
        {
            **_shown(row, "size", "batch", "contender", steps_per_s="steps/s"),
            "x eager": times[row["contender"]].get(_case(row)),
            "of peak": "-" if row["share_of_matrix"] is None else f"{row['share_of_matrix']:.1%}",
            **_shown(row, first_image_s="first image s", compilations="compiled", peak_mb="peak MB"),
            **_shown(row, graphs_mb="graphs MB"),
            "difference": f"{row['answer_diff']:.1e}",
            "ran as": _ran_as(row),
        }
        for row in timed
    ]
    clip = next((f", clips of {row['frames']} latent frames" for row in rows if row.get("frames")), "")
    return f"### Steps ({rows[0].get('dtype', '')}{clip})\n\n{_table(shown)}"


def cold_table(rows: Sequence[Row]) -> str:
    columns = {"compilations": "compiled", "loaded": "loaded", "peak_mb": "peak MB", "held_mb": "held MB"}
    shown = [
        _shown(row, "contender", "start", first_image_s="first image s", **columns, ran_as="ran as")
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
        stalls, compiled = [row["stall_s"] for row in own], [row["compilations"] for row in own]
        shown.append(
            {
                "contender": CONTENDERS[contender].label,
                "prompts": len(own),
                "stalls s": sum(stalls),
                "after the first s": sum(stalls[1:]),
                "worst after it s": max(stalls[1:], default=None),
                "compiled": sum(compiled),
                "after the first": sum(compiled[1:]),
                "recorded": sum(row["captures"] for row in own),
                "difference": f"{max(row['answer_diff'] for row in own):.1e}",
                "notes": next((f"recompile limit at {row['step']}" for row in own if row["gave_up"]), ""),
            }
        )
    return f"### Session\n\n{_table(shown)}"


def forty_table(rows: Sequence[Row]) -> str:
    own = [row for row in rows if "held_mb" in row]
    memory = {"image_s": "seconds", "cache_mb": "cache MB", "budget_mb": "budget MB", "held_mb": "held MB"}
    counts = {"compilations": "compiled", "captures": "recorded", "evictions": "let go so far", "ran_as": "ran as"}
    picked = [row for row in own if row["number"] in (1, 2, 5, 10, 20, 30, 40)]
    late = sum(row["compilations"] for row in own[1:])
    text = f"With CUDA graphs. Of {len(own)} sizes some; after the first, {late} graphs were compiled."
    shown = [_shown(row, "number", "size", **memory, **counts) for row in picked]
    return f"### Forty sizes in a row\n\n{text}\n\n{_table(shown)}"


def profile_table(rows: Sequence[Row]) -> str:
    shown = [
        {
            **_shown(row, "size", "contender"),
            "kernel": f"`{row['kernel']}`",
            **_shown(row, calls="calls a step", kernel_ms="ms a step"),
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
    figures = ("failed", "step_ms", "kernel_ms", "first_image_s", "stall_s", "image_s")
    figures += ("compilations", "ran_as", "answer_diff")
    told = [f"{name} {row[name]:{'.3g' if isinstance(row[name], float) else ''}}" for name in figures if name in row]
    return ", ".join([row["model"], row["part"], *(str(row[name]) for name in names if name in row), *told])


def _shown(row: Row, *names: str, **headings: str) -> Row:
    """Of the row, by their own names, and then under the headings; a contender by its label."""
    shown = {heading: row[name] for name, heading in ({name: name for name in names} | headings).items()}
    return shown | {"contender": CONTENDERS[row["contender"]].label} if "contender" in shown else shown


def _table(rows: Sequence[Row]) -> str:
    return markdown(rows, list(rows[0]), _TEXTS) if rows else "-"


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
