"""`bench fleet --simulate`: from which size of a fleet on which set-up pays; table, plots and docs/scale.md.

Costs are read from the rows that other measurements keep. What none of them has measured is an assumption: it has a
name in `ASSUMED`, is listed beside the results, and is changed by --assume NAME=VALUE.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.sizing.buckets import TRAINED
from fleet.settings import Settings
from tools import ROOT, Problem
from tools.comfyui import tree

from . import line_plot, report
from .fleet_simulation import (
    RULES,
    STORES,
    Architecture,
    Costs,
    Fleet,
    Prompt,
    Result,
    Store,
    Wishes,
    bursty,
    cold_start,
    steady,
)

FILES = ("cold", "restart", "fleet", "benchmarks")
"""In docs, each by the measurement of its name; benchmarks by `bench gpu`."""

ASSUMED = {
    "image_s": (5.0, "seconds that an image takes where all is there"),
    "capture_s": (1.0, "seconds that the first prompt of a key takes longer on a worker: its call is captured"),
    "capture_mb": (300.0, "memory of one key's captured call"),
    "graph_mb": (2.5, "size of a saved graph"),
    "cache_mb": (6144.0, "limit of a worker's graph cache: so many keys' captured calls fit"),
    "model_s": (5.0, "seconds to load a model that the worker has not loaded"),
    "model_mb": (7000.0, "memory of a model"),
    "models_held": (1, "models that a worker has loaded at once"),
    "models": (30, "models that prompts ask for"),
    "zipf_models": (1.0, "exponent of Zipf's law by which models are asked for; 0: all equally often"),
    "zipf_sizes": (1.0, "the same for the sizes that a model was trained at"),
    "load": (0.4, "share of the workers' time that images alone take"),
    "burst": (8, "prompts of one key that come at once, on average, in bursty traffic"),
    "day_swing": (0.5, "by how much bursty traffic swings around its mean in a day, which is the length of the trace"),
    "prompts": (100, "prompts for each worker in a trace"),
    "at_once_s": (2.0, "seconds within which workers start that start at once"),
    "rolling_s": (600.0, "seconds over which workers start that start one after the other"),
}
"""What is assumed unless the costs measure it: name → (value, meaning)."""

_ABOVE_ZERO = ("image_s", "capture_mb", "models_held", "models", "load", "burst", "prompts")
"""Of these; the others may be 0."""

WORKERS = (1, 2, 4, 8, 16, 32, 64, 125, 250, 500, 1000)
PAYS = 0.9
"""What pays leaves at most this share of what it is meant to lessen."""

TRAFFIC = ("steady", "bursty")
CHANGES: tuple[dict[str, float], ...] = (
    {},
    {"capture_s": 0},
    {"capture_s": 5},
    {"model_s": 0},
    {"model_s": 20},
    {"model_s": 0, "capture_s": 0},
    {"models": 3},
    {"models": 200},
    {"models_held": 3},
    {"image_s": 1},
    {"image_s": 20},
    {"load": 0.2},
    {"load": 0.7},
    {"zipf_sizes": 0},
    {"burst": 1},
)
"""Of assumptions, whose effect on routing is shown at `CHANGED_AT` workers."""

CHANGED_AT = 64
_AGAIN = 64
"""A smaller fleet is simulated so often that as many workers start, and takes the mean."""

COLD_COLUMNS = (
    *("start", "store", "workers", "compiled", "compile_h", "loaded", "written_mb", "read_mb", "ready_s"),
    *("wait_s", "p95_s", "p99_s"),
)
ROUTE_COLUMNS = (
    *("traffic", "rule", "workers", "met_graph", "met_model", "wait_s", "p95_s", "p99_s", "busy"),
    *("keys", "memory_mb"),
)
CHANGE_COLUMNS = (
    *("assumed", "least_met", "key_met", "least_busy", "key_busy", "least_wait_s", "key_wait_s", "share"),
)
CHECK_COLUMNS = ("route", "workers", "prompts", "measured", "simulated")
TEXTS = ("start", "store", "traffic", "rule", "assumed", "route", "name", "from", "means")
LEGEND = f"""\
wait_s, p95_s, p99_s: from a prompt's coming to its answer, without its image's own seconds: mean, and within which 95
and 99 of 100 had waited. start: all workers at once, or one after the other. compiled, loaded: graphs, by all workers.
compile_h: hours of compiling in all. written_mb, read_mb: the store's traffic. ready_s: from a worker's start to the
end of its warm-up, mean. rule: any is `route: any`, Ray Serve's own, of two workers at random the one with less to do;
by key is `route: graph`; least-loaded is a worker with nothing to do if there is one, as by a load balancer that knows
all: no setting of a fleet. met_graph, met_model: share of prompts whose worker held their key, and their model. busy:
share of the workers' time; at 1 the fleet is overloaded, and waiting grows for as long as that lasts. keys: that a
worker holds at the end, mean; memory_mb: theirs and its models'. pays: leaves at most {PAYS:g} of it, at this size and
all larger ones."""


@dataclass(frozen=True)
class Known:
    """What the simulation is told. values: of `ASSUMED`. sources: of what is measured, name → (value, where)."""

    architectures: tuple[Architecture, ...]
    values: Mapping[str, float]
    sources: Mapping[str, tuple[Any, str]]
    loads: Sequence[report.Row]

    def changed(self, changes: Mapping[str, float]) -> Known:
        return Known(self.architectures, {**self.values, **changes}, self.sources, self.loads)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--simulate")
    group.add_argument("--simulate", action="store_true", help="simulate a fleet instead of running one")
    group.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="sizes; default: 1 to 1000")
    group.add_argument(
        "--costs", type=Path, nargs="+", metavar="FILE", help="rows of bench cold, restart, fleet, gpu; default: docs'"
    )
    names = ", ".join(f"{name} {value:g}" for name, (value, _) in ASSUMED.items())
    group.add_argument("--assume", nargs="+", default=[], metavar="NAME=VALUE", help=f"what nobody measured: {names}")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--out", type=Path, metavar="FOLDER", help="write page, plots and rows there")


def run(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    files = options.costs or [ROOT / "docs" / f"{name}.json" for name in FILES]
    known = read(files, assumed(options.assume))
    workers = sorted(set(options.workers))
    if not workers or workers[0] < 1:
        raise Problem("--workers are numbers from 1 on.")
    parts = {
        "cold": (cold_rows(known, workers, options.seed), COLD_COLUMNS),
        "routes": (route_rows(known, workers, options.seed), ROUTE_COLUMNS),
        "changes": (change_rows(known, options.seed), CHANGE_COLUMNS),
        "check": (check_rows(known, options.seed), CHECK_COLUMNS),
    }
    rows = [{"part": part, **row} for part, (made, _) in parts.items() for row in made]
    for part, (made, columns) in parts.items():
        print(f"\n{part}\n{report.table(made, columns)}")
    print(f"\n{LEGEND}\n")
    print(report.table(given(known), ("name", "value", "from", "means")))
    sentences = verdicts(rows)
    print("\n" + "\n".join(sentences))
    if options.json:
        report.write(options.json, rows, tree(), given=given(known))
    if options.out:
        save(options.out, rows, known)
        report.write(options.out / "scale.json", rows, tree(), seed=options.seed, given=given(known))
        print(f"Page: {options.out / 'scale.md'}")
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)


def assumed(given: Sequence[str]) -> dict[str, float]:
    """The assumptions that were named. Raises Problem: one that there is not, or no number."""
    values = {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in ASSUMED:
            raise Problem(f"There is no assumption {name}: choose one of {', '.join(ASSUMED)}.")
        try:
            values[name] = type(ASSUMED[name][0])(number)
        except ValueError:
            raise Problem(f"--assume {text}: write a number after {name}=.") from None
        if not 0 <= values[name] < math.inf or (not values[name] and name in _ABOVE_ZERO):
            raise Problem(f"--assume {text}: {name} is {'above' if name in _ABOVE_ZERO else 'at least'} 0.")
    return values


def read(files: Sequence[Path], assumptions: Mapping[str, float]) -> Known:
    """Costs from the rows of these files; what they have not measured is assumed. Raises Problem: one is missing."""
    rows: list[report.Row] = []
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Problem(f"--costs {file} cannot be read: {error}.") from None
        gpu = (content.get("machine") or {}).get("gpu")
        rows += [{**row, "file": file.name, "gpu": gpu} for row in content["rows"]]
    compiled = [row for row in rows if row.get("contender") == "ours" and row.get("layout") in TRAINED]
    restarts = {(row["model"], row["mode"]): row for row in rows if "mode" in row}
    loaded = {
        model: (row["first_image_s"] - restarts[model, "warm_process"]["first_image_s"]) / row["loaded"]
        for (model, mode), row in restarts.items()
        if mode == "store" and row["loaded"]
    }
    for found, what in ((compiled, "bench cold"), (loaded, "bench restart")):
        if not found:
            raise Problem(f"The costs have no rows of {what}.")
    load_s = statistics.median(loaded.values())
    sources: dict[str, tuple[Any, str]] = {
        "load_s": (
            round(load_s, 2),
            f"{_where(list(restarts.values()))}, of one saved graph, median: {', '.join(loaded)}",
        ),
    }
    architectures = []
    for row in compiled:
        seconds = (row["first_call_s"] - row["eager_s"]) / row["compilations"]
        architectures.append(Architecture(row["layout"], row["compilations"], seconds, load_s))
        sources[f"compile_s, {row['layout']}"] = (
            round(seconds, 1),
            f"{_where([row])}, of {row['compilations']} graphs",
        )
    values = {name: value for name, (value, _) in ASSUMED.items()}
    for name, (value, where) in {**_of_a_store(rows), **_of_a_card(rows)}.items():
        if name not in assumptions:
            values[name] = value
            sources[name] = (round(value, 3), where)
    values.update(assumptions)
    loads = [row for row in rows if "route" in row and row.get("met_graph") is not None]
    return Known(tuple(architectures), values, sources, loads)


def _of_a_store(rows: Sequence[report.Row]) -> dict[str, tuple[float, str]]:
    """What `bench fleet --stores shared` has measured."""
    stores = [row for row in rows if row.get("store") == "shared" and row.get("store_mb")]
    if not stores:
        return {}
    size = sum(row["store_mb"] for row in stores) / sum(row["compilations"] for row in stores)
    return {"graph_mb": (size, f"{_where(stores)}, mean")}


def _of_a_card(rows: Sequence[report.Row]) -> dict[str, tuple[float, str]]:
    """What `bench gpu` has measured on a GPU, with compiled blocks and captured calls."""
    ours = [row for row in rows if row["gpu"] and row.get("contender") == "cuda-graphs" and row.get("captures")]
    steps = 20
    values = {
        "image_s": [steps / row["steps_per_s"] for row in ours if row["part"] == "steps" and row["batch"] == 1],
        "capture_s": [row["stall_s"] for row in ours if row["part"] == "session" and not row["compilations"]],
        "capture_mb": [row["graphs_mb"] for row in ours if row["part"] == "sizes40" and row["number"] == 1],
    }
    where = f"{_where(ours)}, median; images of {steps} steps" if ours else ""
    return {name: (statistics.median(found), where) for name, found in values.items() if found}


def _where(rows: Sequence[report.Row]) -> str:
    files = sorted({row["file"] for row in rows})
    cards = sorted({row["gpu"] or "CPU" for row in rows})
    return f"{', '.join(files)} ({', '.join(cards)})"


def given(known: Known) -> list[report.Row]:
    """All that went in, for a table: measured, then assumed."""
    rows = [
        {"name": name, "value": value, "from": where, "means": ""} for name, (value, where) in known.sources.items()
    ]
    settings = {name: Settings.model_fields[name].default for name in ("at_once", "patience_s")}
    rows += [
        {"name": name, "value": value, "from": "the fleet's default", "means": ""} for name, value in settings.items()
    ]
    for name, (_, meaning) in ASSUMED.items():
        if name not in known.sources:
            rows.append({"name": name, "value": known.values[name], "from": "**assumed**", "means": meaning})
    return rows


def cold_rows(known: Known, workers: Sequence[int], seed: int) -> list[report.Row]:
    rows = []
    for start in ("at once", "rolling"):
        for store in STORES:
            for number in workers:
                again = range(seed, seed + math.ceil(_AGAIN / number))
                made = [_cold(known, start, store, number, each) for each in again]
                mean = {name: statistics.mean(row[name] for row in made) for name in made[0]}
                rows.append({"start": start, "store": store, "workers": number, **mean})
    return rows


def _cold(known: Known, start: str, kind: str, workers: int, seed: int) -> dict[str, float]:
    """All workers start and warm up. Where they start at once, prompts come for twice as long as that takes."""
    values = known.values
    draw = random.Random(seed)
    spread = values["at_once_s"] if start == "at once" else values["rolling_s"]
    starts = sorted(draw.uniform(0, spread) for _ in range(workers))
    store = Store(kind)
    ready = cold_start(starts, known.architectures, store)
    row = {
        "compiled": store.compiled,
        "compile_h": store.compiling_s / 3600,
        "loaded": store.loaded,
        "written_mb": store.compiled * values["graph_mb"] if kind != "none" else 0.0,
        "read_mb": store.loaded * values["graph_mb"],
        "ready_s": statistics.mean(end - begin for begin, end in zip(starts, ready, strict=True)),
    }
    if start == "at once":
        lasts = 2 * sum(needed.graphs * needed.compile_s for needed in known.architectures)
        prompts = _traffic(known, "steady", workers, seed, round(lasts * values["load"] * workers / values["image_s"]))
        row |= _waiting([_fleet(known, "least-loaded", seed).run(prompts, ready)])
    return row


def route_rows(known: Known, workers: Sequence[int], seed: int) -> list[report.Row]:
    return [
        {"traffic": traffic, "rule": rule, "workers": number, **_routed(known, traffic, rule, number, seed)}
        for traffic in TRAFFIC
        for rule in RULES
        for number in workers
    ]


def _routed(known: Known, traffic: str, rule: str, workers: int, seed: int) -> report.Row:
    """A fleet that is warmed up meets its first prompts; a small one several times, for a mean that says something."""
    values, results = known.values, []
    many = int(values["prompts"] * workers)
    for trace in range(max(1, math.ceil(2000 / many))):
        prompts = _traffic(known, traffic, workers, seed + trace, many)
        results.append(_fleet(known, rule, seed + trace).run(prompts, [0.0] * workers))
    answered = sum(len(result.waits) for result in results)
    keys = statistics.mean(held for result in results for held in result.keys)
    return {
        "met_graph": sum(result.met_graph for result in results) / answered,
        "met_model": sum(result.met_model for result in results) / answered,
        **_waiting(results),
        "busy": sum(result.busy_s for result in results) / sum(result.end * workers for result in results),
        "keys": keys,
        "memory_mb": round(keys * values["capture_mb"] + values["models_held"] * values["model_mb"]),
    }


def change_rows(known: Known, seed: int) -> list[report.Row]:
    """What other assumptions make of routing, in bursty traffic."""
    rows = []
    for changes in CHANGES:
        other = known.changed(changes)
        least, by_key = (_routed(other, "bursty", rule, CHANGED_AT, seed) for rule in ("least-loaded", "by key"))
        rows.append(
            {
                "assumed": " and ".join(f"{name} {value:g}" for name, value in changes.items()) or "as above",
                "least_met": least["met_graph"],
                "key_met": by_key["met_graph"],
                "least_busy": least["busy"],
                "key_busy": by_key["busy"],
                "least_wait_s": least["wait_s"],
                "key_wait_s": by_key["wait_s"],
                "share": by_key["wait_s"] / least["wait_s"],
            }
        )
    return rows


def check_rows(known: Known, seed: int) -> list[report.Row]:
    """The real fleet of `bench fleet`, simulated: all prompts at once, of 12 sizes; without the replica's death."""
    rows = []
    for row in known.loads:
        rule = "by key" if row["route"] == "graph" else "any"
        seconds = row["seconds"] * row["replicas"] / row["prompts"]
        prompts = [Prompt(0.0, "model", str(number % 12), seconds) for number in range(row["prompts"])]
        random.Random(0).shuffle(prompts)
        result = Fleet(rule, Costs(), seed=seed).run(prompts, [0.0] * row["replicas"])
        rows.append(
            {
                "route": row["route"],
                "workers": row["replicas"],
                "prompts": row["prompts"],
                "measured": row["met_graph"],
                "simulated": result.met_graph / row["prompts"],
            }
        )
    return rows


