"""A session in a diffusers script: plain, diffusers' compile_repeated_blocks, torch.compile of the whole model, ours.

Text-to-image pipelines with random weights, SDXL's and Flux's layout: in full size and bfloat16 on a GPU; with --quick
small, in float32, at sizes scaled down with their parity kept (`session_plan.latent_side`), on any machine. Every
contender runs in a fresh process with an empty compiler cache, one at a time, and without saved graphs.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools import Problem, command, pack

from . import child, report
from .compilations import RecompileLimit, counts, empty_inductor_cache
from .session_plan import SCALE, failure, latent_side

MODELS = ("sdxl", "flux")
CONTENDERS = PLAIN, BLOCKS, BLOCKS_DYNAMIC, WHOLE, OURS = ("plain", "blocks", "blocks dynamic", "whole", "ours")
COLUMNS = (
    *("model", "contender", "first_image", "later", "stalls", "gave_up_at", "first_call_s", "session_s"),
    *("worst_stall_s", "warm_s", "images_per_s", "worst_diff"),
)
LEGEND = """\
blocks: compile_repeated_blocks(fullgraph=True), as diffusers' guide has it; dynamic: with dynamic=True too.
whole: denoiser.compile(), which is torch.compile(dynamic=None). ours: accelerate_pipeline(pipe, ignores=("vae",)).
first_image, later: graphs compiled in the session's first image, and in all after it; stalls: images that compiled.
gave_up_at: where torch reached its recompile limit; from there on it runs uncompiled. first_call_s, session_s: of the
first image, and of all. worst_stall_s: of the slowest image after the first. warm_s: of all, each made once more right
after it was made first. images_per_s: the first size, warm, on a GPU. worst_diff: from plain, as a fraction of the
image's largest value."""


class Step(NamedTuple):
    """One call of the pipeline, pixels. lora: the strength of a LoRA, which is loaded where it first comes.

    quick: one of those that --quick makes.
    """

    name: str
    width: int = 1024
    height: int = 1024
    batch: int = 1
    lora: float | None = None
    quick: bool = True


