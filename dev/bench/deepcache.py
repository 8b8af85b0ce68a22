"""What skipping steps costs in quality, on trained test networks: each level and target of DeepCache, other caches at
equal work (`--others`), every second step without a look, and the baseline that everybody forgets, fewer steps at equal
work.

One image at a time, as most people sample, through ComfyUI's real samplers: the mean says little of the worst.
"""

import functools
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dev import WORK
from dev.tools import command, pack
from dev.tools.comfyui import has_accelerator
from dev.tools.inprocess import boot

from . import report
from .similarity import decibels

NETWORKS = ("unet", "dit", "mmdit", "vpred")
UNETS = ("unet", "vpred")
SAMPLERS = ("euler", "dpmpp_2m", "heun", "uni_pc", "res_multistep", "er_sde", "euler_ancestral")
OWN = "own"
"""The scheduler that users of a network choose, which stands behind no sampler's name."""
STEPS = (12, 20, 30)
CFGS = (1.0, 5.0)
LEVELS = ("Balanced", "Fast")
EVERY_SECOND = "every 2nd"
"""Every second step from the third on but the last."""
OF_UNETS = "DeepCache of Ma et al."
OTHERS = (OF_UNETS, "cache-dit", "TeaCache", "First Block Cache", "EasyCache", "LazyCache")
HOOKS = FIRST_BLOCK, TAYLOR = ("diffusers' FirstBlockCache", "diffusers' TaylorSeer")
PIPELINE = "DiT in diffusers"
FEWER = "fewer steps"
THRESHOLDS, INTERVALS, TRIES = (1e-3, 3.0), (1.0, 10.0), 10
"""Of other caches, the least and the most, and how many are tried for one image to come to the work of `LEVELS[0]`."""
SIDE = 16
"""Of the latents, in places."""

LEAST_DB, MOST_WORSE, KEPT, FAR = 35.0, 1.0, 1.0, 10.0
"""What is counted: *Balanced*'s worst image in a cell, dB; how far below fewer steps one image may be; how far below
its target an image keeps it, and how far above it is more than was asked for."""

CELL = ("network", "sampler", "steps", "cfg")
COLUMNS = (*CELL, "seed", "way", "flops_share", "latent_db", "fewer_db")
"""Of the file: what the page's tables are made of."""


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser("deepcache", __doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    help = f"default: {' '.join(SAMPLERS)}; 'euler karras' for one on another schedule"
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS, help=help)
    help = f"of all samplers: {OWN} (default: what users of the network choose), karras, beta or any of core's"
    parser.add_argument("--schedulers", nargs="+", default=[OWN], help=help)
    parser.add_argument("--steps", nargs="+", type=int, default=STEPS, help=f"of the sampler (default: {STEPS})")
    parser.add_argument("--cfg", nargs="+", type=float, default=CFGS, help=f"guidance (default: {CFGS})")
    parser.add_argument("--images", type=int, default=8, help="in each cell, one after another (default: 8)")
    parser.add_argument("--first-seed", type=int, default=50, help="of the images (default: 50)")
    names = (*LEVELS, EVERY_SECOND)
    help = f"of: {', '.join(names)}, or any N dB"
    parser.add_argument("--ways", nargs="+", default=names, metavar="WAY", help=help)
    help = f"as well: {', '.join(OTHERS)}, each at the work of {LEVELS[0]}"
    parser.add_argument("--others", action="store_true", help=help)
    parser.add_argument("--merge", action="store_true", help="keep the rows in --out that this run does not measure")
    parser.add_argument("--out", type=Path, default=WORK / "deepcache", help="folder of rows and page")
    options = parser.parse_args(arguments)
    comfyui = boot(cpu=not has_accelerator())
    file = options.out / "deepcache.json"
    known = read_rows(file) if options.merge and file.is_file() else []
    pack.load()
    import torch

    from . import toy

    torch.set_num_threads(1)  # Layers this narrow gain little from more.
    torch.set_flush_denormal(True)
    rows: list[report.Row] = []
    pairs = itertools.product(options.samplers, options.schedulers)
    samplers = [" ".join(pair).removesuffix(f" {OWN}") for pair in pairs]
    for network in options.networks:
        bench = Bench(network, toy.load(network))
        for sampler in samplers:
            for steps in options.steps:
                started = time.perf_counter()
                for cfg in options.cfg:
                    for seed in range(options.first_seed, options.first_seed + options.images):
                        with torch.inference_mode():  # as ComfyUI runs every node
                            rows += bench.measure(sampler, steps, cfg, seed, options.ways, options.others)
                seconds = time.perf_counter() - started
                print(f"{network}, {sampler}, {steps} steps: {seconds:.0f} s", file=sys.stderr, flush=True)
                write_rows(file, merge(known, rows), comfyui)  # a long run may be stopped
    if options.others and importlib.util.find_spec("diffusers") is not None:
        seeds = range(options.first_seed, options.first_seed + options.images)
        with torch.inference_mode():
            rows += [row for steps in options.steps for row in measure_pipeline(steps, seeds)]
    found = merge(known, rows)
    for path in filter(None, (file, options.json)):
        write_rows(path, found, comfyui)
    print(save(options.out, found))
    print(f"Rows and page: {options.out}")


