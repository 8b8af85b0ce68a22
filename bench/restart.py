"""The first image after a restart: with the graphs that an earlier process saved, with torch's own cache, with neither.

Every row but warm_process is a fresh process. store starts with an empty compiler cache of torch's, torch_cache without
saved graphs. Small models, float32: on a CPU the seconds are those of compiling and loading, hardly of computing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import ROOT, Problem, command, pack, report
from .comfyui import has_accelerator, tree
from .compilations import CACHE_DIR, counts
from .inprocess import boot

MODES = ("eager", "cold", "warm_process", "store", "torch_cache")
COLUMNS = ("model", "mode", "first_image_s", "compilations", "loaded", "import_ms", "uncompiled", "relative_diff")
LEGEND = """\
first_image_s: of the first image, its compiling or loading included; warm_process is the second image of the cold one.
compilations: graphs that torch traced for it. loaded: saved graphs. import_ms: what loading the pack adds to ComfyUI's
own start. relative_diff: from the eager image, of its largest value. torch_cache: no saved graphs, but what torch
itself has kept of the cold process; of what is compiled ahead of time that is the C++ libraries alone."""
LATENT_SIDE = 32
GOAL_OF_EAGER, GOAL_SECONDS, GOAL_OF_COLD = 1.2, 2.0, 10
TOLERANCE = 1e-2


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    if options.child:
        print(json.dumps(measure(options.child[0], options.child[1], Path(options.child[2]))))
        return
    rows: list[report.Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        for model in options.models:
            expected = Path(work) / f"{model}.pt"
            for mode in ("eager", "cold", "store", "torch_cache"):
                rows += _in_a_fresh_process(model, mode, Path(work), expected)
                print(report.table(rows[-1:], COLUMNS).splitlines()[-1], file=sys.stderr, flush=True)
    shown = [{**row, "relative_diff": f"{row['relative_diff']:.1e}"} for row in rows]
    print(f"\n{report.table(shown, COLUMNS)}\n\n{LEGEND}")
    for sentence in verdicts(rows):
        print(sentence)
    if options.json:
        report.write(options.json, rows, tree())
        print(f"JSON: {options.json}")
    sentence = failure(rows)
    if sentence:
        raise Problem(sentence)


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
    from comfy_accel.accel.block_runner import CompileSettings
    from comfy_accel.accel.graph_cache import shared
    from comfy_accel.accel.hosts.comfyui.accelerate import accelerate

    from . import tiny_models

    torch.set_num_threads(1)  # Layers this small gain nothing from more.
    family = _families()[model]
    patcher = family.load(torch.float32)
    channels = patcher.get_model_object("latent_format").latent_channels
    prompts = family.conditioning(77, seed=1), family.conditioning(77, seed=2)
    rows = []
    for name in ("cold", "warm_process") if mode == "cold" else (mode,):
        before, loaded = counts(), shared.statistics()["loaded"]
        started = time.perf_counter()
        with torch.inference_mode():  # as ComfyUI runs every node
            latent = torch.zeros(1, channels, LATENT_SIDE, LATENT_SIDE)
            chosen = patcher if mode == "eager" else accelerate(patcher, CompileSettings())
            image = tiny_models.sample(chosen, latent, *prompts, steps=2)
        seconds = time.perf_counter() - started
        if mode == "eager":
            torch.save(image, expected)
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
    if mode in ("store", "cold") and shared.store.statistics()["misses"]:
        print(shared.store.statistics()["misses"], file=sys.stderr)
    return rows


def verdicts(rows: list[report.Row]) -> list[str]:
    """A sentence per model and goal: reached or missed, and by what."""
    sentences = []
    for model in dict.fromkeys(row["model"] for row in rows):
        by = {row["mode"]: row for row in rows if row["model"] == model}
        seconds = {mode: row["first_image_s"] for mode, row in by.items()}
        limit = GOAL_OF_EAGER * seconds["eager"] + GOAL_SECONDS
        reached = "reached" if seconds["store"] <= limit else "missed"
        sentences.append(
            f"{model}: {seconds['store']:.2f} s with saved graphs; "
            f"goal {GOAL_OF_EAGER} x eager + {GOAL_SECONDS:.0f} s = {limit:.2f} s: {reached}."
        )
        times = seconds["cold"] / seconds["store"]
        reached = "reached" if times >= GOAL_OF_COLD else "missed"
        sentences.append(f"{model}: {times:.1f} times as fast as cold; goal {GOAL_OF_COLD}: {reached}.")
    return sentences


def failure(rows: list[report.Row]) -> str | None:
    """What makes the figures no result: a block that ran uncompiled, a compilation where there must be none."""
    for row in rows:
        what = f"{row['model']}, {row['mode']}"
        if row["uncompiled"]:
            return f"{what}: {row['uncompiled']} block calls ran uncompiled; its time is no result."
        if row["mode"] in ("store", "warm_process") and row["compilations"]:
            return f"{what}: {row['compilations']} graphs were compiled, and none should be."
        if row["mode"] == "store" and not row["loaded"]:
            return f"{what}: nothing was loaded."
        if not row["relative_diff"] <= TOLERANCE:
            return f"{what}: the image is off by {row['relative_diff']:.1e} of the largest value."
    return None


def _families():
    from . import tiny_models

    return {"unet": tiny_models.UNET_FAMILY, "dit": tiny_models.FLUX_FAMILY}


def _in_a_fresh_process(model: str, mode: str, work: Path, expected: Path) -> list[report.Row]:
    torch_cache = work / f"{model}-torch" if mode in ("cold", "torch_cache") else work / f"{model}-{mode}-empty"
    environment = {
        **os.environ,
        CACHE_DIR: str(torch_cache),
        "TRITON_CACHE_DIR": str(torch_cache / "triton"),
        "ACCEL_STORE": str(work / f"{model}-graphs") if mode in ("cold", "store") else "off",
        "ACCEL_STORE_KEY": "a measurement's own, worth nothing",
    }
    child = subprocess.run(
        [sys.executable, "-m", "bench.restart", "--child", model, mode, str(expected)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    if child.returncode:
        raise Problem(f"{model}, {mode} ended with exit code {child.returncode}; see above.")
    return json.loads(child.stdout.splitlines()[-1])


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench restart", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=("unet", "dit"), default=("unet", "dit"), help="default: both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main))
