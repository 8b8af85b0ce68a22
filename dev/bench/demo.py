"""The pack at work, in two parts: *Exact* at four sizes in one ComfyUI, where the images have to be the same; and
*Balanced* on trained test networks, beside fewer steps.
"""

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from PIL import Image, ImageChops

from dev import WORK, Problem
from dev.tools import command, pack, synthetic, workflow
from dev.tools.client import Client, Graph, Result
from dev.tools.comfyui import has_accelerator, offer_checkpoint, tree
from dev.tools.inprocess import boot
from dev.tools.server import serving

from . import pictures, report
from .session_plan import Case

FOLDER = WORK / "demo"
SEED = 7
STEPS = 8
LEAST_DB = 40.0
"""PSNR of an image of *Exact*: below it is more than rounding. Of 255 levels 1 everywhere is 48 dB."""

SHOWN = (("unet", 53), ("unet", 55), ("mmdit", 50), ("mmdit", 52))
"""Networks and seeds of the sheet."""
SHEET = {"sampler": "euler", "steps": 30, "cfg": 4.0}

# 160x240 is what 720x960 is to a full model: its latent of 20x30 halves to 10x15 and then to 5x8, not to 5x7.5.
CASES = (Case(192, 128), Case(160, 240), Case(128, 192), Case(192, 128, batch=2))


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser("demo", __doc__)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="instead of the synthetic one")
    options = parser.parse_args(arguments)
    comfyui = tree()
    checkpoint = options.checkpoint
    if checkpoint is None:
        print("Making or finding the synthetic checkpoint ...", flush=True)
        checkpoint = synthetic.checkpoint(comfyui=comfyui)
    backend, because = choose_backend()
    print(f"Exact: the same images, compiled. Backend {backend}: {because}.", flush=True)
    rows = run_exact(comfyui, checkpoint, backend)
    print(f"\n{report.table(rows)}\n\n{say_verdict(rows, backend)}\n", flush=True)

    print("Balanced: steps that hardly change the image are skipped. On trained test networks:", flush=True)
    sheet = FOLDER / "balanced.png"
    print(f"{sample_balanced(sheet)}\nContact sheet: {sheet}")
    report.finish(options.json, rows, find_failure(rows))


def choose_backend() -> tuple[str, str]:
    """AccelModel's backend for this machine, and the reason in a few words."""
    if has_accelerator():
        return "inductor", "torch sees a GPU"
    found = report.compiler()
    if found:
        return "inductor", f"no GPU, kernels for the CPU are compiled with {found}"
    return "eager", "no GPU and no C++ compiler with Python headers, so nothing is compiled"


# Exact


def run_exact(comfyui: Path, checkpoint: Path, backend: str) -> list[report.Row]:
    """A row for each case: the saved workflow without and with the pack, in one ComfyUI."""
    base = FOLDER / "base"
    offered = offer_checkpoint(base, checkpoint)
    waits = {"ACCEL_COMPILE_BESIDE": "0"}  # else its images show little of what is compiled beside them
    flags = ["--extra-model-paths-config", str(offered)]
    with serving(base, comfyui=comfyui, extra_flags=flags, environment=waits) as server:
        client = Client(server.url)
        graph = workflow.change(
            workflow.bypass(workflow.load(), "AccelDeepCache"),
            {
                "CheckpointLoaderSimple": {"ckpt_name": checkpoint.name},
                "AccelModel": {"backend": backend},
                "KSampler": {"seed": SEED, "steps": STEPS},
            },
        )
        _warm_up(client, graph)
        return [compare(client, graph, case) for case in CASES]


def compare(client: Client, graph: Graph, case: Case) -> report.Row:
    """Run `case` without and with the pack. compiling_s: part of accelerated_s. largest_difference: of 255."""
    size = {"width": case.width, "height": case.height, "batch_size": case.batch}
    graph = workflow.change(graph, {"EmptyLatentImage": size})
    plain = _run(client, workflow.bypass(graph), f"{case} plain")
    before = client.get("/accel/state")["graph_cache"]
    accelerated = _run(client, graph, f"{case} accelerated")
    after = client.get("/accel/state")["graph_cache"]
    pairs = list(zip(*(_read_images(result, case) for result in (plain, accelerated)), strict=True))
    return {
        "size": str(case),
        "plain_s": round(plain.seconds, 2),
        "accelerated_s": round(accelerated.seconds, 2),
        "compiling_s": round(after["seconds"] - before["seconds"], 2),
        "graphs_compiled": after["compilations"] - before["compilations"],
        "largest_difference": max(high for pair in pairs for _, high in ImageChops.difference(*pair).getextrema()),
        "psnr_db": round(min(_compare(*pair) for pair in pairs), 1),
    }


