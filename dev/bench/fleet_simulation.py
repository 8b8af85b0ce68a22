"""`bench fleet --simulate`: does it pay to send a prompt where its graph is, with so many workers?

Discrete events, prompt by prompt, without Ray, ComfyUI or torch. The fleet's own rule (`fleet.routing`) decides where a
prompt goes; each worker takes some prompts at once and runs one, as the fleet's replicas do. What an image, a captured
call and a loaded model cost is assumed: --assume NAME=VALUE changes it.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
from bisect import bisect
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, count
from typing import NamedTuple

from dev import Problem
from fleet.routing import choose, routing_key
from fleet.settings import Settings

from . import report

TRAINED = {"SD1.5": 19, "SDXL": 40, "Flux": 17, "Qwen-Image": 7}
"""Architecture → how many sizes it was trained at; which they are is nothing to the fleet."""

ASSUMED = {
    "image_s": (5.0, "seconds that an image takes where all is there"),
    "capture_s": (1.0, "seconds that the first prompt of a key takes longer on a worker: its call is captured"),
    "keys_held": (20, "captured calls that a worker's graph cache holds"),
    "model_s": (5.0, "seconds to load a model that the worker has not loaded"),
    "models_held": (1, "models that a worker has loaded at once"),
    "models": (30, "models that prompts ask for, by Zipf's law, as their sizes"),
    "load": (0.4, "share of the workers' time that images alone take"),
    "prompts": (100, "prompts for each worker in a trace"),
}
"""name → (value, meaning)."""

_MAY_BE_ZERO = ("capture_s", "model_s")

WORKERS = (1, 4, 16, 64, 250)
ROUTES = ("any", "graph")
"""Values of the fleet's setting `route`; "any" is Ray Serve's own rule: the less busy of two random replicas."""

COLUMNS = ("workers", "route", "met_graph", "met_model", "wait_s", "busy")
LEGEND = """\
met_graph, met_model: share of prompts whose worker held their key, and their model. wait_s: mean, from when a prompt
comes to its answer, without its image's own seconds. busy: share of the workers' time; at 1 the fleet is overloaded,
and waiting grows for as long as that lasts."""

_SOON = 1e-6
"""Seconds by which a worker is looked at later than its patience ends, so that rounding cannot hide it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--simulate")
    group.add_argument("--simulate", action="store_true", help="simulate fleets instead of running one")
    group.add_argument("--workers", type=int, nargs="+", default=WORKERS, help=f"sizes; default: {WORKERS}")
    names = ", ".join(f"{name} {value:g}" for name, (value, _) in ASSUMED.items())
    group.add_argument("--assume", nargs="+", default=[], metavar="NAME=VALUE", help=f"instead of {names}")


def run(options: argparse.Namespace) -> None:
    values = assumed(options.assume)
    rows = [
        {"workers": workers, "route": route, **_routed(values, route, workers)}
        for workers in options.workers
        for route in ROUTES
    ]
    print(f"{report.table(rows, COLUMNS)}\n\n{LEGEND}\n\nAssumed:")
    for name, (_, meaning) in ASSUMED.items():
        print(f"{name} {values[name]:g}: {meaning}")
    report.finish(options.json, rows, None)


def assumed(given: Sequence[str]) -> dict[str, float]:
    """All assumptions, those that were named in place of ours. Raises Problem: one that there is not, or no number."""
    values = {name: value for name, (value, _) in ASSUMED.items()}
    for text in given:
        name, _, number = text.partition("=")
        if name not in ASSUMED:
            raise Problem(f"There is no assumption {name}: choose one of {', '.join(ASSUMED)}.")
        try:
            values[name] = type(values[name])(number)
        except ValueError:
            raise Problem(f"--assume {text}: write a number after {name}=.") from None
        if not 0 <= values[name] < math.inf or (not values[name] and name not in _MAY_BE_ZERO):
            raise Problem(f"--assume {text}: {name} is {'at least' if name in _MAY_BE_ZERO else 'above'} 0.")
    return values


