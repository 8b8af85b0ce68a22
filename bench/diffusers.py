"""A session in a diffusers script: plain, diffusers' compile_repeated_blocks, torch.compile of the whole model, ours.

Small text-to-image pipelines of SDXL's and Flux's layout with random weights, in float32 on the CPU, at sizes scaled
down with their parity kept (`session_plan.latent_side`). Every contender runs in a fresh process with an empty compiler
cache, one at a time, and without saved graphs.
"""

import importlib.util
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from tools import Problem, command, pack

from . import child, report
from .compilations import RecompileLimit, counts, empty_inductor_cache
from .session_plan import failure, latent_side

MODELS = ("sdxl", "flux")
CONTENDERS = PLAIN, BLOCKS, BLOCKS_DYNAMIC, WHOLE, OURS = ("plain", "blocks", "blocks dynamic", "whole", "ours")
COLUMNS = (
    *("model", "contender", "first_image", "later", "stalls", "gave_up_at", "first_call_s", "session_s"),
    *("worst_stall_s", "warm_s", "worst_diff"),
)
LEGEND = """\
blocks: compile_repeated_blocks(fullgraph=True), as diffusers' guide has it; dynamic: with dynamic=True too.
whole: denoiser.compile(), which is torch.compile(dynamic=None). ours: accelerate_pipeline(pipe, ignores=("vae",)).
first_image, later: graphs compiled in the session's first image, and in all after it; stalls: images that compiled.
gave_up_at: where torch reached its recompile limit; from there on it runs uncompiled. first_call_s, session_s: of the
first image, and of all. worst_stall_s: of the slowest image after the first. warm_s: of all, each made once more right
after it was made first. worst_diff: from plain, as a fraction of the image's largest value."""


class Step(NamedTuple):
    """One call of the pipeline, pixels. lora: the strength of a LoRA, which is loaded where it first comes."""

    name: str
    width: int = 1024
    height: int = 1024
    batch: int = 1
    lora: float | None = None


STEPS = (
    Step("1024x1024"),
    Step("512x2048", 512, 2048),
    Step("720x960", 720, 960),
    Step("batch 2", batch=2),
    Step("LoRA at 0.8", lora=0.8),
    Step("LoRA at 0.3", lora=0.3),
    Step("LoRA off"),
)


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser("diffusers", __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="default: both")
    options = parser.parse_args(arguments)
    missing = [name for name in ("diffusers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        raise Problem(f"This needs {' and '.join(missing)}: install tests/requirements.txt beside bench/'s.")
    rows: list[report.Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        for model in options.models:
            for contender in CONTENDERS:
                with empty_inductor_cache():
                    given, what = [model, contender, f"{work}/{model}.pt"], f"{model} with {contender}"
                    made = child.result_of(measure, given, what, {"ACCEL_STORE": "off"})
                rows += made
                report.tell(*totals(made), COLUMNS)
    print(f"\n{report.table(totals(rows), COLUMNS)}\n\n{LEGEND}")
    report.finish(options.json, rows, failure(rows, STEPS[0].name))
    print("Ours compiled in the first image of each model alone, and is within tolerance in every one.")


def measure(model: str, contender: str, expected: str) -> list[report.Row]:
    """A row per step of one contender's session, in this process; plain writes its images to the file `expected`."""
    pack.load()
    import torch

    from . import pipelines

    torch.set_num_threads(1)  # Layers this small gain nothing from more.
    pipeline = pipelines.make(model)
    images = {} if contender == PLAIN else torch.load(expected)
    rows = []
    with RecompileLimit() as limit:
        _accelerate(pipeline, contender)
        for step in STEPS:
            before, uncompiled = counts(), _uncompiled()
            image, seconds = _timed(pipeline, step)
            warm = _timed(pipeline, step)[1]
            wanted = images.setdefault(step.name, image)
            difference = (image - wanted).abs().max() / wanted.abs().max()
            row = {"model": model, "contender": contender, "step": step.name, "batch": step.batch}
            row |= {"compilations": counts().since(before).graphs, "uncompiled": _uncompiled() - uncompiled}
            row |= {"gave_up": limit.heard, "first_s": round(seconds, 3), "warm_s": round(warm, 4)}
            row |= {"relative_diff": difference.item(), "dtype": "fp32"}
            rows.append(row)
    if contender == PLAIN:
        torch.save(images, expected)
    return rows


def _accelerate(pipeline, contender: str) -> None:
    if contender in (BLOCKS, BLOCKS_DYNAMIC):
        pipeline.denoiser.compile_repeated_blocks(fullgraph=True, dynamic=True if contender == BLOCKS_DYNAMIC else None)
    elif contender == WHOLE:
        pipeline.denoiser.compile()
    elif contender == OURS:
        from comfy_accel.accel import accelerate_pipeline

        accelerate_pipeline(pipeline.pipe, ignores=("vae",))


def _uncompiled() -> int:
    """Calls of blocks that our engine ran uncompiled, but for those that are slower compiled, as it has measured."""
    from comfy_accel.accel.core.fallbacks import fallbacks

    return sum(row["calls"] for row in fallbacks.rows() if row["code"] != "slower")


def _timed(pipeline, step: Step):
    """The images of a step, and the seconds they took, a LoRA's loading included."""
    started = time.perf_counter()
    pipeline.set_lora(step.lora)
    sides = (8 * latent_side(side) for side in (step.width, step.height))
    image = pipeline.images(*sides, step.batch, steps=2)
    return image, time.perf_counter() - started


def totals(rows: Sequence[report.Row]) -> list[report.Row]:
    """A row per model and contender, with `COLUMNS`."""
    table = []
    for model, contender in dict.fromkeys((row["model"], row["contender"]) for row in rows):
        own = [row for row in rows if (row["model"], row["contender"]) == (model, contender)]
        compiled = [row["compilations"] for row in own]
        table.append(
            {
                "model": model,
                "contender": contender,
                "first_image": compiled[0],
                "later": sum(compiled[1:]),
                "stalls": sum(count > 0 for count in compiled),
                "gave_up_at": next((row["step"] for row in own if row["gave_up"]), None),
                "first_call_s": own[0]["first_s"],
                "session_s": sum(row["first_s"] for row in own),
                "worst_stall_s": max(row["first_s"] for row in own[1:]),
                "warm_s": sum(row["warm_s"] for row in own),
                "worst_diff": report.scientific(max(row["relative_diff"] for row in own)),
            }
        )
    return table


if __name__ == "__main__":
    sys.exit(command.run(main))
