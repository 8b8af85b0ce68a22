"""A fleet prompt by prompt: discrete events over given traffic, a given rule of routing and given costs. No torch.

Prompts of one key wait in one line, and each worker takes some at once and runs one, as Ray Serve and the fleet's
replicas do. Where a prompt goes by its key is decided by the fleet's own rule (`fleet.homes`).
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, count
from typing import NamedTuple

from accel.sizing.resolution import Size
from fleet.homes import Homes
from fleet.routing_key import routing_key

RULES = ("any", "least-loaded", "by key")
STORES = ("none", "shared")
_SOON = 1e-6
"""Seconds by which a worker is looked at later than its patience ends, so that rounding cannot hide it."""


class Prompt(NamedTuple):
    """at: seconds, when it comes. image_s: what it takes where all is there."""

    at: float
    model: str
    key: str
    image_s: float


class Architecture(NamedTuple):
    """graphs: how many block types it has. compile_s, load_s: of one graph; loaded from the store."""

    name: str
    graphs: int
    compile_s: float
    load_s: float


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


class Store:
    """Where graphs are kept: "none" by each worker for itself, "shared" by all."""

    def __init__(self, kind: str):
        self._kind = kind
        self._saved: dict[tuple[str, int], float] = {}
        """When each graph is there, or will be: it is noted when its compiling begins."""
        self.compiled = self.loaded = 0
        self.compiling_s = 0.0

    def get(self, needed: Architecture, now: float) -> float:
        """When a worker that asks for an architecture's graphs now has them all. To be called in order of `now`."""
        for number in range(needed.graphs):
            name = (needed.name, number)
            saved = math.inf if self._kind == "none" else self._saved.get(name, math.inf)
            if saved <= now:
                self.loaded += 1
                now += needed.load_s
            else:
                self.compiled += 1
                self.compiling_s += needed.compile_s
                now += needed.compile_s
                self._saved[name] = min(now, saved)
        return now


def cold_start(starts: Sequence[float], needed: Sequence[Architecture], store: Store) -> list[float]:
    """When each worker is ready, given when its process starts: it warms up one architecture after the other."""
    ready = []
    for now in sorted(starts):
        for architecture in needed:
            now = store.get(architecture, now)
        ready.append(now)
    return ready


@dataclass
class Result:
    """waits: seconds from each prompt's coming to its answer, without its image's own; in order of answers."""

    waits: list[float] = field(default_factory=list)
    met_graph: int = 0
    met_model: int = 0
    busy_s: float = 0.0
    end: float = 0.0
    keys: list[int] = field(default_factory=list)
    """That each worker holds at the end."""

    def waited(self, share: float) -> float:
        """The least time within which this share of prompts had waited."""
        return sorted(self.waits)[max(0, math.ceil(share * len(self.waits)) - 1)]


class _Worker:
    __slots__ = ("number", "load", "free_at", "idle_since", "keys", "models")

    def __init__(self, number: int):
        self.number, self.load, self.free_at, self.idle_since = number, 0, 0.0, -math.inf
        self.keys: OrderedDict[str, None] = OrderedDict()
        self.models: OrderedDict[str, None] = OrderedDict()