def _routed(values: dict[str, float], route: str, workers: int) -> report.Row:
    """A fleet that is warmed up meets its first prompts; a small one several times, for a mean that says something."""
    costs = Costs(values["model_s"], values["capture_s"], values["models_held"], values["keys_held"])
    at_once, patience = (Settings.model_fields[name].default for name in ("at_once", "patience_s"))
    rate, many = values["load"] * workers / values["image_s"], int(values["prompts"] * workers)
    results = []
    for seed in range(max(1, math.ceil(2000 / many))):
        prompts = traffic(values["models"], rate, many, values["image_s"], seed)
        results.append(Fleet(route, costs, at_once, patience, seed).run(prompts, workers))
    waits = [wait for result in results for wait in result.waits]
    return {
        "met_graph": sum(result.met_graph for result in results) / len(waits),
        "met_model": sum(result.met_model for result in results) / len(waits),
        "wait_s": statistics.mean(waits),
        "busy": sum(result.busy_s for result in results) / sum(result.end * workers for result in results),
    }


class Prompt(NamedTuple):
    """at: seconds, when it comes. image_s: what it takes where all is there."""

    at: float
    model: str
    key: str
    image_s: float


@dataclass(frozen=True)
class Costs:
    """Seconds that a prompt takes beside its image, and what a worker keeps.

    model_s: its model is not loaded. capture_s: its key is not captured. models, keys: that a worker holds, of which
    the least recently used go first.
    """

    model_s: float = 0.0
    capture_s: float = 0.0
    models: int = 1
    keys: int = 256


@dataclass
class Result:
    """waits: seconds from each prompt's coming to its answer, without its image's own; in order of answers."""

    waits: list[float] = field(default_factory=list)
    met_graph: int = 0
    met_model: int = 0
    busy_s: float = 0.0
    end: float = 0.0


class _Worker:
    __slots__ = ("load", "free_at", "keys", "models")

    def __init__(self) -> None:
        self.load, self.free_at = 0, 0.0
        self.keys: OrderedDict[str, None] = OrderedDict()
        self.models: OrderedDict[str, None] = OrderedDict()


