"""Microseconds of our own beside the model's work: a block's stand-in, our wrapper, a replayed call.

SD1.5, SDXL and Flux at full depth and narrow, in float32 on the CPU, one thread; warm calls with the arguments that
core's sampler makes them with. Compiled blocks return nothing and replays do nothing, so what is timed is ours.
"""

import statistics
import sys
from typing import Any

from dev.tools import command
from dev.tools.comfyui import has_accelerator, tree

from . import overhead_images, report
from .child import begin

COLUMNS = ("layout", "part", "us", "target_us")
TARGETS = {
    "block": 4.0,
    "step, compiled blocks": 400.0,
    "replay, before the launch": 60.0,
    "replay, after the launch": 1000.0,
}
"""Microseconds. A step of 20 ms with 100 blocks may lose 2 % on compiled blocks, which is 4 a block; with CUDA graphs a
call may take 60 until the device is at work, and what comes after that must be over long before the device is."""

LEGEND = """\
block: all that a warm call of a block costs beside its graph, the median. code, each call: code and settings that were
read, compared with what stands, once a call of the model. step, compiled blocks: all blocks, that comparison and our
APPLY_MODEL wrapper. Of wrappers, what is inside of them is not counted. replay: of our DIFFUSION_MODEL wrapper, with
copying inputs in before the launch and outputs out after it."""
LATENT_SIDE = 16


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser("overhead", __doc__)
    parser.add_argument("--layouts", nargs="+", choices=("SD1.5", "SDXL", "Flux"), help="default: all")
    names = overhead_images.NAMES
    parser.add_argument("--images", nargs="*", choices=names, help="measure whole images instead; default: all layouts")
    parser.add_argument("--beside", nargs="+", choices=overhead_images.CONTENDERS, default=overhead_images.CONTENDERS)
    cases = {case.name: case for case in overhead_images.CASES}
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases))
    options = parser.parse_args(arguments)
    begin(options.images is None or not has_accelerator())
    import torch

    from . import full_size

    torch.set_num_threads(1)
    rows = []
    if options.images is not None:
        for name in options.images or names:
            for row in overhead_images.measure(name, options.beside, [cases[name] for name in options.cases]):
                rows.append(row)
                if options.json:
                    report.write(options.json, rows, tree())  # also of a run that is stopped
        print(f"\n{report.table(rows, overhead_images.COLUMNS)}\n\n{overhead_images.LEGEND}")
        return report.finish(options.json, rows)
    for name in options.layouts or full_size.NARROW:
        rows += measure(full_size.NARROW[name])
        print(f"{name}: measured", file=sys.stderr, flush=True)
    print(f"\n{report.table(rows, COLUMNS)}\n\n{LEGEND}")
    report.finish(options.json, rows)


def measure(family: Any) -> list[report.Row]:
    """The rows of one layout."""
    import torch
    from comfy_accel.accel.cache.graph_cache import GraphCache
    from kit import tiny_models

    from . import overhead_parts

    model = family.load(torch.float32)
    channels = model.get_model_object("latent_format").latent_channels
    latent = torch.zeros(1, channels, LATENT_SIDE, LATENT_SIDE)
    prompts = family.conditioning(77, seed=1), family.conditioning(77, seed=2)

    def image(model: Any, steps: int = 1):
        return tiny_models.sample_latent(model, latent, *prompts, steps=steps)

    cache = GraphCache()
    with torch.inference_mode():
        calls = overhead_parts.time_calls(model, image, cache)
        each, comparing = overhead_parts.time_blocks(model, image, cache)
    parts = {"block": statistics.median(each), "code, each call": comparing, **calls}
    parts["step, compiled blocks"] = sum(each) + comparing + calls["APPLY_MODEL, ours"]
    told = {part: {"us": round(us, 2), "target_us": TARGETS.get(part)} for part, us in parts.items()}
    return [{"layout": family.name, "part": part, **figures} for part, figures in told.items()]


if __name__ == "__main__":
    sys.exit(command.run(main))
