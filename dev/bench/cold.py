"""The first image on SD1.5, SDXL and Flux, full depth and narrow: what compiling it costs, beside core's node.

Every contender runs in a fresh process with an empty compiler cache, one at a time: one sampler step, in float32.
"""

import os
import sys
import time

from dev import Problem
from dev.tools import command, pack
from dev.tools.comfyui import has_accelerator
from dev.tools.inprocess import boot

from . import child, report
from .compilations import counts, empty_inductor_cache

LAYOUTS = ("SD1.5", "SDXL", "Flux")
CONTENDERS = ("core", "ours")
COLUMNS = (
    *("layout", "contender", "first_call_s", "cpu_s", "eager_s", "compilations", "kinds", "blocks"),
    *("uncompiled", "relative_diff"),
)
LEGEND = """\
first_call_s, cpu_s: of the first image, its compiling included; cpu_s is the processor time of the process and the
compilers it started, and says more on a machine that is busy otherwise. eager_s: the same image without compiling."""
LATENT_SIDE = 32


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser("cold", __doc__)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="default: all")
    options = parser.parse_args(arguments)
    rows = []
    for layout in options.layouts:
        for contender in CONTENDERS:
            with empty_inductor_cache():
                rows.append(child.result_of(measure, [layout, contender], f"{layout} with {contender}"))
            report.tell(rows[-1], COLUMNS)
    shown = [{**row, "relative_diff": report.scientific(row["relative_diff"])} for row in rows]
    print(f"\n{report.table(shown, COLUMNS)}\n\n{LEGEND}")
    report.finish(options.json, rows)
    for row in rows:
        if row["uncompiled"]:
            raise Problem(f"{row['layout']}: {row['uncompiled']} block calls ran uncompiled; its time is no result.")


def measure(layout: str, contender: str) -> report.Row:
    """One contender's first image of one layout, in this process."""
    boot(cpu=not has_accelerator())
    pack.load()
    import torch
    from comfy_accel.accel.fingerprint.survey import survey
    from kit import tiny_models

    from . import layouts, session

    torch.set_num_threads(1)  # Layers this narrow gain nothing from more, and waiting threads count as processor time.
    family = layouts.ALL[layout]
    model = family.load(torch.float32)
    channels = model.get_model_object("latent_format").latent_channels
    latent = torch.zeros(1, channels, LATENT_SIDE, LATENT_SIDE)
    prompts = family.conditioning(77, seed=1), family.conditioning(77, seed=2)

    def image(model):
        return tiny_models.sample_latent(model, latent, *prompts, steps=1)

    with torch.inference_mode():
        image(model)
        expected, eager_seconds, _ = _timed(lambda: image(model))
        node = session.node(contender, "inductor")
        before = counts()
        actual, seconds, cpu_seconds = _timed(lambda: image(node(model)))
        spent = counts().since(before)
        row = {
            "layout": layout,
            "contender": contender,
            "first_call_s": round(seconds, 2),
            "cpu_s": round(cpu_seconds, 2),
            "eager_s": round(eager_seconds, 3),
            "compilations": spent.graphs,
            "uncompiled": spent.uncompiled,
            "relative_diff": ((actual - expected).abs().max() / expected.abs().max()).item(),
        }
        if contender == "ours":
            found = survey(model.model.diffusion_model)
            row |= {"kinds": len(found.kinds), "blocks": len(found.regions)}
    return row


def _timed(call):
    """What `call` returns, its seconds, and the processor seconds of this process and the compilers it started."""
    cpu = sum(os.times()[:4])
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started, sum(os.times()[:4]) - cpu


if __name__ == "__main__":
    sys.exit(command.run(main))