class Bench:
    """One trained network, its uncached images, and what each way makes in their place."""

    def __init__(self, network: str, model):
        from .flops import Flops

        self._network, self.model = network, model
        self._flops = Flops(model.model.diffusion_model)
        self._flops.learn(lambda: self._sample(model, "euler", 1, 1.0, 0))
        self._plain = functools.lru_cache(maxsize=64)(functools.partial(self._run, model))

    def measure(
        self, sampler: str, steps: int, cfg: float, seed: int, ways: Sequence[str], others: bool = False
    ) -> list[report.Row]:
        """One row for each way."""
        ways = list(dict.fromkeys((LEVELS[0], *ways))) if others else ways
        image = sampler, steps, cfg, seed
        place = dict(zip((*CELL, "seed"), (self._network, *image), strict=True))

        def row(way: str, made: tuple) -> report.Row:
            return _compare(place, way, made, lambda count: self._plain(sampler, count, cfg, seed)[0])

        rows = [row(way, self.sample(apply_way(way, self.model, steps), *image)) for way in ways]
        if others:
            from .deepcache_others import MADE

            work = next(row["flops_share"] for row in rows if row["way"] == LEVELS[0])
            for way, make in MADE.items():
                if way != OF_UNETS or self._network in UNETS:
                    run = lambda value, make=make: self.sample(make(self.model, self._flops, value), *image)  # noqa: E731
                    rows.append(row(way, match_work(run, work, steps, INTERVALS if way == OF_UNETS else THRESHOLDS)))
        return rows

    def sample(self, model, sampler: str, steps: int, cfg: float, seed: int):
        """A latent, and its share of the uncached one's work."""
        _, work = self._plain(sampler, steps, cfg, seed)
        latent, taken = self._run(model, sampler, steps, cfg, seed)
        return latent, taken / work

    def _run(self, *image):
        """A latent, and the operations that it took."""
        return self._sample(*image), self._flops.take()

    def _sample(self, model, sampler: str, steps: int, cfg: float, seed: int):
        import torch

        from . import toy

        classes = torch.tensor([seed % toy.CLASSES])
        name, _, scheduler = sampler.partition(" ")
        return toy.sample(model, classes, SIDE, SIDE, steps, name, seed=seed, cfg=cfg, scheduler=scheduler or None)


def match_work(run: Callable[[float], tuple], work: float, steps: int, settings: tuple[float, float]) -> tuple:
    """What `run` makes, a latent and its share of the work, by the setting with which that is nearest to `work`."""
    (low, high), found = settings, []
    while len(found) < TRIES and not (found and abs(found[-1][1] - work) < 0.5 / steps):
        setting = (low * high) ** 0.5
        found.append(run(setting))
        low, high = (setting, high) if found[-1][1] > work else (low, setting)
    return min(found, key=lambda made: (round(abs(made[1] - work), 6), -made[1]))


def measure_pipeline(steps: int, seeds: Iterable[int]) -> list[report.Row]:
    """Rows of one of the networks in a pipeline of diffusers."""
    from .deepcache_pipelines import FluxPipeline

    pipe, rows = FluxPipeline(), []
    for seed in seeds:
        run = functools.partial(pipe.sample, steps, seed)
        made = {LEVELS[0]: run(pipe.ours(find_target(LEVELS[0])))}
        for way, context, settings in ((FIRST_BLOCK, pipe.first_block, THRESHOLDS), (TAYLOR, pipe.taylor, INTERVALS)):
            at = lambda value, run=run, context=context: run(context(value))  # noqa: E731
            made[way] = match_work(at, made[LEVELS[0]][1], steps, settings)
        place = dict(zip((*CELL, "seed"), (PIPELINE, "euler", steps, 1.0, seed), strict=True))
        plain = lambda count, seed=seed: pipe.sample(count, seed)[0]  # noqa: E731
        rows += [_compare(place, way, one, plain) for way, one in made.items()]
    return rows


def _compare(place: report.Row, way: str, made: tuple, plain: Callable[[int], Any]) -> report.Row:
    """made: a latent and its share of the work. plain: the uncached latent by number of steps."""
    latent, share = made
    expected, row = plain(place["steps"]), {**place, "way": way, "flops_share": round(share, 3)}
    fewer = decibels(plain(count_fewer(row)), expected)
    return {**row, "latent_db": decibels(latent, expected), "fewer_db": fewer}


