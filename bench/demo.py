"""Plain and accelerated images side by side: the saved workflow at four sizes, in one ComfyUI process."""

import io
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageChops

from tools import WORK, Problem, command, synthetic, workflow
from tools.client import Client, Graph, Result
from tools.comfyui import has_accelerator, offer_checkpoint, tree
from tools.server import serving

from . import contact_sheet, report

FOLDER = WORK / "demo"
SEED = 7
STEPS = 12
DEEP_CACHE = {"quality": "Fast"}
"""So many steps that some may be skipped."""


@dataclass(frozen=True)
class Case:
    """One size, in pixels."""

    width: int
    height: int
    batch: int = 1

    @property
    def label(self) -> str:
        return f"{self.width}x{self.height}" + (f" batch {self.batch}" if self.batch > 1 else "")


# 160x240 is what 720x960 is to a full model: its latent of 20x30 halves to 10x15 and then to 5x8, not to 5x7.5.
CASES = (Case(192, 128), Case(160, 240), Case(128, 192), Case(192, 128, batch=2))


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser("demo", __doc__)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="instead of the synthetic one")
    options = parser.parse_args(arguments)
    comfyui = tree()
    if options.checkpoint:
        checkpoint = options.checkpoint
    else:
        print("Making or finding the synthetic checkpoint ...", flush=True)
        checkpoint = synthetic.checkpoint(comfyui=comfyui)
    backend, because = choose_backend()
    print(f"Backend {backend}: {because}.", flush=True)

    base = FOLDER / "base"
    offered = offer_checkpoint(base, checkpoint)
    print("Starting ComfyUI ...", flush=True)
    with serving(base, comfyui=comfyui, extra_flags=["--extra-model-paths-config", str(offered)]) as server:
        client = Client(server.url)
        graph = workflow.change(
            workflow.load(),
            {
                "CheckpointLoaderSimple": {"ckpt_name": checkpoint.name},
                "AccelModel": {"backend": backend},
                "AccelDeepCache": DEEP_CACHE,
                "KSampler": {"seed": SEED, "steps": STEPS},
            },
        )
        _warm_up(client, graph)
        pairs = [compare(client, graph, case) for case in CASES]

    rows = [row for row, _ in pairs]
    print(f"\n{report.table(rows)}\n")
    print("Seconds are of the whole prompt; the first accelerated ones include compiling.")
    if not options.checkpoint:
        print("The model is random: pixel differences say that something differs, not how good it looks.")
    sheet = FOLDER / "contact_sheet.png"
    contact_sheet.save(sheet, [column for _, column in pairs])
    print(f"Contact sheet: {sheet}")
    report.finish(options.json, rows)


def choose_backend() -> tuple[str, str]:
    """AccelModel's backend for this machine, and the reason in a few words."""
    if has_accelerator():
        return "inductor", "torch sees a GPU"
    found = report.compiler()
    if found:
        return "inductor", f"no GPU, kernels for the CPU are compiled with {found}"
    return "eager", "no GPU and no C++ compiler with Python headers, so nothing is compiled"


def compare(client: Client, graph: Graph, case: Case) -> tuple[report.Row, list[tuple[str, Image.Image]]]:
    """Run `case` without and with the pack: a row of the table, a column of the contact sheet."""
    size = {"width": case.width, "height": case.height, "batch_size": case.batch}
    # Multiples of 8, so that the size asked for is the size made.
    graph = workflow.change(graph, {"AccelResolutionSnap": {**size, "multiple": "8", "max_megapixels": 0.0}})
    plain = _run(client, workflow.bypass(graph), f"{case.label} plain")
    before = client.get("/accel/state")["graph_cache"]
    accelerated = _run(client, graph, f"{case.label} accelerated")
    state = client.get("/accel/state")
    after, last_run = state["graph_cache"], state["deep_cache"]["last_run"] or {}

    images = [_images(result, case) for result in (plain, accelerated)]
    row = {
        "width": case.width,
        "height": case.height,
        "batch": case.batch,
        "plain_s": round(plain.seconds, 2),
        "accelerated_s": round(accelerated.seconds, 2),
        "graphs_compiled": after["compilations"] - before["compilations"],
        "cache_hits": after["hits"] - before["hits"],
        "steps_skipped": last_run.get("skipped_steps", 0),
        "max_abs_diff": max(map(_difference, *images)),
    }
    column = [
        (f"{case.label} plain, {plain.seconds:.1f} s", images[0][0]),
        (f"accelerated, {accelerated.seconds:.1f} s", images[1][0]),
    ]
    return row, column


def _warm_up(client: Client, graph: Graph) -> None:
    """Load the models, so that no row of the table pays for it."""
    size = {"width": 64, "height": 64, "batch_size": 1}
    smallest = workflow.change(graph, {"AccelResolutionSnap": size, "KSampler": {"steps": 1}})
    _run(client, workflow.bypass(smallest), "loading the models")


def _run(client: Client, graph: Graph, label: str) -> Result:
    graph = workflow.change(graph, {"SaveImage": {"filename_prefix": label.replace(" ", "_")}})
    result = client.run(graph)
    print(f"{label}: {result.seconds:.1f} s", file=sys.stderr, flush=True)
    return result


def _images(result: Result, case: Case) -> list[Image.Image]:
    images = [Image.open(io.BytesIO(file)).convert("RGB") for file in result.images]
    sizes = [image.size for image in images]
    if sizes != [(case.width, case.height)] * case.batch:
        raise Problem(f"{case.label} was asked for, and ComfyUI made images of {sizes}.")
    return images


def _difference(one: Image.Image, other: Image.Image) -> int:
    """The largest difference of a channel, 0 to 255."""
    return max(high for _, high in ImageChops.difference(one, other).getextrema())


if __name__ == "__main__":
    sys.exit(command.run(main))
