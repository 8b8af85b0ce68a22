"""The first image after a restart: with the graphs that an earlier process saved, with torch's own cache, with neither.

Every row but warm_process is a fresh process. store starts with an empty compiler cache of torch's, torch_cache without
saved graphs. Small models, float32: on a CPU the seconds are those of compiling and loading, hardly of computing.
With --mechanisms also what torch keeps of the same blocks when torch.compile itself compiles them.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools import Problem, command, pack
from tools.comfyui import has_accelerator
from tools.inprocess import boot

from . import child, report
from .compilations import counts, fresh_folders

MODES = ("eager", "cold", "warm_process", "store", "torch_cache")
MECHANISMS = ("plain_cold", "plain_cache", "mega_cache")
COLUMNS = ("model", "mode", "first_image_s", "compilations", "loaded", "import_ms", "uncompiled", "relative_diff")
LEGEND = """\
first_image_s: of the first image, its compiling or loading included; warm_process is the second image of the cold one.
compilations: graphs that torch traced for it. loaded: saved graphs. import_ms: what loading the pack adds to ComfyUI's
own start. relative_diff: from the eager image, of its largest value. torch_cache: no saved graphs, but what torch
itself has kept of the cold process; of what is compiled ahead of time that is the C++ libraries alone."""
LEGEND_OF_MECHANISMS = """\
plain_*: without this pack, the same blocks by torch.compile, in the one way that torch's own caches are asked.
plain_cold: with nothing. plain_cache: with what plain_cold left in torch's cache on disk. mega_cache: with an empty
cache and the bytes of torch.compiler.save_cache_artifacts, whose loading is part of the time."""
LATENT_SIDE = 32
GOAL_OF_EAGER, GOAL_SECONDS, GOAL_OF_COLD, GOAL_IMPORT_MS = 1.2, 2.0, 10, 150
TOLERANCE = 1e-2
MOST_RECOMPILED = 64
"""Graphs that torch.compile may make of one function: blocks of a class differ in their weights' sizes."""


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    if options.child:
        print(json.dumps(measure(options.child[0], options.child[1], Path(options.child[2]))))
        return
    rows: list[report.Row] = []
    processes = [mode for mode in MODES if mode != "warm_process"] + list(MECHANISMS if options.mechanisms else ())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        for model in options.models:
            expected = Path(work) / f"{model}.pt"
            for mode in processes:
                made = _in_a_fresh_process(model, mode, Path(work), expected)
                rows += made
                print("\n".join(report.table(made, COLUMNS).splitlines()[2:]), file=sys.stderr, flush=True)
    shown = [{**row, "relative_diff": f"{row['relative_diff']:.1e}"} for row in rows]
    print(f"\n{(report.markdown if options.markdown else report.table)(shown, COLUMNS)}\n\n{LEGEND}")
    if options.mechanisms:
        print(LEGEND_OF_MECHANISMS)
    goals = verdicts(rows)
    for sentence, _ in goals:
        print(sentence)
    report.finish(options.json, rows, failure(rows))
    missed = sum(not reached for _, reached in goals)
    if missed:
        raise Problem(f"{missed} of {len(goals)} goals are missed; see above. A busy machine misses some by itself.")


def measure(model: str, mode: str, expected: Path) -> list[report.Row]:
    """The rows of one process: its first image, and in the cold one the second too."""
    boot(cpu=not has_accelerator())
    import comfy.samplers  # noqa: F401
    import comfy.sd  # noqa: F401
    import comfy_api.latest  # noqa: F401
    import torch

    started = time.perf_counter()
    pack.load()
    import comfy_accel.nodes  # noqa: F401

    import_ms = (time.perf_counter() - started) * 1e3
    from comfy_accel.accel.cache.graph_cache import shared
    from comfy_accel.accel.core.compile_settings import CompileSettings
    from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
    from kit import tiny_models

    artifacts = expected.with_suffix(".artifacts")
    torch.set_num_threads(1)  # Layers this small gain nothing from more.
    family = _families()[model]
    patcher = family.load(torch.float32)
    channels = patcher.get_model_object("latent_format").latent_channels
    prompts = family.conditioning(77, seed=1), family.conditioning(77, seed=2)
    rows = []
    before, loaded = counts(), 0
    for name in ("cold", "warm_process") if mode == "cold" else (mode,):
        started = time.perf_counter()
        if mode == "mega_cache":
            torch.compiler.load_cache_artifacts(artifacts.read_bytes())
        chosen = patcher
        if mode in MECHANISMS:
            _compile_plainly(patcher)
        elif mode != "eager":
            chosen = accelerate(patcher, CompileSettings())
        with torch.inference_mode(), _settings(mode):
            latent = torch.zeros(1, channels, LATENT_SIDE, LATENT_SIDE)
            image = tiny_models.sample_latent(chosen, latent, *prompts, steps=2)
        seconds = time.perf_counter() - started
        if mode == "eager":
            torch.save(image, expected)
        if mode == "plain_cold":
            artifacts.write_bytes(torch.compiler.save_cache_artifacts()[0])
        eager = torch.load(expected)
        spent = counts().since(before)
        rows.append(
            {
                "model": family.name,
                "mode": name,
                "first_image_s": round(seconds, 3),
                "compilations": spent.graphs,
                "loaded": shared.statistics()["loaded"] - loaded,
                "import_ms": round(import_ms, 1),
                "uncompiled": spent.uncompiled,
                "relative_diff": ((image - eager).abs().max() / eager.abs().max()).item(),
            }
        )
        before, loaded = counts(), shared.statistics()["loaded"]
    if mode in ("store", "cold") and shared.store.statistics()["misses"]:
        print(shared.store.statistics()["misses"], file=sys.stderr)
    return rows


