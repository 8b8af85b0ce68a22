"""A VAE at twenty sizes, twice over: as it is, kept out of compiling, compiled where sizes repeat, and compiled.

One process and core's own VAE class with random weights, SD1.5's layout: full width on a GPU, 32 channels without one,
where sizes are a quarter with their parity kept (`session_plan.latent_side`). Each policy starts with nothing compiled.
"""

import ctypes
import gc
import os
import sys
import time
from typing import Any

from dev import Problem
from dev.tools import command, pack
from dev.tools.comfyui import has_accelerator
from dev.tools.inprocess import boot

from . import report
from .compilations import counts, empty_inductor_cache
from .session_plan import SCALE, TOLERANCE, latent_side

POLICIES = PLAIN, SKIP, AUTO, COMPILED = ("plain", "skip", "auto", "compiled")
"""PLAIN: without our node. AUTO compiles in the second sweep, when each size has come once."""

SIZES = (
    *((512, 512), (768, 512), (512, 768), (720, 960), (960, 720), (896, 768), (1280, 1280), (720, 720)),
    *((736, 992), (1024, 1024), (1152, 896), (896, 1152), (1216, 832), (832, 1216), (1344, 768), (640, 1536)),
    *((1000, 1000), (600, 800), (1920, 1080), (1080, 1920)),
)
"""Width and height in pixels; the first eight are what OneDiff's users reported and what surrounds it."""

SWEEPS = 2
COLUMNS = ("width", "height", "policy", "sweep", "seconds", "graphs", "rss_mb", "peak_device_mb")

MOST_GROWTH = 0.03
"""Of resident memory from the end of the first sweep, or of what compiled later, to the end of the second."""


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser("vae", __doc__)
    parser.add_argument("--quick", action="store_true", help="a cheap backend: counts and memory, no speed")
    parser.add_argument("--sizes", type=int, default=len(SIZES), metavar="N", help="only the first N sizes")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="fp32", help="of the weights (default: fp32)")
    options = parser.parse_args(arguments)
    if not 1 <= options.sizes <= len(SIZES):
        raise Problem(f"--sizes {options.sizes} is not from 1 to {len(SIZES)}.")
    boot(cpu=not has_accelerator())
    pack.load()
    rows: list[report.Row] = []
    images: dict[tuple[int, int], Any] = {}
    for policy in POLICIES:
        with empty_inductor_cache():
            for row in sweep(policy, SIZES[: options.sizes], options.dtype, options.quick, images):
                rows.append(row)
                report.tell(row, COLUMNS)
    print(f"\n{report.table(rows, COLUMNS)}\n")
    print(report.table(totals(rows)))
    print("graphs: compiled since the policy's start. The device's peak is of one decoding, null without CUDA.")
    report.finish(options.json, rows, failure(rows))
    print("Skip compiled nothing, no size after the first compiled anything, and memory stayed within 3 %.")


def sweep(policy: str, sizes, dtype: str, quick: bool, images: dict[tuple[int, int], Any]):
    """A row per decoding under one policy; `images`: plain ones by size, filled by PLAIN, compared with by the rest."""
    import torch
    from kit import tiny_models, tiny_vaes

    torch._dynamo.reset()
    on_cuda = torch.cuda.is_available() and has_accelerator()
    width = 128 if has_accelerator() else tiny_vaes.KL["ch"]
    vae = node(policy, quick)(tiny_vaes.sd15(tiny_models.DTYPES[dtype], **tiny_vaes.SD15, ch=width))
    scale = 1 if has_accelerator() else SCALE
    start = counts()
    for number in range(SWEEPS):
        for size in sizes:
            latent = tiny_vaes.latent(vae, latent_side(size[1], scale), latent_side(size[0], scale))
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            with torch.inference_mode():  # as ComfyUI runs every node
                image = vae.decode(latent).float()  # on the CPU by then, where core puts it
            seconds = time.perf_counter() - started
            expected = images.setdefault(size, image)
            spent = counts().since(start)
            yield {
                "width": size[0],
                "height": size[1],
                "policy": policy,
                "sweep": number + 1,
                "seconds": round(seconds, 3),
                "graphs": spent.graphs,
                "rss_mb": resident_mb(),
                "peak_device_mb": round(torch.cuda.max_memory_allocated() / 2**20) if on_cuda else None,
                "uncompiled": spent.uncompiled,
                "relative_diff": ((image - expected).abs().max() / expected.abs().max()).item(),
                "dtype": dtype,
            }