class Fleet:
    """Workers behind one front.

    rule: of `RULES`; "any" is Ray Serve's own: of two replicas at random, the one with less to do. at_once: prompts
    that a worker has taken, of which it runs one. patience: as for `Homes`. seed: of the choices at random.
    """

    def __init__(self, rule: str, costs: Costs, at_once: int = 2, patience: float = 5.0, seed: int = 0):
        self._choose = {"any": self._any, "least-loaded": self._least_loaded, "by key": self._by_key}[rule]
        self._keyed = rule == "by key"
        self._costs, self._at_once, self._patience = costs, at_once, patience
        self._homes: Homes[_Worker] = Homes(patience)
        self._random = random.Random(seed)
        self._ready: list[_Worker] = []
        self._ran: dict[_Worker, OrderedDict[str, None]] = {}
        self._lines: dict[str, deque[Prompt]] = {}
        """Prompts that wait, in order: by key, or all in one."""
        self._events: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._numbers = count()
        self._result = Result()

    def run(self, prompts: Sequence[Prompt], ready: Sequence[float]) -> Result:
        """What becomes of the prompts. ready: when each worker takes its first."""
        for number, at in enumerate(ready):
            self._at(at, self._join, _Worker(number))
        coming = iter(sorted(prompts, key=lambda prompt: prompt.at))
        self._expect(coming)
        now = 0.0
        while self._events:
            now, _, happens, arguments = heapq.heappop(self._events)
            happens(now, *arguments)
        self._result.keys = [len(worker.keys) for worker in self._ready]
        return self._result

    def _at(self, time: float, happens: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happens, arguments))

    def _expect(self, coming: Iterator[Prompt]) -> None:
        prompt = next(coming, None)
        if prompt is not None:
            self._at(prompt.at, self._come, prompt, coming)

    def _join(self, now: float, worker: _Worker) -> None:
        self._ready.append(worker)
        self._ran[worker] = worker.keys
        for line in sorted(self._lines, key=lambda name: self._lines[name][0].at):
            self._advance(now, line)

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
            worker = self._choose(now, line[0]) if self._ready else None
            if worker is None:
                return
            self._send(now, line.popleft(), worker)
        self._lines.pop(name, None)

    def _any(self, now: float, prompt: Prompt) -> _Worker | None:
        return self._with_room(self._random.sample(self._ready, min(2, len(self._ready)))) or self._with_room(
            self._ready
        )  # Serve would try two others until it finds one

    def _least_loaded(self, now: float, prompt: Prompt) -> _Worker | None:
        first = self._random.randrange(len(self._ready))
        for index in range(-first, len(self._ready) - first):
            if not self._ready[index].load:
                return self._ready[index]
        return self._with_room(self._ready)

    def _by_key(self, now: float, prompt: Prompt) -> _Worker | None:
        waited = now - prompt.at
        for rank in self._homes.choose(prompt.key, waited, self._ran, lambda worker: worker.load, now):
            worker = self._with_room(rank)
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
        met_model = _use(worker.models, prompt.model, costs.models)
        met_graph = _use(worker.keys, prompt.key, costs.keys)
        seconds += 0.0 if met_model else costs.model_s
        seconds += 0.0 if met_graph else costs.capture_s
        worker.load += 1
        worker.free_at = max(worker.free_at, now) + seconds
        self._result.met_model += met_model
        self._result.met_graph += met_graph
        self._result.busy_s += seconds
        self._homes.note_work(worker, now)
        self._at(worker.free_at, self._answer, prompt, worker)

    def _answer(self, now: float, prompt: Prompt, worker: _Worker) -> None:
        self._result.waits.append(now - prompt.at - prompt.image_s)
        self._result.end = now
        worker.load -= 1
        self._homes.note_work(worker, now)
        mine = [name for name in self._lines if not self._keyed or self._homes.is_home(worker, name, worker.keys)]
        for name in sorted(mine, key=lambda name: self._lines[name][0].at):
            if worker.load < self._at_once:
                self._advance(now, name)
        if not worker.load and self._keyed:
            worker.idle_since = now
            self._at(now + self._patience + _SOON, self._take_over, worker, now)

    def _take_over(self, now: float, worker: _Worker, since: float) -> None:
        """The worker has had nothing to do for as long as its patience: the prompt that waits longest may go to it."""
        if not worker.load and worker.idle_since == since and self._lines:
            self._advance(now, min(self._lines, key=lambda name: self._lines[name][0].at))


def _use(held: OrderedDict[str, None], name: str, most: int) -> bool:
    """Whether it was held; it is now, and the least recently used beyond `most` are not."""
    met = name in held
    held[name] = None
    held.move_to_end(name)
    if len(held) > most:
        held.popitem(last=False)
    return met


@dataclass(frozen=True)
class Wishes:
    """What prompts ask for: models of several architectures, by Zipf's law, and the sizes of each, by Zipf's law.

    sizes: of each architecture, those it was trained at. The exponents: 0 asks for all equally often.
    """

    models: int
    sizes: Sequence[tuple[str, Sequence[Size]]]
    zipf_models: float
    zipf_sizes: float

    def draw(self, random: random.Random) -> tuple[str, str]:
        """Of a prompt, the model and the key that the fleet's router reads from it."""
        number = _zipf(random, self.models, self.zipf_models)
        architecture, sizes = self.sizes[number % len(self.sizes)]
        model = f"{architecture}-{number}.safetensors"
        return model, _key(model, sizes[_zipf(random, len(sizes), self.zipf_sizes)])


@cache
def _key(model: str, size: Size) -> str:
    latent = {"inputs": {"width": size.width, "height": size.height, "batch_size": 1}}
    return routing_key({"1": {"inputs": {"ckpt_name": model}}, "2": latent})


def _zipf(random: random.Random, count: int, exponent: float) -> int:
    """A number below `count`, the first most often."""
    return bisect(_shares(count, exponent), random.random())


@cache
def _shares(count: int, exponent: float) -> list[float]:
    weights = [1 / rank**exponent for rank in range(1, count + 1)]
    return [total / sum(weights) for total in accumulate(weights)][:-1]


def steady(wishes: Wishes, rate: float, many: int, image_s: float, seed: int) -> list[Prompt]:
    """Prompts that come independently of each other (Poisson), `rate` a second."""
    draw = random.Random(seed)
    at, prompts = 0.0, []
    for _ in range(many):
        at += draw.expovariate(rate)
        prompts.append(Prompt(at, *wishes.draw(draw), image_s))
    return prompts


def bursty(
    wishes: Wishes, rate: float, many: int, image_s: float, seed: int, burst: float, day_swing: float
) -> list[Prompt]:
    """Prompts that come in bursts of one key, `burst` on average, more of them at one time of the day than at another.

    The trace is one day, on average with `rate` a second: it begins with that, rises and falls by the share
    `day_swing` of it, as a sine does.
    """
    draw = random.Random(seed)
    day, at, prompts = many / rate, 0.0, []
    while len(prompts) < many:
        at += draw.expovariate(rate * (1 + day_swing) / burst)
        if draw.random() * (1 + day_swing) > 1 + day_swing * math.sin(2 * math.pi * at / day):
            continue  # thinning, so that what is left has the rate of this hour
        together = 1 + math.floor(math.log(1 - draw.random()) / math.log(1 - 1 / burst)) if burst > 1 else 1
        prompts += [Prompt(at, *wishes.draw(draw), image_s)] * together
    return prompts[:many]
