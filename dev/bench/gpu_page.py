"""What `bench gpu` measures, and its rows as a page. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .report import Row, markdown
from .session_plan import Case

MODELS = ("SDXL", "SD1.5", "Flux", "Z-Image", "Qwen-Image", "Wan")
"""SDXL first, in case a run is cut short."""

SIZES = ((1024, 1024), (512, 512), (720, 960), (768, 768), (1280, 720))
"""Width and height in pixels, in this order."""

BATCHES = (1, 4)

QUICK_MODELS, QUICK_SIZES, QUICK_BATCHES = ("SDXL",), ((512, 512), (720, 960)), (1,)

PARTS = ("steps", "profile", "sizes40")

EAGER, CORE = "eager", "core"
COMPILED, CAPTURED = "compiled-blocks", "cuda-graphs"
SPEED_UP, BALANCED, FAST = "speed-up", "balanced", "fast"
"""Speed Up at each quality. As the node does, it compares graphs with their blocks first."""

DEFAULT, NATIVE, CHANNELS_LAST = "default", "native", "channels-last"
FLAGS = {
    DEFAULT: ("--cuda-malloc",),
    NATIVE: ("--disable-cuda-malloc",),
    CHANNELS_LAST: ("--disable-cuda-malloc", "--force-channels-last"),
}
"""ComfyUI's own. With the default ones main.py chooses cudaMallocAsync on most cards."""


@dataclass(frozen=True)
class Contender:
    """label: shown to people. has_graphs: captures whole model calls where it can. quality: of Speed Up."""

    label: str
    has_graphs: bool = False
    quality: str | None = None

    @property
    def skips(self) -> bool:
        """Whether it skips work in some steps, so that its images differ by design."""
        return self.quality not in (None, "Exact")


CONTENDERS = {
    EAGER: Contender("eager"),
    CAPTURED: Contender("ours, CUDA graphs", has_graphs=True),
    COMPILED: Contender("ours, compiled blocks"),
    SPEED_UP: Contender("Speed Up, Exact", True, "Exact"),
    BALANCED: Contender("Speed Up, Balanced", True, "Balanced"),
    FAST: Contender("Speed Up, Fast", True, "Fast"),
    CORE: Contender("core's TorchCompileModel"),
}
"""In the order in which each case runs them: what takes long to prepare, core's node, comes last."""

KERNEL_SHARE = 0.1
"""Of a step, from which on a kernel is on the page."""

LEGEND = """\
- steps/s: one over the median of at least ten steps, taken in turns with eager's, after warm-up; at Balanced and Fast
  over the mean, since their steps differ by design. x eager: over eager's in the same turns.
- flags: ComfyUI's. default: none, so that memory comes from cudaMallocAsync, and no CUDA graph is captured; native:
  --disable-cuda-malloc; channels-last: that and --force-channels-last.
- host ms, device ms: of the model's calls in a step, until Python has queued their work and from the first kernel to
  the last. Where both are alike, the device waits for Python.
- of peak: floating-point operations of an eager step over its seconds, as a share of what a large square matrix
  product reached in the same run.
- difference: of the model's output in a run's first step, before guidance, from the eager one, over its largest value;
  eager's own is that of a second run.
- peak MB: what tensors held at most, without what captured calls keep; graphs MB: what these keep beside it.
- Weights are random, at the models' published sizes; CFG 5 everywhere. What Balanced and Fast skip of trained weights
  differs.
- First images: cold with nothing compiled, warm the same image once more. Ours share their compiler's folders: the
  first of them starts cold. Ours are without `check_gain`, which Speed Up has."""


def list_forty_sizes() -> list[Case]:
    """Forty different sizes of 512 to 1024 pixels a side, multiples of 8, large and small ones alternating."""
    sides = list(range(512, 1025, 8))
    # 38 and 24 share no factor with the 65 sides, so each is visited once, far from the previous one.
    return [Case(sides[(38 * number + 64) % 65], sides[(24 * number + 64) % 65]) for number in range(40)]


