"""What skipping steps costs in quality, on trained test networks: each level and target of DeepCache, other caches at
equal work (`--others`), the best that the same way of skipping can do when it knows the image (ORACLE), every second
step without a look, and the baseline that everybody forgets, fewer steps at equal work.

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

from . import report, similarity
from .similarity import decibels

NETWORKS = ("unet", "dit", "mmdit", "vpred")
UNETS = ("unet", "vpred")
SAMPLERS = ("euler", "dpmpp_2m", "heun", "uni_pc", "res_multistep", "er_sde", "euler_ancestral")
OWN = "own"
"""The scheduler that users of a network choose, which stands behind no sampler's name."""
STEPS = (12, 20, 30)
CFGS = (1.0, 5.0)
LEVELS = ("Balanced", "Fast")
TARGETS = ("50 dB", "45 dB", "30 dB")
EVERY_SECOND, ORACLE = "every 2nd", "oracle"
"""Every second step from the third on but the last; the steps whose skipping costs an image least, found one after the
other by trying all, of which each number has a row of its own."""
ENOUGH_DB = 40.0
"""The dB that the oracle is followed down to."""
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
    names = (*LEVELS, *TARGETS, EVERY_SECOND)
    help = f"of: {', '.join(names)}, {ORACLE} (slow), or any N dB"
    parser.add_argument("--ways", nargs="+", default=names, metavar="WAY", help=help)
    help = f"as well: {', '.join(OTHERS)}, each at the work of {LEVELS[0]}"
    parser.add_argument("--others", action="store_true", help=help)
    parser.add_argument("--merge", action="store_true", help="keep the rows in --out that this run does not measure")
    parser.add_argument("--out", type=Path, default=WORK / "deepcache", help="folder of rows and page")
    options = parser.parse_args(arguments)
    comfyui = boot(cpu=not has_accelerator())
    file = options.out / "deepcache.json"
    known = json.loads(file.read_text(encoding="utf-8"))["rows"] if options.merge and file.is_file() else []
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
                            rows += bench.rows(sampler, steps, cfg, seed, options.ways, options.others)
                seconds = time.perf_counter() - started
                print(f"{network}, {sampler}, {steps} steps: {seconds:.0f} s", file=sys.stderr, flush=True)
                report.write(file, merged(known, rows), comfyui)  # a long run may be stopped
    if options.others and importlib.util.find_spec("diffusers") is not None:
        seeds = range(options.first_seed, options.first_seed + options.images)
        with torch.inference_mode():
            rows += [row for steps in options.steps for row in in_pipeline(steps, seeds)]
    found = merged(known, rows)
    for path in filter(None, (file, options.json)):
        report.write(path, found, comfyui)
    print(save(options.out, found))
    print(f"Rows and page: {options.out}")


class Bench:
    """One trained network, its uncached images, and what each way makes in their place."""

    def __init__(self, network: str, model):
        from comfy_accel.accel.report.run_record import records

        from .flops import Flops

        self._records = records  # which listen from here on
        self._network, self.model = network, model
        self._flops = Flops(model.model.diffusion_model)
        self._flops.learn(lambda: self._latent(model, "euler", 1, 1.0, 0))
        self._plain = functools.lru_cache(maxsize=64)(functools.partial(self._run, model))

    def rows(
        self, sampler: str, steps: int, cfg: float, seed: int, ways: Sequence[str], others: bool = False
    ) -> list[report.Row]:
        """One row for each way."""
        ways = list(dict.fromkeys((LEVELS[0], *ways))) if others else ways
        image = sampler, steps, cfg, seed
        place = dict(zip((*CELL, "seed"), (self._network, *image), strict=True))

        def row(way: str, made: tuple) -> report.Row:
            taken = None if way in OTHERS else self._records.deep_cache().steps_taken
            return _row(place, way, made, lambda count: self._plain(sampler, count, cfg, seed)[0], taken)

        tried = [(name, apply(name, self.model, steps)) for name in ways if name != ORACLE]
        if ORACLE in ways:
            tried += self._oracle(*image)
        rows = [row(way, self.made(model, *image)) for way, model in tried]
        if others:
            from .deepcache_others import MADE

            work = next(row["flops_share"] for row in rows if row["way"] == LEVELS[0])
            for way, make in MADE.items():
                if way != OF_UNETS or self._network in UNETS:
                    run = lambda value, make=make: self.made(make(self.model, self._flops, value), *image)  # noqa: E731
                    rows.append(row(way, at_work(run, work, steps, INTERVALS if way == OF_UNETS else THRESHOLDS)))
        return rows

    def made(self, model, sampler: str, steps: int, cfg: float, seed: int):
        """A latent, and its share of the uncached one's work."""
        _, work = self._plain(sampler, steps, cfg, seed)
        latent, taken = self._run(model, sampler, steps, cfg, seed)
        return latent, taken / work

    def _oracle(self, *image) -> list[tuple[str, object]]:
        """For each number of skipped steps, down to `ENOUGH_DB`, a model that skips the steps that cost least."""
        expected, steps, found = self._plain(*image)[0], image[1], []
        skipped, best = frozenset(), similarity.IDENTICAL
        while len(skipped) < steps - 2 and best > ENOUGH_DB:
            tried = [skipped | {step} for step in range(2, steps) if step not in skipped]
            reached = [decibels(self._run(skipping(self.model, one), *image)[0], expected) for one in tried]
            best = max(reached)
            skipped = tried[reached.index(best)]
            found.append((f"{ORACLE} {len(skipped)}", skipping(self.model, skipped)))
        return found

    def _run(self, *image):
        """A latent, and the operations that it took."""
        return self._latent(*image), self._flops.take()

    def _latent(self, model, sampler: str, steps: int, cfg: float, seed: int):
        import torch

        from . import toy, toy_data

        classes = torch.tensor([seed % len(toy_data.CLASSES)])
        name, _, scheduler = sampler.partition(" ")
        return toy.sample(model, classes, SIDE, SIDE, steps, name, seed=seed, cfg=cfg, scheduler=scheduler or None)