STEPS = (
    Step("1024x1024"),
    Step("512x2048", 512, 2048),
    Step("2048x512", 2048, 512, quick=False),
    Step("720x960", 720, 960),
    Step("896x768", 896, 768, quick=False),
    Step("1280x720", 1280, 720, quick=False),
    Step("batch 2", batch=2),
    Step("LoRA at 0.8", lora=0.8),
    Step("LoRA at 0.3", lora=0.3),
    Step("LoRA off"),
)


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    if options.child:
        model, contender, expected = options.child
        print(json.dumps(measure(model, contender, Path(expected), options.quick, options.backend)))
        return
    missing = [name for name in ("diffusers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        raise Problem(f"This needs {' and '.join(missing)}: install tests/requirements.txt beside bench/'s.")
    if not options.quick and not _on_cuda():
        raise Problem("Full-size models need a CUDA device: --quick runs small ones anywhere.")
    rows: list[report.Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        for model in options.models:
            for contender in options.contenders:
                made = _in_a_fresh_process(model, contender, Path(work) / f"{model}.pt", options)
                rows += made
                print(report.table(totals(made), COLUMNS).splitlines()[-1], file=sys.stderr, flush=True)
    print(f"\n{report.table(totals(rows), COLUMNS)}\n\n{LEGEND}")
    report.finish(options.json, rows, failure(rows, STEPS[0].name))
    print("Ours compiled in the first image of each model alone, and is within tolerance in every one.")


def measure(model: str, contender: str, expected: Path, quick: bool, backend: str) -> list[report.Row]:
    """A row per step of one contender's session, in this process; plain writes its images to `expected`."""
    pack.load()
    import torch

    from . import pipelines

    device = "cuda" if _on_cuda() and not quick else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # Layers this small gain nothing from more.
    dtype = torch.float32 if quick else torch.bfloat16
    pipeline = pipelines.make(model, quick, device, dtype)
    images = {} if contender == PLAIN else torch.load(expected)
    rows = []
    with RecompileLimit() as limit:
        _accelerate(pipeline, contender, backend)
        for step in (step for step in STEPS if step.quick or not quick):
            before, uncompiled = counts(), _uncompiled()
            image, seconds = _timed(pipeline, step, quick)
            warm = statistics.median(_timed(pipeline, step, quick)[1] for _ in range(1 if quick else 3))
            wanted = images.setdefault(step.name, image)
            difference = (image - wanted).abs().max() / wanted.abs().max()
            row = {"model": model, "contender": contender, "step": step.name, "batch": step.batch}
            row |= {"compilations": counts().since(before).graphs, "uncompiled": _uncompiled() - uncompiled}
            row |= {"gave_up": limit.heard, "first_s": round(seconds, 3), "warm_s": round(warm, 4)}
            row |= {"relative_diff": difference.item(), "device": device, "dtype": "fp32" if quick else "bf16"}
            rows.append(row)
    if contender == PLAIN:
        torch.save(images, expected)
    return rows


def _accelerate(pipeline, contender: str, backend: str) -> None:
    chosen = {} if backend == "inductor" else {"backend": backend}
    if contender == BLOCKS:
        pipeline.denoiser.compile_repeated_blocks(fullgraph=True, **chosen)
    elif contender == BLOCKS_DYNAMIC:
        pipeline.denoiser.compile_repeated_blocks(fullgraph=True, dynamic=True, **chosen)
    elif contender == WHOLE:
        pipeline.denoiser.compile(**chosen)
    elif contender == OURS:
        from comfy_accel.accel import accelerate_pipeline

        accelerate_pipeline(pipeline.pipe, ignores=("vae",), backend=backend)


def _uncompiled() -> int:
    """Calls of blocks that our engine ran uncompiled, but for those that are slower compiled, as it has measured."""
    from comfy_accel.accel.core.fallbacks import fallbacks

    return sum(row["calls"] for row in fallbacks.rows() if row["code"] != "slower")


def _timed(pipeline, step: Step, quick: bool):
    """The images of a step, float32 on the CPU, and the seconds they took, a LoRA's loading included."""
    import torch

    scale = SCALE if quick else 1
    started = time.perf_counter()
    pipeline.set_lora(step.lora)
    sides = (8 * latent_side(side, scale) for side in (step.width, step.height))
    image = pipeline.images(*sides, step.batch, steps=2 if quick else 20)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return image.float().cpu(), time.perf_counter() - started


def totals(rows: Sequence[report.Row]) -> list[report.Row]:
    """A row per model and contender, with `COLUMNS`."""
    table = []
    for model, contender in dict.fromkeys((row["model"], row["contender"]) for row in rows):
        own = [row for row in rows if (row["model"], row["contender"]) == (model, contender)]
        compiled = [row["compilations"] for row in own]
        on_gpu = own[0]["device"] == "cuda"
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
                "images_per_s": own[0]["batch"] / own[0]["warm_s"] if on_gpu else None,
                "worst_diff": f"{max(row['relative_diff'] for row in own):.1e}",
            }
        )
    return table


def _on_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _in_a_fresh_process(model: str, contender: str, expected: Path, options: argparse.Namespace) -> list[report.Row]:
    arguments = [model, contender, str(expected), "--backend", options.backend, *(["--quick"] if options.quick else [])]
    with empty_inductor_cache():
        return child.result_of("bench.diffusers", arguments, f"{model} with {contender}", {"ACCEL_STORE": "off"})


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench diffusers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models and sizes, on the CPU: compilations, stalls")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor", help="eager: counts alone")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="default: both")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if PLAIN not in options.contenders and not options.child:
        options.contenders = (PLAIN, *options.contenders)  # the others are compared with it
    return options


if __name__ == "__main__":
    sys.exit(command.run(main))