def say_verdict(rows: Sequence[report.Row], backend: str) -> str:
    """What the rows say, in a sentence or two."""
    first, later = rows[0], rows[1:]
    if backend == "eager":
        did = "Nothing was compiled on this machine."
    elif first["graphs_compiled"]:
        did = f"Compiled once, for the first image; {len(later)} other sizes and batches compiled nothing."
    else:
        did = "All graphs were on disk from an earlier run; nothing was compiled."
    if any(row["graphs_compiled"] for row in later):
        did = "Later images compiled again, which they must not."
    worst = max(row["largest_difference"] for row in rows)
    same = "the same" if not worst else f"the same up to rounding (at most {worst} of 255)"
    if min(row["psnr_db"] for row in rows) < LEAST_DB:
        same = f"NOT the same: {min(row['psnr_db'] for row in rows):.0f} dB at worst"
    return f"{did} The images are {same}. Seconds are of whole prompts."


def find_failure(rows: Sequence[report.Row]) -> str | None:
    """What must not be."""
    if any(row["graphs_compiled"] for row in rows[1:]):
        return "A later size compiled again."
    if min(row["psnr_db"] for row in rows) < LEAST_DB:
        return f"An image of Exact is below {LEAST_DB:g} dB: that is more than rounding."
    return None


def _warm_up(client: Client, graph: Graph) -> None:
    """Load the models, so that no row of the table pays for it."""
    size = {"width": 64, "height": 64, "batch_size": 1}
    smallest = workflow.change(graph, {"EmptyLatentImage": size, "KSampler": {"steps": 1}})
    _run(client, workflow.bypass(smallest), "loading the models")


def _run(client: Client, graph: Graph, label: str) -> Result:
    graph = workflow.change(graph, {"SaveImage": {"filename_prefix": label.replace(" ", "_")}})
    result = client.run(graph)
    print(f"{label}: {result.seconds:.1f} s", file=sys.stderr, flush=True)
    return result


def _read_images(result: Result, case: Case) -> list[Image.Image]:
    images = [Image.open(io.BytesIO(file)).convert("RGB") for file in result.images]
    sizes = [image.size for image in images]
    if sizes != [(case.width, case.height)] * case.batch:
        raise Problem(f"{case} was asked for, and ComfyUI made images of {sizes}.")
    return images


def _compare(one: Image.Image, other: Image.Image) -> float:
    """Their PSNR, dB."""
    import torch
    from torchvision.transforms.functional import pil_to_tensor

    from . import similarity

    return similarity.psnr(*(pil_to_tensor(image)[None].to(torch.float64) / 255 for image in (one, other))).item()


# Balanced


def sample_balanced(sheet: Path) -> str:
    """Save a sheet with a column for each of SHOWN: uncached, *Balanced*, fewer steps at equal work. Returns what it
    shows, in a sentence."""
    boot(cpu=not has_accelerator())
    pack.load()
    import torch

    from . import deepcache, similarity, toy

    torch.set_num_threads(1)  # Layers this narrow gain little from more.
    torch.set_flush_denormal(True)
    benches = {name: deepcache.Bench(name, toy.load(name)) for name, _ in SHOWN}
    columns, found = [], []
    for network, seed in SHOWN:
        bench, steps = benches[network], SHEET["steps"]
        model = deepcache.apply_way("Balanced", bench.model, steps)
        with torch.inference_mode():  # as ComfyUI runs every node
            plain, _ = bench.sample(bench.model, **SHEET, seed=seed)
            skipped, share = bench.sample(model, **SHEET, seed=seed)
            count = max(1, round(share * steps))
            fewer, _ = bench.sample(bench.model, **{**SHEET, "steps": count}, seed=seed)
        skipped_db, fewer_db = (similarity.decibels(latent, plain) for latent in (skipped, fewer))
        skips = f"Balanced, {1 - share:.0%} skipped: {skipped_db:.0f} dB"
        labels = f"Plain, {steps} steps", skips, f"Plain, {count} steps: {fewer_db:.0f} dB"
        latents = (plain, skipped, fewer)
        columns.append([(label, pictures.strip(toy.view(made))) for label, made in zip(labels, latents, strict=True)])
        found.append((share, skipped_db, fewer_db))
    pictures.contact_sheet(sheet, columns)
    shares, reached, others = zip(*found, strict=True)
    return (
        f"{1 - fmean(shares):.0%} of the work was skipped, and the images are {fmean(reached):.0f} dB from the "
        f"uncached ones ({min(reached):.0f} at worst); as few steps as cost the same: {fmean(others):.0f} dB "
        f"({min(others):.0f} at worst). At 40 dB a difference is hard to see."
    )


if __name__ == "__main__":
    sys.exit(command.run(main))