class Fleet:
    """Workers behind one front.

    route: one of `ROUTES`. at_once: prompts that a worker has taken, of which it runs one. patience: as for `choose`.
    seed: of the choices at random.
    """

    def __init__(self, route: str, costs: Costs, at_once: int = 2, patience: float = 5.0, seed: int = 0):
        self._keyed = route == "graph"
        self._choose = self._by_key if self._keyed else self._any
        self._costs, self._at_once, self._patience = costs, at_once, patience
        self._random = random.Random(seed)
        self._workers: list[_Worker] = []
        self._ran: dict[int, OrderedDict[str, None]] = {}
        self._holders: Counter[str | None] = Counter()
        """key → how many workers hold it."""
        self._lines: dict[str, deque[Prompt]] = {}
        """Prompts that wait, in order: by key, or all in one."""
        self._events: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._numbers = count()
        self._result = Result()

    def run(self, prompts: Sequence[Prompt], workers: int) -> Result:
        """What becomes of the prompts, with so many workers that hold nothing yet."""
        self._workers = [_Worker() for _ in range(workers)]
        self._ran = {number: worker.keys for number, worker in enumerate(self._workers)}
        coming = iter(sorted(prompts, key=lambda prompt: prompt.at))
        self._expect(coming)
        now = 0.0
        while self._events:
            now, _, happens, arguments = heapq.heappop(self._events)
            happens(now, *arguments)
        return self._result

    def _at(self, time: float, happens: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happens, arguments))

    def _expect(self, coming: Iterator[Prompt]) -> None:
        prompt = next(coming, None)
        if prompt is not None:
            self._at(prompt.at, self._come, prompt, coming)

    def _come(self, now: float, prompt: Prompt, coming: Iterator[Prompt]) -> None:
        self._expect(coming)
        name = prompt.key if self._keyed else ""
        self._lines.setdefault(name, deque()).append(prompt)
        self._advance(now, name)
        if self._keyed and name in self._lines:
            self._at(now + self._patience + _SOON, self._advance, name)

    def _advance(self, now: float, name: str) -> None:
        """Send on what can be sent of one line."""
        line = self._lines.get(name)
        while line:
            worker = self._choose(now, line[0])
            if worker is None:
                return
            self._send(now, line.popleft(), worker)
        self._lines.pop(name, None)

    def _any(self, now: float, prompt: Prompt) -> _Worker | None:
        two = self._random.sample(self._workers, min(2, len(self._workers)))
        return self._with_room(two) or self._with_room(self._workers)  # Serve would try two others until it finds one

    def _by_key(self, now: float, prompt: Prompt) -> _Worker | None:
        waited = now - prompt.at
        for rank in choose(prompt.key, waited, self._patience, self._ran, lambda number: self._workers[number].load):
            worker = self._with_room([self._workers[number] for number in rank])
            if worker is not None:
                return worker
        return None

    def _with_room(self, workers: Sequence[_Worker]) -> _Worker | None:
        """Of those that can take one more, one with the least to do."""
        for load in range(self._at_once):
            least = [worker for worker in workers if worker.load == load]
            if least:
                return self._random.choice(least)
        return None

    def _send(self, now: float, prompt: Prompt, worker: _Worker) -> None:
        costs, seconds = self._costs, prompt.image_s
        met_model, _ = _use(worker.models, prompt.model, costs.models)
        met_graph, gone = _use(worker.keys, prompt.key, costs.keys)
        self._holders[prompt.key] += not met_graph
        self._holders[gone] -= 1
        seconds += 0.0 if met_model else costs.model_s
        seconds += 0.0 if met_graph else costs.capture_s
        worker.load += 1
        worker.free_at = max(worker.free_at, now) + seconds
        self._result.met_model += met_model
        self._result.met_graph += met_graph
        self._result.busy_s += seconds
        self._at(worker.free_at, self._answer, prompt, worker)

    def _answer(self, now: float, prompt: Prompt, worker: _Worker) -> None:
        self._result.waits.append(now - prompt.at - prompt.image_s)
        self._result.end = now
        worker.load -= 1
        oldest = sorted(self._lines, key=lambda name: self._lines[name][0].at)
        # Prompts of a key that no worker holds may be this one's too.
        mine = [name for name in oldest if not self._keyed or name in worker.keys or not self._holders[name]]
        for name in mine:
            if worker.load < self._at_once:
                self._advance(now, name)
        if not worker.load and oldest:
            self._advance(now, oldest[0])


def _use(held: OrderedDict[str, None], name: str, most: int) -> tuple[bool, str | None]:
    """Whether it was held; it is now. And what is not held any more: the least recently used beyond `most`."""
    met = name in held
    held[name] = None
    held.move_to_end(name)
    return met, held.popitem(last=False)[0] if len(held) > most else None


def traffic(models: int, rate: float, many: int, image_s: float, seed: int) -> list[Prompt]:
    """Prompts that come independently of each other (Poisson), so many a second; of so many models of all
    architectures, and of the sizes that each was trained at, by Zipf's law."""
    draw, architectures = random.Random(seed), list(TRAINED.items())
    at, prompts = 0.0, []
    for _ in range(many):
        at += draw.expovariate(rate)
        number = _zipf(draw, models)
        architecture, sizes = architectures[number % len(architectures)]
        model = f"{architecture}-{number}.safetensors"
        prompts.append(Prompt(at, model, _key(model, _zipf(draw, sizes)), image_s))
    return prompts


@cache
def _key(model: str, number: int) -> str:
    """The key that the fleet's router reads from a prompt for a model and one of its sizes."""
    latent = {"inputs": {"width": 512 + 64 * number, "height": 512, "batch_size": 1}}
    return routing_key({"1": {"inputs": {"ckpt_name": model}}, "2": latent})


def _zipf(draw: random.Random, count: int) -> int:
    """A number below `count`: each n-th is 1 / n as frequent as the first."""
    return bisect(_shares(count), draw.random())


@cache
def _shares(count: int) -> list[float]:
    weights = [1 / rank for rank in range(1, count + 1)]
    return [total / sum(weights) for total in accumulate(weights)][:-1]