def verdicts(rows: Sequence[report.Row]) -> list[tuple[str, bool]]:
    """A sentence per model and goal, and whether it is reached."""
    goals = []

    def judge(reached: bool, sentence: str) -> None:
        goals.append((f"{sentence}: {'reached' if reached else 'missed'}.", reached))

    for model in dict.fromkeys(row["model"] for row in rows):
        by = {row["mode"]: row for row in rows if row["model"] == model}
        seconds = {mode: row["first_image_s"] for mode, row in by.items()}
        limit = GOAL_OF_EAGER * seconds["eager"] + GOAL_SECONDS
        judge(
            seconds["store"] <= limit,
            f"{model}: {seconds['store']:.2f} s with saved graphs; "
            f"goal {GOAL_OF_EAGER} x eager + {GOAL_SECONDS:.0f} s = {limit:.2f} s",
        )
        times = seconds["cold"] / seconds["store"]
        judge(times >= GOAL_OF_COLD, f"{model}: {times:.1f} times as fast as cold; goal {GOAL_OF_COLD}")
        compiled = by["store"]["compilations"]
        judge(not compiled, f"{model}: {compiled} graphs compiled with saved graphs; goal 0")
    import_ms = statistics.median(row["import_ms"] for row in rows)
    judge(import_ms <= GOAL_IMPORT_MS, f"importing the pack takes {import_ms:.0f} ms; goal {GOAL_IMPORT_MS} ms")
    return goals


def failure(rows: list[report.Row]) -> str | None:
    """What makes the figures no result: a block that ran uncompiled, a compilation where there must be none."""
    for row in rows:
        what = f"{row['model']}, {row['mode']}"
        if row["uncompiled"]:
            return f"{what}: {row['uncompiled']} block calls ran uncompiled; its time is no result."
        if row["mode"] in ("eager", "store", "warm_process") and row["compilations"]:
            return f"{what}: {row['compilations']} graphs were compiled, and none should be."
        if row["mode"] not in ("eager", "store", "warm_process") and not row["compilations"]:
            return f"{what}: nothing was compiled; its time is no result."
        if row["mode"] == "store" and not row["loaded"]:
            return f"{what}: nothing was loaded."
        if not row["relative_diff"] <= TOLERANCE:
            return f"{what}: the image is off by {row['relative_diff']:.1e} of the largest value."
    return None


def _families():
    from kit import tiny_models

    # Two blocks of one kind: whether this measurement works, within two minutes.
    tiny = {**tiny_models.FLUX, "depth_single_blocks": 0}
    return {
        "unet": tiny_models.UNET_FAMILY,
        "dit": tiny_models.FLUX_FAMILY,
        "tiny": dataclasses.replace(tiny_models.FLUX_FAMILY, name="Flux DiT, one kind", config=tiny),
    }


def _compile_plainly(patcher) -> None:
    """Have torch.compile itself compile the blocks that the pack would."""
    from comfy_accel.accel.fingerprint.survey import survey

    for region in survey(patcher.model.diffusion_model).regions:
        region.block.compile(dynamic=True)


def _settings(mode: str):
    """Torch's settings while the image is made."""
    if mode not in MECHANISMS:
        return contextlib.nullcontext()
    import torch

    return torch._dynamo.config.patch(recompile_limit=MOST_RECOMPILED)


def _in_a_fresh_process(model: str, mode: str, work: Path, expected: Path) -> list[report.Row]:
    shared = {"cold": "torch", "torch_cache": "torch", "plain_cold": "plain", "plain_cache": "plain"}
    torch_cache = work / f"{model}-{shared.get(mode, f'{mode}-empty')}"
    environment = {
        **fresh_folders(torch_cache),
        "ACCEL_STORE": str(work / f"{model}-graphs") if mode in ("cold", "store") else "off",
    }
    return child.result_of("bench.restart", [model, mode, str(expected)], f"{model}, {mode}", environment)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench restart", description=__doc__)
    models = ("unet", "dit", "tiny")
    parser.add_argument("--models", nargs="+", choices=models, default=models[:2], help="default: unet and dit")
    parser.add_argument("--mechanisms", action="store_true", help="measure torch's own caches too")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main))
