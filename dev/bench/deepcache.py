"""What skipping steps costs in quality, on trained test networks: each level and target of DeepCache, other caches at
equal work (`--others`), the best that the same way of skipping can do when it knows the image (ORACLE), every second
step without a look, and the baseline that everybody forgets, fewer steps at equal work.

One image at a time, as most people sample, through ComfyUI's real samplers: the mean says little of the worst.
"""

import functools
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from dev import WORK
from dev.tools import command, pack
from dev.tools.comfyui import has_accelerator
from dev.tools.inprocess import boot

from . import report, similarity

NETWORKS = ("unet", "dit", "mmdit", "vpred")
SAMPLERS = ("euler", "dpmpp_2m", "heun", "ddim", "euler_ancestral", "uni_pc")
STEPS = (8, 12, 20, 30, 50)
CFGS = (1.0, 4.0, 7.5)
LEVELS = ("Balanced", "Fast")
TARGETS = ("50 dB", "45 dB", "30 dB")
EVERY_SECOND, ORACLE = "every 2nd", "oracle"
"""Every second step from the third on but the last; the steps whose skipping costs an image least, found one after the
other by trying all, of which each number has a row of its own."""
ENOUGH_DB = 40.0
"""The dB that the oracle is followed down to."""
OTHERS = ("cache-dit", "TeaCache", "First Block Cache", "EasyCache", "LazyCache")
HOOKS = FIRST_BLOCK, TAYLOR = ("diffusers' FirstBlockCache", "diffusers' TaylorSeer")
PIPELINE = "DiT in diffusers"
FEWER = "fewer steps"
THRESHOLDS, INTERVALS, TRIES = (1e-3, 3.0), (2.0, 10.0), 10
"""Of other caches, the least and the most, and how many are tried for one image to come to the work of `LEVELS[0]`."""
SIDE = 16
"""Of the latents, in places."""
FIRST_SEED = 50

LEAST_DB, MOST_WORSE, KEPT, FAR = 35.0, 1.0, 1.0, 10.0
"""What is counted: *Balanced*'s worst image in a cell, dB; how far below fewer steps one image may be; how far below
its target an image keeps it, and how far above it is more than was asked for."""

