"""What skipping costs in quality, on the trained test networks: DeepCache asked for a quality, its policies and
forecasts, core's EasyCache, and the baseline that everybody forgets, fewer steps.

Each contender makes the same samples as the uncached run, from the same noise, through ComfyUI's real samplers.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

from tools import WORK, command, pack
from tools.comfyui import has_accelerator
from tools.inprocess import boot

from . import deepcache_page, report, similarity
from .deepcache_plan import (
    ABOVE,
    BELOW,
    CASES,
    EASY_CACHE,
    FEWER_STEPS,
    FIRST_IMAGE,
    IN_DETAIL,
    OUTER,
    OUTER_DEPTH,
    SAMPLERS,
    STEPS,
    TARGET,
    TARGETS,
    Case,
    Contender,
    fields,
    merged,
    of_default,
    of_fewer_steps,
    of_policies,
    of_targets,
)

THRESHOLDS = (0.02, 0.03, 0.05, 0.1)
"""Of the adaptive schedule."""
EASY_THRESHOLDS = (0.02, 0.05, 0.1, 0.4)
QUICK_CASES = (Case(16, 16, batch=2), Case(15, 20, batch=1))
FORECASTS = ("hold", "forecast")
LEARN = 8
"""Earlier images that a quality learns from."""
FIRST_SEED = 1000
"""Of the images that a quality learns from: others than those that are measured."""
PARTS = ("targets", "first", "default", "fewer", "policies")
NETWORKS = ("unet", "dit")


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser("deepcache", __doc__)
    parser.add_argument("--quick", action="store_true", help="few samples and contenders: whether it runs")
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=NETWORKS, help="none: only write the page")
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS, help=f"default: {' '.join(SAMPLERS)}")
    parser.add_argument("--steps", nargs="+", type=int, default=STEPS, help=f"of the sampler (default: {STEPS})")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is compared (default: all)")
    parser.add_argument("--merge", action="store_true", help="keep the rows in --out that this run does not measure")
    parser.add_argument("--targets", nargs="+", type=float, default=TARGETS, help="qualities to ask for, in dB")
    parser.add_argument("--out", type=Path, default=WORK / "deepcache", help="folder of rows, page and plots")
    options = parser.parse_args(arguments)
    comfyui = boot(cpu=not has_accelerator())
    file = options.out / "deepcache.json"
    known = json.loads(file.read_text(encoding="utf-8"))["rows"] if options.merge and file.is_file() else []
    pack.load()
    import torch
    from comfy_accel.accel.step_cache.config import DeepCacheSettings

    from . import toy

    torch.set_num_threads(1)  # Layers this narrow gain little from more.
    torch.set_flush_denormal(True)
    defaults = DeepCacheSettings()
    rows = []
    for network in options.networks:
        model = toy.load(network)
        bench = Bench(network, model, LEARN)
        for steps in options.steps:
            given = []
            if "default" in options.parts:
                given.append(of_default(defaults))
                given.append(of_default(defaults, OUTER_DEPTH[network], OUTER))
            if "targets" in options.parts:
                given += of_targets(options.targets)
            if "fewer" in options.parts:
                given += of_fewer_steps(steps)
            if "policies" in options.parts and (steps == IN_DETAIL or options.quick):
                policies = of_policies(THRESHOLDS, FORECASTS, EASY_THRESHOLDS)
                given += policies[:: len(policies) // 4] if options.quick else policies
            if "first" in options.parts and (steps == IN_DETAIL or options.quick):
                given += of_targets(options.targets, FIRST_IMAGE)
            for sampler in options.samplers if given else ():
                started = time.perf_counter()
                with torch.inference_mode():  # as ComfyUI runs every node
                    for case in QUICK_CASES if options.quick else CASES:
                        rows += bench.rows(sampler, steps, case, given)
                seconds = time.perf_counter() - started
                print(f"{network}, {sampler}, {steps} steps: {seconds:.0f} s", file=sys.stderr, flush=True)
                report.write(file, merged(known, rows), comfyui)  # a long run may be stopped
    found = merged(known, rows)
    for path in filter(None, (file, options.json)):
        report.write(path, found, comfyui)
    print(deepcache_page.save(options.out, found))
    print(f"Rows, page and plots: {options.out}")


class Bench:
    """One trained network: its uncached samples, and what each contender makes in their place.

    earlier: images of which a quality has learnt before it is asked, with each sampler.
    """

    def __init__(self, network: str, model, earlier: int):
        from .flops import Flops

        self._network, self._model, self._earlier = network, model, earlier
        self._flops = Flops(model.model.diffusion_model)
        self._homes = tempfile.TemporaryDirectory()
        """Of what is learnt, a folder for each sampler."""

    def rows(self, sampler: str, steps: int, case: Case, given: Sequence[Contender]) -> list[report.Row]:
        """One row for each contender."""
        self._flops.learn(lambda: self._latent(self._model, "euler", 1, case, 0))
        expected, work, _ = self._sample(self._model, sampler, steps, case)
        return [self._row(sampler, steps, case, contender, expected, work) for contender in given]

    def _row(self, sampler: str, steps: int, case: Case, contender: Contender, expected, work: float) -> report.Row:
        from . import toy_data

        model = apply(contender, self._model)
        with self._learnt(sampler) if contender.method == TARGET else _store("off"):
            actual, taken, estimates = self._sample(model, sampler, contender.fewer_steps or steps, case)
        decibels = similarity.latent_psnr(actual, expected)
        views = toy_data.view(actual), toy_data.view(expected)
        row = {
            "network": self._network,
            "sampler": sampler,
            "steps": steps,
            **fields(contender),
            "width": case.width,
            "height": case.height,
            "batch": case.batch,
            "samples": case.samples,
            "flops_share": round(taken / work, 4),
            "psnr_db": round(similarity.psnr(*views).mean().item(), 3),
            "ssim": round(similarity.ssim(*views).mean().item(), 5),
            "latent_db": round(decibels.mean().item(), 3),
        }
        if contender.target_db is not None:
            row |= {
                "reached_db": row["latent_db"],
                "reached_least_db": round(decibels.min().item(), 3),
                "reached_most_db": round(decibels.max().item(), 3),
                "reached": int((decibels >= contender.target_db - BELOW).sum()),
                "above": int((decibels > contender.target_db + ABOVE).sum()),
                "estimated_db": estimates,
            }
        return row

    @contextmanager
    def _learnt(self, sampler: str) -> Iterator[None]:
        """Within it, a quality knows what earlier images showed; they are made at the first call."""
        import folder_paths

        home = Path(self._homes.name, sampler)
        before, is_new = folder_paths.get_user_directory(), not home.exists()
        home.mkdir(exist_ok=True)
        folder_paths.set_user_directory(str(home))
        try:
            with _store("" if self._earlier else "off"):
                for image in range(self._earlier if is_new else 0):
                    asked = Contender(TARGET, target_db=TARGETS[image % len(TARGETS)])
                    self._latent(apply(asked, self._model), sampler, IN_DETAIL, CASES[0], FIRST_SEED + image)
                self._flops.take()
                yield
        finally:
            folder_paths.set_user_directory(before)

    def _sample(self, model, sampler: str, steps: int, case: Case):
        """Latents [samples, 4, H, W], FLOPs of all runs, and what each run estimated its quality to be."""
        import torch

        latents, work, estimates = [], 0.0, []
        for run in range(case.runs):
            latents.append(self._latent(model, sampler, steps, case, run))
            work += self._flops.take()
            estimates.append(estimate())
        return torch.cat(latents), work, estimates

    def _latent(self, model, sampler: str, steps: int, case: Case, run: int):
        import torch

        from . import toy, toy_data

        seed = case.first + run
        classes = (torch.arange(case.batch) + seed) % len(toy_data.CLASSES)
        return toy.sample(model, classes, case.height, case.width, steps, sampler, seed=seed)


def _store(named: str) -> AbstractContextManager:
    """Within it, ACCEL_STORE is this."""
    return patch.dict(os.environ, ACCEL_STORE=named)


def apply(contender: Contender, model):
    """A clone of the ModelPatcher, as the contender's node gives it."""
    if contender.method == FEWER_STEPS:
        return model
    if contender.method == EASY_CACHE:
        from comfy_extras.nodes_easycache import EasyCacheNode

        defaults = {entry.id: entry.default for entry in EasyCacheNode.define_schema().inputs if entry.id != "model"}
        return EasyCacheNode.execute(model, **{**defaults, "reuse_threshold": contender.threshold}).args[0]
    from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
    from comfy_accel.accel.step_cache.config import DeepCacheSettings

    if contender.target_db is not None:
        return apply_deep_cache(model, DeepCacheSettings(depth=contender.depth, quality=contender.target_db))
    settings = {"schedule": contender.schedule, "between": contender.between}
    if contender.threshold is not None:
        settings["threshold"] = contender.threshold
    return apply_deep_cache(model, DeepCacheSettings(contender.interval, contender.depth, **settings))


def estimate() -> float | None:
    """What the DeepCache run that has just ended takes its PSNR to be, in dB; None without a target."""
    from comfy_accel.accel.report.run_record import records

    told = records.deep_cache()
    value = None if told is None else told.estimated_db
    return None if value is None else round(min(value, similarity.IDENTICAL), 2)


if __name__ == "__main__":
    sys.exit(command.run(main))