def count_fewer(row: report.Row) -> int:
    """As many steps as the row's work is worth."""
    return max(1, round(row["flops_share"] * row["steps"]))


def find_target(way: str) -> float | None:
    """The dB that a way plans for; None where it plans for none."""
    from comfy_accel.accel.step_cache.config import QUALITIES

    if way.endswith(" dB"):
        return float(way.removesuffix(" dB"))
    return QUALITIES[way].quality if way in LEVELS else None


def skip_steps(model, steps: Collection[int]):
    """A clone that skips these steps, whatever the run shows."""
    from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
    from comfy_accel.accel.step_cache.config import DeepCacheSettings
    from comfy_accel.accel.step_cache.plan import QualityPlan

    class Fixed(QualityPlan):
        def skips(self, step: int) -> bool:
            return step in steps

    class Settings(DeepCacheSettings):
        def plan(self) -> QualityPlan:
            return Fixed(self.quality)

    return apply_deep_cache(model, Settings())


def apply_way(way: str, model, steps: int):
    """A clone of the ModelPatcher as the way's node gives it."""
    if way == EVERY_SECOND:
        return skip_steps(model, range(2, steps - 1, 2))
    from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
    from comfy_accel.accel.step_cache.config import DeepCacheSettings

    return apply_deep_cache(model, DeepCacheSettings(find_target(way)))


def read_rows(file: Path) -> list[report.Row]:
    known = json.loads(file.read_text(encoding="utf-8"))
    return [dict(zip(known["columns"], row, strict=True)) for row in known["rows"]]


def write_rows(file: Path, rows: Sequence[report.Row], comfyui: Path) -> None:
    """Save them as a list for each, in the order of `COLUMNS`, which the file names."""
    report.write(file, [[row[name] for name in COLUMNS] for row in rows], comfyui, columns=COLUMNS)


def merge(known: Sequence[report.Row], new: Sequence[report.Row]) -> list[report.Row]:
    """All rows, the new ones in place of known ones of the same measurement."""
    return list({tuple(row[name] for name in (*CELL, "way", "seed")): row for row in (*known, *new)}.values())


def summarise_cells(rows: Iterable[report.Row]) -> list[report.Row]:
    """One row for each cell and way: means over its images, and the worst of them."""
    table = []
    for place, group in report.grouped(rows, (*CELL, "way")):
        shares, reached = ([row[name] for row in group] for name in ("flops_share", "latent_db"))
        gains = [row["latent_db"] - row["fewer_db"] for row in group]
        told = {"share": fmean(shares), "skips": min(shares) < 1, "mean": fmean(reached), "worst": min(reached)}
        table.append({**place, **told, "gain": fmean(gains), "worst_gain": min(gains)})
    return table