def _fleet(known: Known, rule: str, seed: int) -> Fleet:
    values = known.values
    keys = max(1, min(256, int(values["cache_mb"] // values["capture_mb"])))
    costs = Costs(values["model_s"], values["capture_s"], int(values["models_held"]), keys)
    defaults = Settings.model_fields
    return Fleet(rule, costs, defaults["at_once"].default, defaults["patience_s"].default, seed)


def _traffic(known: Known, traffic: str, workers: int, seed: int, many: int) -> list[Prompt]:
    values = known.values
    sizes = [(needed.name, TRAINED[needed.name]) for needed in known.architectures]
    wishes = Wishes(int(values["models"]), sizes, values["zipf_models"], values["zipf_sizes"])
    rate = values["load"] * workers / values["image_s"]
    if traffic == "steady":
        return steady(wishes, rate, many, values["image_s"], seed)
    return bursty(wishes, rate, many, values["image_s"], seed, values["burst"], values["day_swing"])


def _waiting(results: Sequence[Result]) -> report.Row:
    together = Result(waits=[wait for result in results for wait in result.waits])
    return {
        "wait_s": statistics.mean(together.waits),
        "p95_s": together.waited(0.95),
        "p99_s": together.waited(0.99),
    }


def pays_from(better: Mapping[int, float], worse: Mapping[int, float]) -> int | None:
    """The least number of workers from which on `better` is at most `PAYS` of `worse`; None if there is none."""
    found = None
    for workers in sorted(better, reverse=True):
        if better[workers] > PAYS * worse[workers]:
            break
        found = workers
    return found


def verdicts(rows: Sequence[report.Row]) -> list[str]:
    """What pays, and from how many workers on: a sentence for each set-up."""

    def by_workers(value: str, **wanted: str) -> dict[int, float]:
        chosen = [row for row in rows if all(row.get(name) == what for name, what in wanted.items())]
        return {row["workers"]: row[value] for row in chosen}

    def compare(what: str, how: str, better: dict[int, float], worse: dict[int, float], unit: str = " s") -> str:
        least, most = pays_from(better, worse), max(better)
        sizes = [most] if least in (None, most) else [least, most]
        figures = [
            f"{_short(better[size])} instead of {_short(worse[size])}{unit} with {size} workers" for size in sizes
        ]
        return f"**{what}: {_from(least)}.** {how} {', '.join(figures)}."

    ready = {store: by_workers("ready_s", start="rolling", store=store) for store in STORES}
    sentences = [
        "**Nothing of it: one worker.**",
        compare(
            "A shared folder", "Workers that start one after the other are ready after", ready["shared"], ready["none"]
        ),
    ]
    for traffic in TRAFFIC:
        waits = {rule: by_workers("wait_s", traffic=traffic, rule=rule) for rule in RULES}
        what = f"Routing by key, {traffic} traffic"
        sentence = compare(
            what, "Compared with the least loaded, a prompt waits", waits["by key"], waits["least-loaded"]
        )
        sentence += f" Compared with `route: any` it pays {_from(pays_from(waits['by key'], waits['any']))}."
        times = {size: waits["by key"][size] / max(waited, 1e-9) for size, waited in waits["least-loaded"].items()}
        worst = max(times, key=times.get)
        if times[worst] * PAYS > 1:
            sentence += f" With {worst} it waits {times[worst]:.2g} times as long as at the least loaded."
        sentences.append(sentence)
    costs = [f"{row['assumed']} ({row['share']:.2g} times)" for row in rows if row.get("share", 0) > 1]
    if costs:
        sentences.append(
            f"**Routing by key makes prompts wait longer**, in bursty traffic with {CHANGED_AT} workers, where it saves"
            f" little: with {'; '.join(costs)}."
        )
    return sentences


def _from(least: int | None) -> str:
    return "at no size here" if least is None else f"from {least} workers on"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def save(folder: Path, rows: Sequence[report.Row], known: Known) -> None:
    """Write page and plots."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {part: [row for row in rows if row["part"] == part] for part in ("cold", "routes", "changes", "check")}
    _plot(folder, parts["routes"])
    (folder / "scale.md").write_text(page(parts, verdicts(rows), known), encoding="utf-8")


def _plot(folder: Path, routes: Sequence[report.Row]) -> None:
    for name, value, title in (
        ("scale-waiting.png", "wait_s", "How long a prompt waits, by rule and traffic"),
        ("scale-met.png", "met_graph", "Share of prompts that met their graph, by rule and traffic"),
    ):
        curves = {
            f"{rule}, {traffic}": [
                (row["workers"], row[value]) for row in routes if (row["rule"], row["traffic"]) == (rule, traffic)
            ]
            for rule in RULES
            for traffic in TRAFFIC
        }
        label = "seconds, mean, without the image's own" if value == "wait_s" else "share"
        line_plot.save(folder / name, title, "workers", label, curves, doubling=True, aside=True)


def page(parts: Mapping[str, Sequence[report.Row]], sentences: Sequence[str], known: Known) -> str:
    """docs/scale.md."""

    def table(part: str, columns: Sequence[str], workers: Sequence[int] | None = None) -> str:
        chosen = [row for row in parts[part] if workers is None or row["workers"] in workers]
        return report.markdown(chosen, columns, TEXTS)

    costs = ("image_s", "model_s", "capture_s", "capture_mb")
    not_measured = ", ".join(f"`{name}`" for name in costs if name not in known.sources)
    devices = known.sources["load_s"][1].partition(" (")[2].partition(")")[0]

    few = sorted({row["workers"] for row in parts["routes"]})
    few = [number for number in few if number in (1, 2, 4, 16, 64, 250, 1000)] or few
    text = f"""\
# When one machine is not enough: what pays from which size

{chr(10).join(f"- {sentence}" for sentence in sentences)}

From a size on means: at it and all larger ones at most {PAYS:g} of the waiting, or of the compilations, is left.
**These are simulated fleets.** What compiling and loading graphs cost was measured ({devices});
{not_measured} are assumed, not measured: [all inputs](#what-went-in).
Whether routing pays depends on them, so they are [changed below](#other-assumptions);
`python3 dev.py bench fleet --simulate --assume NAME=VALUE --costs FILE` answers for yours.

Written by `dev.py bench fleet --simulate --out docs`; every row: [scale.json](scale.json).

## Rules of routing

Workers are warmed up and hold no model and no captured call when the first prompt comes.

![How long a prompt waits, by rule and traffic](scale-waiting.png)

![Share of prompts that met their graph, by rule and traffic](scale-met.png)

{table("routes", ROUTE_COLUMNS, few)}

## Other assumptions

{CHANGED_AT} workers, bursty traffic, one assumption changed at a time; *least* and *key* are the rules. `share`: of the
waiting at the least loaded, what is left by key; above 1 routing by key makes prompts wait longer.

{table("changes", CHANGE_COLUMNS)}

## Cold starts

Each worker begins with nothing in memory and warms up every architecture, one after the other. Where all start at
once, prompts come from the beginning, for twice as long as compiling everything takes, and go to the least loaded.

{table("cold", COLD_COLUMNS, few)}

## What the columns say

{LEGEND}

## What went in

{report.markdown(given(known), ("name", "value", "from", "means"), TEXTS)}

Left out: how long a ComfyUI takes to start and to load the models that it warms up with; that workers of one machine
share its processors, so that compiling at once is slower; what a network adds to the store; workers that end; and the
overhead of our own Python, milliseconds of an image ([measurements.md](measurements.md#overhead)).

"""
    if parts["check"]:
        text += f"""
## Against a real fleet

`dev.py bench fleet` with a real Ray, and the same load simulated: the share of prompts that met their graph. The real
fleet lost a replica on the way, which the simulated one does not. This checks the counting and says nothing of waiting:
with 12 keys nearly all that miss are a key's first prompts, in the fleet (by key) or on each worker (any).

{table("check", CHECK_COLUMNS)}
"""
    return text
