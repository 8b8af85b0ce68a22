"""The first image of a process: with the graphs that an earlier one saved, with torch's own cache, with neither, and
with core's node.

Every row but warm_process is a fresh process. store starts with an empty compiler cache of torch's, torch_cache without
saved graphs. Small models, and SD1.5, SDXL and Flux at full depth and narrow, in float32: on a CPU the seconds are
those of compiling and loading, hardly of computing.
"""

import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path

from dev.tools import command, pack
from dev.tools.comfyui import has_accelerator
from dev.tools.inprocess import boot

from . import child, report
from .compilations import fresh_folders, read_counts

MODES = ("eager", "cold", "store", "torch_cache", "core")
SMALL, FULL_DEPTH = ("unet", "dit", "tiny"), ("SD1.5", "SDXL", "Flux")
TORCH_CACHE = {"cold": "torch", "torch_cache": "torch"}
"""Modes that share a compiler cache of torch's; every other mode has one of its own, which is empty."""
COLUMNS = (
    *("model", "mode", "first_image_s", "cpu_s", "compilations", "loaded", "import_ms", "uncompiled"),
    "relative_diff",
)
LEGEND = """\
first_image_s: of the first image, its compiling or loading included; warm_process is the second image of the cold one.
cpu_s: processor time of the process and the compilers it started, which says more on a machine that is busy otherwise.
compilations: graphs that torch traced for it. loaded: saved graphs. import_ms: what loading the pack adds to ComfyUI's
own start. relative_diff: from the eager image, of its largest value. torch_cache: no saved graphs, but what torch
itself has kept of the cold process; of what is compiled ahead of time that is the C++ libraries alone."""
LATENT_SIDE = 32
TOLERANCE = 1e-2


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser("restart", __doc__)
    models = (*SMALL, *FULL_DEPTH)
    parser.add_argument("--models", nargs="+", choices=models, default=models[:2], help="default: unet and dit")
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=MODES[1:], help="beside eager; default: all")
    options = parser.parse_args(arguments)
    rows: list[report.Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        for model in options.models:
            for mode in (MODES[0], *options.modes):
                environment = {
                    **fresh_folders(Path(work, f"{model}-{TORCH_CACHE.get(mode, mode)}")),
                    "ACCEL_STORE": f"{work}/{model}-graphs" if mode in ("cold", "store") else "off",
                }
                given = [model, mode, f"{work}/{model}.pt"]
                for row in child.result_of(measure, given, f"{model}, {mode}", environment):
                    rows.append(row)
                    report.tell(row, COLUMNS)
    shown = [{**row, "relative_diff": report.scientific(row["relative_diff"])} for row in rows]
    print(f"\n{report.table(shown, COLUMNS)}\n\n{LEGEND}")
    report.finish(options.json, rows, find_failure(rows))


def measure(model: str, mode: str, file: str) -> list[report.Row]:
    """The rows of one process: its first image, and in the cold one the second too. file: of eager's image."""
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

    from . import session

    expected = Path(file)
    torch.set_num_threads(1)  # Layers this small gain nothing from more.
    family = _list_families()[model]
    patcher = family.load(torch.float32)
    # Ours by the cache that saves its graphs, as in a server.
    apply = session.node(mode, "inductor") if mode in ("eager", "core") else lambda m: accelerate(m, CompileSettings())
    channels = patcher.get_model_object("latent_format").latent_channels
    prompts = family.conditioning(77, seed=1), family.conditioning(77, seed=2)
    rows = []
    before, loaded = read_counts(), 0
    for name in ("cold", "warm_process") if mode == "cold" else (mode,):
        started, cpu = time.perf_counter(), sum(os.times()[:4])
        with torch.inference_mode():
            latent = torch.zeros(1, channels, LATENT_SIDE, LATENT_SIDE)
            image = tiny_models.sample_latent(apply(patcher), latent, *prompts, steps=2)
        seconds, cpu = time.perf_counter() - started, sum(os.times()[:4]) - cpu
        if mode == "eager":
            torch.save(image, expected)
        eager = torch.load(expected)
        spent = read_counts().since(before)
        rows.append(
            {
                "model": family.name,
                "mode": name,
                "first_image_s": round(seconds, 3),
                "cpu_s": round(cpu, 2),
                "compilations": spent.graphs,
                "loaded": shared.statistics()["loaded"] - loaded,
                "import_ms": round(import_ms, 1),
                "uncompiled": spent.uncompiled,
                "relative_diff": ((image - eager).abs().max() / eager.abs().max()).item(),
            }
        )
        before, loaded = read_counts(), shared.statistics()["loaded"]
    if mode in ("store", "cold") and shared.store.statistics()["misses"]:
        print(shared.store.statistics()["misses"], file=sys.stderr)
    return rows


def find_failure(rows: list[report.Row]) -> str | None:
    """What makes the figures no result: a block that ran uncompiled, a compilation where there must be none."""
    for row in rows:
        what = f"{row['model']}, {row['mode']}"
        if row["uncompiled"]:
            return f"{what}: {row['uncompiled']} block calls ran uncompiled; its time is no result."
        must_compile = row["mode"] not in ("eager", "store", "warm_process")
        if row["compilations"] and not must_compile:
            return f"{what}: {row['compilations']} graphs were compiled, and none should be."
        if must_compile and not row["compilations"]:
            return f"{what}: nothing was compiled; its time is no result."
        if row["mode"] == "store" and not row["loaded"]:
            return f"{what}: nothing was loaded."
        if not row["relative_diff"] <= TOLERANCE:
            return f"{what}: the image is off by {row['relative_diff']:.1e} of the largest value."
    return None


def _list_families():
    from kit import tiny_models

    from . import full_size

    # Two blocks of one kind: whether this measurement works, within two minutes.
    tiny = {**tiny_models.FLUX, "depth_single_blocks": 0}
    return {
        **full_size.NARROW,
        "unet": tiny_models.UNET_FAMILY,
        "dit": tiny_models.FLUX_FAMILY,
        "tiny": dataclasses.replace(tiny_models.FLUX_FAMILY, name="Flux DiT, one kind", config=tiny),
    }


if __name__ == "__main__":
    sys.exit(command.run(main))