def tabulate_networks(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each network and way: the work over all its cells, the rest over those where anything was skipped."""
    table = []
    shown = [row for row in _leave_out_pipeline(rows) if row["way"] not in (*OTHERS, *HOOKS)]
    for place, group in report.grouped(shown, ("network", "way")):
        every = summarise_cells(group)
        own = [cell for cell in every if cell["skips"]]
        line: report.Row = {**place, "cells": len(every), "skipping": len(own)}
        if own:
            line |= {
                "FLOPs": f"{fmean(cell['share'] for cell in every):.2f}",
                "mean dB": f"{fmean(cell['mean'] for cell in own):.1f}",
                "worst image": f"{min(cell['worst'] for cell in own):.1f}",
                f"worst below {LEAST_DB:g}": sum(cell["worst"] < LEAST_DB for cell in own),
                "over fewer steps": f"{fmean(cell['gain'] for cell in own):+.1f}",
                "cells below": sum(cell["gain"] < 0 for cell in own),
                f"images over {MOST_WORSE:g} dB below": sum(cell["worst_gain"] < -MOST_WORSE for cell in own),
            }
        table.append(line)
    return table


def _leave_out_pipeline(rows: Iterable[report.Row]) -> list[report.Row]:
    """Those of core's networks."""
    return [row for row in rows if row["network"] != PIPELINE]


def tabulate_targets(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each network and target: which images kept it, and which ended far above it."""
    table = []
    own = [{**row, "target_db": find_target(row["way"])} for row in _leave_out_pipeline(rows)]
    asked = [row for row in own if row["target_db"] is not None and row["flops_share"] < 1]
    for place, group in report.grouped(asked, ("network", "target_db")):
        over = [row["latent_db"] - row["target_db"] for row in group]
        line = {"network": place["network"], "planned for": f"{place['target_db']:g} dB", "images": len(over)}
        line[f"kept within {KEPT:g} dB"] = f"{fmean(value >= -KEPT for value in over):.0%}"
        table.append({**line, f"more than {FAR:g} dB above": f"{fmean(value > FAR for value in over):.0%}"})
    return table


def tabulate_others(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each way: by network the share of FLOPs, the mean and the worst image, where others were tried."""
    ways = (LEVELS[0], *OTHERS, *HOOKS, FEWER)
    tried = []
    for _, group in report.grouped(rows, CELL):
        if any(row["way"] in (*OTHERS, *HOOKS) for row in group):
            tried += group
            for row in group:
                if row["way"] == LEVELS[0]:
                    made = {"flops_share": count_fewer(row) / row["steps"], "latent_db": row["fewer_db"]}
                    tried.append({**row, **made, "way": FEWER})
    found = [cell for cell in summarise_cells(tried) if cell["way"] in ways]
    none, table = dict.fromkeys(row["network"] for row in tried), []
    for place, group in sorted(report.grouped(found, ["way"]), key=lambda one: ways.index(one[0]["way"])):
        line = {at["network"]: _write_cell(of_network) for at, of_network in report.grouped(group, ["network"])}
        table.append({**place, **none, **line})
    return table


def tabulate_samplers(rows: Sequence[report.Row], way: str) -> list[report.Row]:
    """One row for each sort of networks and sampler: by number of steps the share of FLOPs, the mean and the worst."""
    own = [row for row in _leave_out_pipeline(rows) if row["way"] == way]
    own = [{**cell, "networks": "UNets" if cell["network"] in UNETS else "DiTs"} for cell in summarise_cells(own)]
    numbers = [f"{steps} steps" for steps in sorted({cell["steps"] for cell in own})]
    table = []
    for place, group in report.grouped(own, ("networks", "sampler")):
        line = {f"{at['steps']} steps": _write_cell(found) for at, found in report.grouped(group, ["steps"])}
        table.append({**place, **dict.fromkeys(numbers), **line})
    return table


def _write_cell(found: Sequence[report.Row]) -> str:
    if not any(cell["skips"] for cell in found):
        return "nothing skipped"
    share, mean = (fmean(cell[name] for cell in found) for name in ("share", "mean"))
    return f"{share:.2f} → {mean:.0f} ({min(cell['worst'] for cell in found):.0f})"


LEGEND = f"""\
**FLOPs** are those of convolutions, matrix products and attention that really ran, as a share of the uncached run's.
**dB** is the PSNR of the final latent to the uncached run's, with its own range of values as the peak. Images are made
one at a time, at {SIDE}×{SIDE} latent places. *Over fewer steps*: the same sampler with as many steps as the FLOPs are
worth, and nothing cached, against the same uncached run. A cell is a network, sampler, number of steps and CFG. FLOPs
are over all cells; those in which nothing was skipped are left out of the means of dB. Of other caches, what a skipped
call still runs is counted of DeepCache of Ma et al. alone: the first block is little of a large network."""

MARK = "<!-- Below: written by dev.py bench deepcache. -->"
"""Begins what is generated; the text above it is not."""

INTRODUCTION = """\
Written by `dev.py bench deepcache --out docs` on four small networks that were trained for it: a UNet of SD1.5's kind
([toy_unet.md](../dev/bench/data/toy_unet.md)), a DiT of Flux's ([toy_dit.md](../dev/bench/data/toy_dit.md)),
an MMDiT of SD3's ([toy_mmdit.md](../dev/bench/data/toy_mmdit.md)) and a UNet with v-prediction
([toy_vpred.md](../dev/bench/data/toy_vpred.md)). `dev.py bench quality --model FILE` measures a checkpoint of
yours. Each image: `deepcache.json`. What it comes to: [measurements.md](measurements.md#deepcache)."""


def save(folder: Path, rows: Sequence[report.Row]) -> str:
    """Write the page to `folder`, below what is written by hand there; return what to print."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {"All cells, by network": tabulate_networks(rows), "Target against reached": tabulate_targets(rows)}
    tables["Others at equal work"] = tabulate_others(rows)
    tables["Balanced, by sampler and steps"] = tabulate_samplers(rows, "Balanced")
    shown = {title: report.markdown(table, list(max(table, key=len))) for title, table in tables.items() if table}
    file, head = folder / "deepcache.md", f"# DeepCache: quality over cost\n\n{MARK}\n"
    if file.is_file():
        head = file.read_text(encoding="utf-8").partition(MARK)[0] + f"{MARK}\n"
    page = [head, INTRODUCTION, "", LEGEND, ""]
    page += [line for title, table in shown.items() for line in (f"## {title}", "", table, "")]
    file.write_text("\n".join(page), encoding="utf-8")
    return "\n\n".join(f"{title}\n{table}" for title, table in shown.items())


if __name__ == "__main__":
    sys.exit(command.run(main))