def merge(old: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """The new rows, and the old ones about something else. A contender's kernels are replaced together."""
    names = ("part", "model", "flags", "contender", "size", "batch", "start", "number")

    def about(row: Row) -> tuple:
        return tuple(row.get(name) for name in names)

    measured = set(map(about, new))
    return [row for row in old if about(row) not in measured] + list(new)


def find_failures(rows: Iterable[Row]) -> list[str]:
    """A sentence for each output that is not eager's within tolerance, and for each contender that failed."""
    found = []
    for row in rows:
        where = f"{row['model']}, {_name_place(row)}{_label(row)}"
        if "failed" in row:
            found.append(f"{where}: {row['failed']}")
        elif _is_compared(row) and not row["answer_diff"] <= row["tolerance"]:
            off = f"{row['answer_diff']:.1e} of the largest value, more than {row['tolerance']:.0e}"
            found.append(f"{where}: differs from eager by {off}")
    return found


def write_page(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The whole page. facts: date, command, device (`gpu_parts.describe`), versions."""
    device, versions = facts["device"], facts["versions"]
    lines = ["# Benchmarks", ""]
    if not device["cuda"]:
        lines += ["**No GPU was measured**: the counts are exact, seconds and shares say nothing.", ""]
    lines += [
        f"The last of its runs: `{facts['command']}`, {facts['date']}. {device['name']}, driver {device['driver']}; "
        f"ComfyUI {versions['comfyui']}, torch {device['torch']}, CUDA {device['cuda']}, triton {versions['triton']}. "
        f"A {device['matrix_side']} x {device['matrix_side']} product in {device['matrix_dtype']}: "
        f"{device['matrix_tflops']:.4g} TFLOP/s.",
    ]
    compared = [row for row in rows if _is_compared(row) and row["contender"] != EAGER]
    if compared:
        worst = max(compared, key=lambda row: row["answer_diff"])
        lines += ["", f"{len(compared)} outputs were compared with eager's, the worst is off by "]
        lines[-1] += f"{worst['answer_diff']:.1e} ({worst['model']}, {_name_place(worst)}{_label(worst)})."
    left_out = [tell(row) for row in rows if "why" in row]
    reasons = dict.fromkeys(f"{row['model']}: {reason}" for row in rows for reason in row.get("reasons", ()))
    lines += _write_section("What failed", find_failures(rows))
    for model in dict.fromkeys(row["model"] for row in rows):
        lines += ["", f"## {model}"]
        for part, (title, columns) in TABLES.items():
            own = [row for row in rows if (row["model"], row["part"]) == (model, part) and _is_shown(row)]
            own.sort(key=lambda row: (row.get("number", 0), row["size"], row.get("batch", 1), row["flags"]))
            lines += ["", f"### {title}", "", _write_table(own, columns)] if own else []
    lines += [*_write_section("Left out", left_out), *_write_section("Why calls or blocks ran as they are", reasons)]
    return "\n".join([*lines, "", "## How to read this", "", LEGEND, ""])


def tell(row: Row) -> str:
    """One row in words, while the bench runs."""
    names = ("size", "batch", "number", "start", "flags", "contender", "kernel")
    figures = (
        *("failed", "step_ms", "eager_ms", "host_ms", "device_ms", "calls", "kernel_ms", "first_image_s", "image_s"),
        *("full_steps", "skipped_steps", "compilations", "kinds_s", "stages_s", "uncompiled", "ran_as", "answer_diff"),
    )
    told = [f"{name} {row[name]:{'.3g' if isinstance(row[name], float) else ''}}" for name in figures if name in row]
    told += [f"left out, {row['why']}"] if "why" in row else []
    return ", ".join([row["model"], row["part"], *(str(row[name]) for name in names if name in row), *told])


def is_telling(kernel: str) -> bool:
    """Whether a kernel is attention's, or converts a layout."""
    return any(part in kernel.lower() for part in ("sdpa", "flash", "fmha", "attention", "tonhwc", "tonchw"))


def _is_compared(row: Row) -> bool:
    """Whether its output has a value that should be eager's; on the made-up device none has."""
    return row.get("answer_diff") is not None and row.get("tolerance") is not None


def _name_place(row: Row) -> str:
    """Where in its part: the case, the size or the start."""
    if row["part"] == "cold":
        return f"{row['start']} start, "
    return f"size {row['number']} of 40, " if "number" in row else f"{row['size']} batch {row['batch']}, "


def _write_section(title: str, sentences: Iterable[str]) -> list[str]:
    """A section of the page; none without a sentence."""
    lines = [f"- {sentence}" for sentence in sentences]
    return ["", f"## {title}", "", *lines] if lines else []


def _label(row: Row) -> str:
    return CONTENDERS[row["contender"]].label


def _tell_run(row: Row) -> str:
    notes = [row["ran_as"]] if row["ran_as"] != _label(row) else []
    if row["gave_up"]:
        notes.append("recompile limit reached, eager from there")
    if row.get("skipped_steps") is not None:
        notes.append(f"{row['skipped_steps']} of {row['full_steps'] + row['skipped_steps']} steps skipped")
    if row["uncompiled"]:
        notes.append(f"{row['uncompiled']} block calls uncompiled")
    return ", ".join(notes)


_CASE = {"size": "size", "batch": "batch", "flags": "flags", "contender": _label}
TABLES: dict[str, tuple[str, dict[str, str | Callable[[Row], Any]]]] = {
    "steps": (
        "Steps",
        {
            **{**_CASE, "weights": "dtype", "frames": "frames", "steps/s": "steps_per_s"},
            **{"x eager": lambda row: row["eager_ms"] and row["eager_ms"] / row["step_ms"]},
            **{"host ms": "host_ms", "device ms": "device_ms"},
            "of peak": lambda row: None if row["share_of_matrix"] is None else f"{row['share_of_matrix']:.1%}",
            **{"first image s": "first_image_s", "compiled": "compilations", "peak MB": "peak_mb"},
            **{"graphs MB": "graphs_mb", "difference": lambda row: f"{row['answer_diff']:.1e}", "ran as": _tell_run},
        },
    ),
    "profile": (
        f"Kernels of at least {KERNEL_SHARE:.0%} of a step",
        {
            **{**_CASE, "kernel": lambda row: f"`{row['kernel']}`", "calls a step": "calls", "ms a step": "kernel_ms"},
            "share": lambda row: f"{row['share']:.1%}",
        },
    ),
    "cold": (
        "First images",
        {
            **{**_CASE, "start": "start", "first image s": "first_image_s", "compiled": "compilations"},
            **{"peak MB": "peak_mb", "ran as": "ran_as", "by kind": "kinds_s", "by stage": "stages_s"},
        },
    ),
    "sizes40": (
        "Forty sizes in a row with CUDA graphs, some of them",
        {
            **{"number": "number", "size": "size", "seconds": "image_s", "cache MB": "cache_mb", "held MB": "held_mb"},
            **{"compiled": "compilations", "captured": "captures", "let go so far": "evictions", "ran as": "ran_as"},
        },
    ),
}
"""Title and columns of each part: heading → a field of the row, or a function of it."""


def _is_shown(row: Row) -> bool:
    """Whether the row has figures, and, where there are many, is one of those that tell most."""
    if "why" in row or "failed" in row:
        return False
    return row.get("share", 1) >= KERNEL_SHARE and row.get("number", 1) in (1, 2, 5, 10, 20, 30, 40)


def _write_table(rows: Sequence[Row], columns: Mapping[str, str | Callable[[Row], Any]]) -> str:
    """A Markdown table, without columns that are empty."""
    shown = [{name: pick(row) if callable(pick) else row.get(pick) for name, pick in columns.items()} for row in rows]
    return markdown(shown, [name for name in columns if any(row[name] not in (None, "") for row in shown)])