def at_work(run: Callable[[float], tuple], work: float, steps: int, settings: tuple[float, float]) -> tuple:
    """What `run` makes, a latent and its share of the work, by the setting with which that is nearest to `work`."""
    (low, high), found = settings, []
    while len(found) < TRIES and not (found and abs(found[-1][1] - work) < 0.5 / steps):
        setting = (low * high) ** 0.5
        found.append(run(setting))
        low, high = (setting, high) if found[-1][1] > work else (low, setting)
    return min(found, key=lambda made: (round(abs(made[1] - work), 6), -made[1]))


def in_pipeline(steps: int, seeds: Iterable[int]) -> list[report.Row]:
    """Rows of one of the networks in a pipeline of diffusers."""
    from .deepcache_pipelines import FluxPipeline

    pipe, rows = FluxPipeline(), []
    for seed in seeds:
        run = functools.partial(pipe.made, steps, seed)
        made = {LEVELS[0]: run(pipe.ours(target_of(LEVELS[0])))}
        for way, context, settings in ((FIRST_BLOCK, pipe.first_block, THRESHOLDS), (TAYLOR, pipe.taylor, INTERVALS)):
            at = lambda value, run=run, context=context: run(context(value))  # noqa: E731
            made[way] = at_work(at, made[LEVELS[0]][1], steps, settings)
        place = dict(zip((*CELL, "seed"), (PIPELINE, "euler", steps, 1.0, seed), strict=True))
        plain = lambda count, seed=seed: pipe.made(count, seed)[0]  # noqa: E731
        rows += [_row(place, way, one, plain) for way, one in made.items()]
    return rows


def _row(
    place: report.Row, way: str, made: tuple, plain: Callable[[int], Any], steps_taken: str | None = None
) -> report.Row:
    """made: a latent and its share of the work. plain: the uncached latent by number of steps."""
    (latent, share), expected = made, plain(place["steps"])
    reached, fewer = decibels(latent, expected), max(1, round(share * place["steps"]))
    row = {**place, "way": way, "target_db": target_of(way), "flops_share": round(share, 4), "latent_db": reached}
    others = {"fewer_steps": fewer, "fewer_db": decibels(plain(fewer), expected)}
    return {**row, **others, "steps_taken": steps_taken}


def target_of(way: str) -> float | None:
    """The dB that a way plans for; None where it plans for none."""
    from comfy_accel.accel.step_cache.config import QUALITIES

    if way.endswith(" dB"):
        return float(way.removesuffix(" dB"))
    return QUALITIES[way].quality if way in LEVELS else None


def skipping(model, steps: Collection[int]):
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


def apply(way: str, model, steps: int):
    """A clone of the ModelPatcher as the way's node gives it."""
    if way == EVERY_SECOND:
        return skipping(model, range(2, steps - 1, 2))
    from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
    from comfy_accel.accel.step_cache.config import DeepCacheSettings

    return apply_deep_cache(model, DeepCacheSettings(target_of(way)))


def merged(known: Sequence[report.Row], new: Sequence[report.Row]) -> list[report.Row]:
    """All rows, the new ones in place of known ones of the same measurement."""
    return list({tuple(row[name] for name in (*CELL, "way", "seed")): row for row in (*known, *new)}.values())


