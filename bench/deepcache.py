"""What skipping costs in quality, on the trained test network: DeepCache in its four kinds beside core's EasyCache.

Each contender makes the same samples as the uncached run, from the same noise, through ComfyUI's real samplers.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import WORK, command, line_plot, pack, report, similarity
from .comfyui import has_accelerator
from .deepcache_plan import (
    CASES,
    EASY_CACHE,
    SAMPLERS,
    STEPS,
    Case,
    Contender,
    contenders,
    curves,
    summary,
    verdicts,
)
from .inprocess import boot

THRESHOLDS = (0.01, 0.02, 0.03, 0.07, 0.1, 0.2)
EASY_THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
QUICK_CASES = (Case(16, 16, batch=2), Case(15, 20, batch=1))
COLUMNS = (
    *("sampler", "method", "interval", "schedule", "between", "threshold"),
    *("samples", "flops_share", "psnr_db", "ssim"),
)
LEGEND = """\
flops_share: floating-point operations of convolutions and matrix products in the UNet, as a share of those of the
uncached run: torch's count of one full and one skipped step of each size, times the steps counted in the run (of
samplers that call the model once a step). The rows' width and height are latent pixels.
psnr_db, ssim: to the uncached run, mean over samples, on the network's fixed linear RGB view in 0..1 (one pixel a
latent pixel); SSIM as of Wang et al. 2004. threshold: of the adaptive schedule, or EasyCache's reuse_threshold."""


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    comfyui = boot(cpu=not has_accelerator())
    pack.load()
    import torch
    from comfy_accel.accel.step_cache.config import DeepCacheSettings
    from comfy_accel.accel.step_cache.split_points import find_split

    from . import toy

    torch.set_num_threads(options.threads)  # Layers this narrow gain little from more.
    model = toy.load(options.network or toy.FILE)
    depth = find_split(model.model.diffusion_model, options.depth).depth
    given = contenders(options.thresholds, options.easy_thresholds, DeepCacheSettings().threshold, depth)
    if options.quick:
        given = given[:: max(1, len(given) // 4)]
    rows = []
    with torch.inference_mode():  # as ComfyUI runs every node
        bench = Bench(model, options.steps)
        for sampler in options.samplers:
            for case in QUICK_CASES if options.quick else CASES:
                started = time.perf_counter()
                rows += bench.rows(sampler, case, given)
                seconds = time.perf_counter() - started
                print(f"{sampler}, {case.width}x{case.height}, batch {case.batch}: {seconds:.0f} s", file=sys.stderr)
    text = report.table([_readable(row) for row in summary(rows)], COLUMNS)
    print(f"\n{text}\n\n{LEGEND}")
    conclusion = verdicts(rows)
    print("\n".join(conclusion))
    options.out.mkdir(parents=True, exist_ok=True)
    for file in filter(None, (options.out / "deepcache.json", options.json)):
        report.write(file, rows, comfyui)
    (options.out / "deepcache.md").write_text(_page(text, conclusion, options.steps), encoding="utf-8")
    line_plot.save(
        options.out / "deepcache.png",
        f"Quality over cost: {options.steps} steps, mean of {', '.join(options.samplers)}",
        "FLOPs of the UNet, as a share of the uncached run",
        "PSNR to the uncached run, dB",
        curves(rows),
    )
    print(f"Rows, table and plot: {options.out}")


class Bench:
    """The trained network, its uncached samples, and what a full and a skipped step of each size take."""

    def __init__(self, model, steps: int):
        self._model = model
        self._steps = steps
        self._flops: dict[tuple, tuple[int, int]] = {}
        self._executed = 0
        model.model.diffusion_model.time_embed.register_forward_hook(self._on_call)

    def _on_call(self, *_) -> None:
        self._executed += 1

    def rows(self, sampler: str, case: Case, given: list[Contender]) -> list[report.Row]:
        """One row for each contender."""
        expected, calls = self._sample(self._model, sampler, case)
        return [self._row(sampler, case, contender, expected, calls) for contender in given]

    def _row(self, sampler: str, case: Case, contender: Contender, expected, calls: int) -> report.Row:
        model = apply(contender, self._model)
        shares = []

        def after_run(executed: int) -> None:
            if contender.method == EASY_CACHE:
                shares.append(executed * case.runs / calls)
            else:
                shares.append(self._share(case, contender.depth))

        actual, _ = self._sample(model, sampler, case, after_run)
        return {
            "method": contender.method,
            "interval": contender.interval,
            "schedule": contender.schedule,
            "between": contender.between,
            "threshold": contender.threshold,
            "depth": contender.depth,
            "on_curve": contender.on_curve,
            "sampler": sampler,
            "width": case.width,
            "height": case.height,
            "batch": case.batch,
            "samples": case.samples,
            "flops_share": round(sum(shares) / len(shares), 4),
            "psnr_db": round(similarity.psnr(actual, expected).mean().item(), 3),
            "ssim": round(similarity.ssim(actual, expected).mean().item(), 5),
        }

    def _sample(self, model, sampler: str, case: Case, after_run: Callable[[int], None] | None = None):
        """RGB views [samples, 3, H, W], and how many calls of the UNet were executed in all runs.

        after_run: called after every run with its number of executed calls.
        """
        import torch

        from . import toy_data

        views, calls = [], 0
        for run in range(case.runs):
            before = self._executed
            latent = self._latent(model, sampler, case, run, self._steps)
            executed = self._executed - before
            if after_run:
                after_run(executed)
            calls += executed
            views.append(toy_data.view(latent))
        return torch.cat(views), calls

    def _latent(self, model, sampler: str, case: Case, run: int, steps: int):
        import torch

        from . import toy, toy_data

        classes = (torch.arange(case.batch) + run) % len(toy_data.CLASSES)
        return toy.sample(model, classes, case.height, case.width, steps, sampler, seed=run)

    def _share(self, case: Case, depth: int | None) -> float:
        """Of the DeepCache run that has just ended."""
        from comfy_accel.accel.hosts.comfyui.models.deep_cache import last_run

        steps = last_run()  # Counting below makes runs of its own.
        full, skipped = self._flops_of_steps(case, depth)
        total = steps["full_steps"] + steps["skipped_steps"]
        return (steps["full_steps"] * full + steps["skipped_steps"] * skipped) / (total * full)

    def _flops_of_steps(self, case: Case, depth: int | None) -> tuple[int, int]:
        """Of a full and of a skipped step at this size: counted in runs of one and of two steps."""
        key = (case.height, case.width, case.batch, depth)
        if key not in self._flops:
            skipping = apply(Contender("DeepCache", 2, "uniform", "hold", depth=depth), self._model)
            full = self._count(self._model, case, steps=1)
            self._flops[key] = full, self._count(skipping, case, steps=2) - full
        return self._flops[key]

    def _count(self, model, case: Case, steps: int) -> int:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.utils.flop_counter import FlopCounterMode

        # The counter knows attention written out, not the CPU's fused kind.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            self._latent(model, "euler", case, 0, steps)
        return counter.get_total_flops()


def apply(contender: Contender, model):
    """A clone of the ModelPatcher, as the contender's node gives it."""
    if contender.method == EASY_CACHE:
        from comfy_extras.nodes_easycache import EasyCacheNode

        defaults = {entry.id: entry.default for entry in EasyCacheNode.define_schema().inputs if entry.id != "model"}
        return EasyCacheNode.execute(model, **{**defaults, "reuse_threshold": contender.threshold}).args[0]
    from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
    from comfy_accel.accel.step_cache.config import DeepCacheSettings

    settings = {"schedule": contender.schedule, "between": contender.between}
    if contender.threshold is not None:
        settings["threshold"] = contender.threshold
    return apply_deep_cache(model, DeepCacheSettings(contender.interval, contender.depth, **settings))


def _readable(row: report.Row) -> report.Row:
    return {**row, "ssim": f"{row['ssim']:.4f}", "psnr_db": f"{row['psnr_db']:.1f}"}


def _page(text: str, conclusion: list[str], steps: int) -> str:
    """The table to keep, as Markdown."""
    return "\n".join(
        [
            "# DeepCache: quality over cost",
            "",
            f"Written by `dev.py bench deepcache --out docs`: the trained test network (`bench/data/toy_unet.md`), "
            f"{steps} steps. Every row by size: `deepcache.json`.",
            "",
            "![Quality over cost](deepcache.png)",
            "",
            *(f"- {sentence}" for sentence in conclusion),
            "",
            f"```text\n{text}\n```",
            "",
            LEGEND,
            "",
        ]
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench deepcache", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples and contenders: whether it runs")
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS, help=f"default: {' '.join(SAMPLERS)}")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of the sampler (default: {STEPS})")
    parser.add_argument("--depth", type=int, help="DeepCache's (default: chosen by the model)")
    parser.add_argument("--thresholds", nargs="+", type=float, default=THRESHOLDS, help="of the adaptive curves")
    parser.add_argument("--easy-thresholds", nargs="+", type=float, default=EASY_THRESHOLDS, help="of EasyCache's")
    parser.add_argument("--network", type=Path, help="its weights (default: bench/data/toy_unet.safetensors)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=WORK / "deepcache", help="folder of rows, table and plot")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main))