CELL = ("network", "sampler", "steps", "cfg")


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser("deepcache", __doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    help = f"default: {' '.join(SAMPLERS)}; 'euler karras' for another schedule"
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS, help=help)
    parser.add_argument("--steps", nargs="+", type=int, default=STEPS, help=f"of the sampler (default: {STEPS})")
    parser.add_argument("--cfg", nargs="+", type=float, default=CFGS, help=f"guidance (default: {CFGS})")
    parser.add_argument("--images", type=int, default=8, help="in each cell, one after another (default: 8)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="of the images (default: 50)")
    names = (*LEVELS, *TARGETS)
    help = f"of: {', '.join(names)}, {EVERY_SECOND}, {ORACLE} (slow), or any N dB"
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
    for network in options.networks:
        bench = Bench(network, toy.load(network))
        for sampler in options.samplers:
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
        self._plain = functools.lru_cache(maxsize=64)(self._sampled_plainly)

    def rows(
        self, sampler: str, steps: int, cfg: float, seed: int, ways: Sequence[str], others: bool = False
    ) -> list[report.Row]:
        """One row for each way."""
        ways = list(dict.fromkeys((LEVELS[0], *ways))) if others else ways
        image = sampler, steps, cfg, seed
        place = dict(zip((*CELL, "seed"), (self._network, *image), strict=True))

        def row(way: str, made: tuple) -> report.Row:
            told = None if way in OTHERS else self._records.deep_cache()
            taken = None if told is None else told.steps_taken
            return _row(place, way, made, lambda count: self._plain(sampler, count, cfg, seed)[0], taken)

        tried = [(name, apply(name, self.model, steps)) for name in ways if name != ORACLE]
        if ORACLE in ways:
            tried += self._oracle(*image)
        rows = [row(way, self.made(model, *image)) for way, model in tried]
        if others:
            from .deepcache_others import MADE

            work = next(row["flops_share"] for row in rows if row["way"] == LEVELS[0])
            for way, make in MADE.items():
                run = lambda value, make=make: self.made(make(self.model, self._flops, value), *image)  # noqa: E731
                rows.append(row(way, at_work(run, work, steps, THRESHOLDS)))
        return rows

    def made(self, model, sampler: str, steps: int, cfg: float, seed: int):
        """A latent, and its share of the uncached one's work."""
        _, work = self._plain(sampler, steps, cfg, seed)
        self._flops.take()
        latent = self._latent(model, sampler, steps, cfg, seed)
        return latent, self._flops.take() / work

    def _oracle(self, sampler: str, steps: int, cfg: float, seed: int) -> list[tuple[str, object]]:
        """For each number of skipped steps, down to `ENOUGH_DB`, a model that skips the steps that cost least."""
        expected, _ = self._plain(sampler, steps, cfg, seed)

        def cost(skipped: frozenset[int]) -> float:
            return -_decibels(self._latent(skipping(self.model, skipped), sampler, steps, cfg, seed), expected)

        skipped: frozenset[int] = frozenset()
        found = []
        while len(skipped) < steps - 1 and -cost(skipped) > ENOUGH_DB:
            skipped = min((skipped | {step} for step in range(1, steps) if step not in skipped), key=cost)
            found.append((f"{ORACLE} {len(skipped)}", skipping(self.model, skipped)))
        return found

    def _sampled_plainly(self, sampler: str, steps: int, cfg: float, seed: int):
        self._flops.take()
        latent = self._latent(self.model, sampler, steps, cfg, seed)
        return latent, self._flops.take()

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
    fewer = max(1, round(share * place["steps"]))
    return {
        **place,
        "way": way,
        "target_db": target_of(way),
        "flops_share": round(share, 4),
        "latent_db": _decibels(latent, expected),
        "fewer_steps": fewer,
        "fewer_db": _decibels(plain(fewer), expected),
        "steps_taken": steps_taken,
    }


def _decibels(latent, expected) -> float:
    return round(similarity.latent_psnr(latent, expected).item(), 2)


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

    @dataclass(frozen=True)
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


def cells(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each cell and way: means over its images, and the worst of them."""
    groups: dict[tuple, list[report.Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in (*CELL, "way")), []).append(row)
    return [
        {
            **dict(zip((*CELL, "way"), key, strict=True)),
            "share": fmean(row["flops_share"] for row in group),
            "mean": fmean(row["latent_db"] for row in group),
            "worst": min(row["latent_db"] for row in group),
            "gain": fmean(row["latent_db"] - row["fewer_db"] for row in group),
            "worst_gain": min(row["latent_db"] - row["fewer_db"] for row in group),
            "skips": any(row["flops_share"] < 1 for row in group),
        }
        for key, group in groups.items()
    ]


def overview(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each network and way: the work over all its cells, the rest over those where anything was skipped."""
    table = []
    for network, way in dict.fromkeys((row["network"], row["way"]) for row in rows):
        if way.startswith(ORACLE) or way in (*OTHERS, *HOOKS) or network == PIPELINE:
            continue  # `of_oracle` and `beside_others` have it
        every = cells([row for row in rows if (row["network"], row["way"]) == (network, way)])
        own = [cell for cell in every if cell["skips"]]
        line: report.Row = {"network": network, "way": way, "cells": len(every), "skipping": len(own)}
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


def kept(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each network and target: which images kept it, and which ended far above it."""
    table = []
    asked = [row for row in rows if row["target_db"] is not None and row["flops_share"] < 1]
    asked = [row for row in asked if row["network"] != PIPELINE]
    for network, target in dict.fromkeys((row["network"], row["target_db"]) for row in asked):
        over = [row["latent_db"] - target for row in asked if (row["network"], row["target_db"]) == (network, target)]
        shares = (fmean(value >= -KEPT for value in over), fmean(value > FAR for value in over))
        names = (f"kept within {KEPT:g} dB", f"more than {FAR:g} dB above")
        told = {name: f"{share:.0%}" for name, share in zip(names, shares, strict=True)}
        table.append({"network": network, "planned for": f"{target:g} dB", "images": len(over), **told})
    return table


def of_oracle(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each network, sampler and level: what it saves, as a share of what the oracle saves of the same
    images at the same dB, or at `ENOUGH_DB` where the level has less."""
    image = (*CELL, "seed")
    best: dict[tuple, list[tuple[float, float]]] = {}
    for row in rows:
        if row["way"].startswith(ORACLE):
            place = tuple(row[name] for name in image)
            best.setdefault(place, []).append((1 - row["flops_share"], row["latent_db"]))
    found: dict[tuple, list[tuple[float, float]]] = {}
    for row in rows:
        places = best.get(tuple(row[name] for name in image))
        if row["way"] in LEVELS and places and row["flops_share"] < 1:
            most = max((saved for saved, reached in places if reached >= max(row["latent_db"], ENOUGH_DB)), default=0.0)
            saved = 1 - row["flops_share"]
            found.setdefault((row["network"], row["sampler"], row["way"]), []).append((saved, max(most, saved)))
    return [
        {
            **dict(zip(("network", "sampler", "way"), place, strict=True)),
            "saves": f"{fmean(saved for saved, _ in pairs):.0%}",
            "oracle saves": f"{fmean(most for _, most in pairs):.0%}",
            "share": f"{sum(saved for saved, _ in pairs) / sum(most for _, most in pairs):.0%}",
        }
        for place, pairs in found.items()
    ]


def beside_others(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each way: by network the share of FLOPs, the mean and the worst image, where others were tried."""
    places = {tuple(row[name] for name in CELL) for row in rows if row["way"] in (*OTHERS, *HOOKS)}
    tried = [row for row in rows if tuple(row[name] for name in CELL) in places]
    for row in [row for row in tried if row["way"] == LEVELS[0]]:
        made = {"flops_share": row["fewer_steps"] / row["steps"], "latent_db": row["fewer_db"]}
        tried.append({**row, **made, "way": FEWER})
    found = cells(tried)
    return [
        {
            "way": way,
            **{
                network: _cell([cell for cell in found if (cell["network"], cell["way"]) == (network, way)])
                for network in dict.fromkeys(row["network"] for row in tried)
            },
        }
        for way in (LEVELS[0], *OTHERS, *HOOKS, FEWER)
        if places
    ]


def by_steps(rows: Sequence[report.Row], way: str) -> list[report.Row]:
    """One row for each sort of networks and sampler: by number of steps the share of FLOPs, the mean and the worst."""
    own, table = cells([row for row in rows if row["way"] == way and row["network"] in NETWORKS]), []
    own = [cell for cell in own if cell["sampler"] != "ddim"]  # as euler
    for sort, sampler in dict.fromkeys((_sort(cell["network"]), cell["sampler"]) for cell in own):
        line: report.Row = {"networks": sort, "sampler": sampler}
        for steps in sorted({cell["steps"] for cell in own}):
            place = (sort, sampler, steps)
            found = [cell for cell in own if (_sort(cell["network"]), cell["sampler"], cell["steps"]) == place]
            line[f"{steps} steps"] = _cell(found)
        table.append(line)
    return table


def _sort(network: str) -> str:
    return "UNets" if network in ("unet", "vpred") else "DiTs"


def _cell(found: Sequence[report.Row]) -> str | None:
    if not found:
        return None
    if not any(cell["skips"] for cell in found):
        return "nothing skipped"
    share, mean, worst = (
        fmean(c["share"] for c in found),
        fmean(c["mean"] for c in found),
        min(c["worst"] for c in found),
    )
    return f"{share:.2f} → {mean:.0f} ({worst:.0f})"


LEGEND = f"""\
**FLOPs** are those of convolutions, matrix products and attention that really ran, as a share of the uncached run's.
**dB** is the PSNR of the final latent to the uncached run's, with its own range of values as the peak. Images are made
one at a time, at {SIDE}×{SIDE} latent places. *Over fewer steps*: the same sampler with as many steps as the FLOPs are
worth, and nothing cached, against the same uncached run. A cell is a network, sampler, number of steps and CFG. FLOPs
are over all cells; those in which nothing was skipped are left out of the means of dB."""


MARK = "<!-- Below: written by dev.py bench deepcache. -->"
"""Begins what is generated; the text above it is not."""

INTRODUCTION = """\
Written by `dev.py bench deepcache --out docs` on four small networks that were trained for it: a UNet of SD1.5's kind
([toy_unet.md](../dev/bench/data/toy_unet.md)), a DiT of Flux's ([toy_dit.md](../dev/bench/data/toy_dit.md)),
an MMDiT of SD3's ([toy_mmdit.md](../dev/bench/data/toy_mmdit.md)) and a UNet with v-prediction
([toy_vpred.md](../dev/bench/data/toy_vpred.md)). `dev.py bench quality --checkpoint FILE` measures a checkpoint of
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