def cells(rows: Iterable[report.Row]) -> list[report.Row]:
    """One row for each cell and way: means over its images, and the worst of them."""
    table = []
    for place, group in report.grouped(rows, (*CELL, "way")):
        shares, reached = ([row[name] for row in group] for name in ("flops_share", "latent_db"))
        gains = [row["latent_db"] - row["fewer_db"] for row in group]
        told = {"share": fmean(shares), "skips": min(shares) < 1, "mean": fmean(reached), "worst": min(reached)}
        table.append({**place, **told, "gain": fmean(gains), "worst_gain": min(gains)})
    return table


def overview(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each network and way: the work over all its cells, the rest over those where anything was skipped."""
    table = []
    beside = (*OTHERS, *HOOKS)  # `of_oracle` and `beside_others` have it
    shown = [row for row in _on_cores(rows) if row["way"] not in beside and not row["way"].startswith(ORACLE)]
    for place, group in report.grouped(shown, ("network", "way")):
        every = cells(group)
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


def _on_cores(rows: Iterable[report.Row]) -> list[report.Row]:
    """Those of core's networks."""
    return [row for row in rows if row["network"] != PIPELINE]


def kept(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each network and target: which images kept it, and which ended far above it."""
    table = []
    asked = [row for row in _on_cores(rows) if row["target_db"] is not None and row["flops_share"] < 1]
    for place, group in report.grouped(asked, ("network", "target_db")):
        over = [row["latent_db"] - row["target_db"] for row in group]
        line = {"network": place["network"], "planned for": f"{place['target_db']:g} dB", "images": len(over)}
        line[f"kept within {KEPT:g} dB"] = f"{fmean(value >= -KEPT for value in over):.0%}"
        table.append({**line, f"more than {FAR:g} dB above": f"{fmean(value > FAR for value in over):.0%}"})
    return table


def of_oracle(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each network, sampler and level: what it saves, as a share of what the oracle saves of the same
    images at the same dB, or at `ENOUGH_DB` where the level has less."""
    found = []
    for _, group in report.grouped(rows, (*CELL, "seed")):
        best = [(1 - row["flops_share"], row["latent_db"]) for row in group if row["way"].startswith(ORACLE)]
        for row in group:
            if best and row["way"] in LEVELS and row["flops_share"] < 1:
                saved, enough = 1 - row["flops_share"], max(row["latent_db"], ENOUGH_DB)
                most = max([saved, *(other for other, reached in best if reached >= enough)])
                found.append({**row, "saved": saved, "most": most})
    table = []
    for place, group in report.grouped(found, ("network", "sampler", "way")):
        saved, most = (fmean(row[name] for row in group) for name in ("saved", "most"))
        told = {"saves": f"{saved:.0%}", "oracle saves": f"{most:.0%}", "share": f"{saved / most:.0%}"}
        table.append({**place, **told})
    return table


def beside_others(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each way: by network the share of FLOPs, the mean and the worst image, where others were tried."""
    ways = (LEVELS[0], *OTHERS, *HOOKS, FEWER)
    tried = []
    for _, group in report.grouped(rows, CELL):
        if any(row["way"] in (*OTHERS, *HOOKS) for row in group):
            tried += group
            for row in group:
                if row["way"] == LEVELS[0]:
                    made = {"flops_share": row["fewer_steps"] / row["steps"], "latent_db": row["fewer_db"]}
                    tried.append({**row, **made, "way": FEWER})
    found = [cell for cell in cells(tried) if cell["way"] in ways]
    none, table = dict.fromkeys(row["network"] for row in tried), []
    for place, group in sorted(report.grouped(found, ["way"]), key=lambda one: ways.index(one[0]["way"])):
        line = {at["network"]: _cell(of_network) for at, of_network in report.grouped(group, ["network"])}
        table.append({**place, **none, **line})
    return table


def by_steps(rows: Sequence[report.Row], way: str) -> list[report.Row]:
    """One row for each sort of networks and sampler: by number of steps the share of FLOPs, the mean and the worst."""
    own = [row for row in _on_cores(rows) if row["way"] == way]
    own = [{**cell, "networks": "UNets" if cell["network"] in UNETS else "DiTs"} for cell in cells(own)]
    numbers = [f"{steps} steps" for steps in sorted({cell["steps"] for cell in own})]
    table = []
    for place, group in report.grouped(own, ("networks", "sampler")):
        line = {f"{at['steps']} steps": _cell(found) for at, found in report.grouped(group, ["steps"])}
        table.append({**place, **dict.fromkeys(numbers), **line})
    return table


def _cell(found: Sequence[report.Row]) -> str:
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
    tables = {"All cells, by network": overview(rows), "Target against reached": kept(rows)}
    tables["Share of the oracle's saving"] = of_oracle(rows)
    tables["Others at equal work"] = beside_others(rows)
    tables["Balanced, by sampler and steps"] = by_steps(rows, "Balanced")
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