def node(policy: str, quick: bool):
    """From a VAE to the one that our node gives under the policy; quick: graphs are captured and not compiled."""
    if policy == PLAIN:
        return lambda vae: vae
    from comfy_accel.accel.cache.graph_cache import GraphCache
    from comfy_accel.accel.core.compile_settings import CompileSettings
    from comfy_accel.accel.hosts.comfyui.models.vae import vae_view
    from comfy_accel.accel.sizing.vae import VaePolicy

    compiled = {SKIP: "skip", AUTO: "auto", COMPILED: "compile decoder"}[policy]
    # A graph that is run as it is gains nothing, so that comparing it would end in running eagerly.
    settings = CompileSettings(backend="eager" if quick else "inductor", measured=policy == AUTO and not quick)
    cache = GraphCache()
    return lambda vae: vae_view(vae, VaePolicy(compiled, after=1), settings, cache)


def totals(rows: list[report.Row]) -> list[report.Row]:
    """Per policy: its first decoding, the seconds of each sweep, graphs, and how far memory grew between sweeps."""
    table = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        first, second = ([row for row in own if row["sweep"] == number] for number in (1, 2))
        table.append(
            {
                "policy": policy,
                "first_s": first[0]["seconds"],
                "sweep_1_s": sum(row["seconds"] for row in first),
                "sweep_2_s": sum(row["seconds"] for row in second),
                "graphs_first_size": first[0]["graphs"],
                "graphs_sweep_1": first[-1]["graphs"],
                "graphs_sweep_2": second[-1]["graphs"],
                "uncompiled": second[-1]["uncompiled"],
                "rss_growth_%": round(100 * growth(own), 2),
                "worst_diff": report.scientific(max(row["relative_diff"] for row in own)),
            }
        )
    return table


def growth(rows: list[report.Row]) -> float:
    """Of one policy's resident memory over its second sweep, as a fraction; what compiling in it takes is left out."""
    first_sweep = sum(row["sweep"] == 1 for row in rows)
    last_compiled = next(index for index, row in enumerate(rows) if row["graphs"] == rows[-1]["graphs"])
    return rows[-1]["rss_mb"] / rows[max(first_sweep - 1, last_compiled)]["rss_mb"] - 1


def failure(rows: list[report.Row]) -> str | None:
    """One sentence about the first thing that must not be; None where all is well."""
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        second = [row for row in own if row["sweep"] == 2]
        if policy in (PLAIN, SKIP) and own[-1]["graphs"]:
            return f"{policy}: {own[-1]['graphs']} graphs were compiled, and none may be."
        # Auto compiles with the first size that comes for the second time.
        settled = second[0] if policy == AUTO else own[0]
        if own[-1]["graphs"] != settled["graphs"]:
            return f"{policy}: {own[-1]['graphs'] - settled['graphs']} graphs more after its first compiled size."
        if policy != PLAIN and growth(own) > MOST_GROWTH:
            return f"{policy}: resident memory grew by {100 * growth(own):.1f} % in the second sweep."
        tolerance = 0 if policy in (PLAIN, SKIP) else TOLERANCE[own[0]["dtype"]]
        wrong = next((row for row in own if not row["relative_diff"] <= tolerance), None)
        if wrong is not None:
            size = f"{wrong['width']}x{wrong['height']}"
            return f"{policy}, {size}: the image differs by {wrong['relative_diff']:.1e} of its largest value."
    return None


def resident_mb() -> float:
    """What the process holds in memory, MB, once what nobody refers to is gone and, with glibc, given back."""
    import psutil

    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
    return round(psutil.Process().memory_info().rss / 2**20, 1)


if __name__ == "__main__":
    sys.exit(command.run(main))
