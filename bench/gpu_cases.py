"""What `bench gpu` measures, in which order, and what still fits into a given time. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .report import Row
from .session_plan import STEPS, Step

MODELS = ("SDXL", "SD1.5", "Flux", "Z-Image", "Qwen-Image", "Wan")
"""SDXL first: the goals are of it."""

SIZES = ((1024, 1024), (512, 512), (720, 960), (768, 768), (1280, 720))
"""Width and height in pixels; those of the goals first, for a run that is cut."""

BATCHES = (1, 4)

QUICK_MODELS, QUICK_SIZES, QUICK_BATCHES = ("SDXL",), ((512, 512), (720, 960)), (1,)

SHARES = {"steps": 0.52, "profile": 0.04, "sizes40": 0.08, "session": 0.2, "cold": 0.16}
"""The parts in their order, and how much of a model's time each may take."""

PARTS = tuple(SHARES)

EAGER, CORE, BLOCKS, EASY_CACHE = "eager", "core", "blocks", "easycache"
COMPILED, CAPTURED = "compiled-blocks", "cuda-graphs"
SHIPPED = "shipped"
"""Accelerate Model with its inputs as they come: graphs are compared with their blocks first."""

CHANNELS_LAST = "channels-last"
"""`CAPTURED` on a copy of the model whose convolutions have channels-last weights; of models with convolutions."""


NO_REPLAYS = "compiled blocks"
"""What a contender with graphs ran as where none of its calls was replayed."""


@dataclass(frozen=True)
class Contender:
    """label: for people. has_graphs: records whole model calls. interval: of DeepCache. caches: skips work in steps,
    so that its images are others by design."""

    label: str
    has_graphs: bool = False
    interval: int | None = None
    caches: bool = False


CONTENDERS = {
    EAGER: Contender("eager"),
    CAPTURED: Contender("ours, CUDA graphs", has_graphs=True),
    COMPILED: Contender("ours, compiled blocks"),
    SHIPPED: Contender("ours, as shipped"),
    "deepcache-3": Contender("ours + DeepCache 3", has_graphs=True, interval=3, caches=True),
    CHANNELS_LAST: Contender("ours, channels-last", has_graphs=True),
    CORE: Contender("core's TorchCompileModel"),
    "deepcache-2": Contender("ours + DeepCache 2", has_graphs=True, interval=2, caches=True),
    "deepcache-5": Contender("ours + DeepCache 5", has_graphs=True, interval=5, caches=True),
    EASY_CACHE: Contender("ours + core's EasyCache", has_graphs=True, caches=True),
    BLOCKS: Contender("core, block by block"),
}
"""In the order in which each case takes them: those that the goals are about before the others."""

COMPILING = (CAPTURED, COMPILED, CORE, BLOCKS)
"""Those that compile, without a cache policy beside: of the session, and of cold and warm starts."""

SAMPLED = 3
"""Steps of an image that is compared with the eager one, and of a first image."""

MADE_TO_SKIP = 30
"""Steps of a caching contender's timed run after its first: a multiple of every interval."""

QUICK_COMPILING = {"session": (CAPTURED, CORE), "cold": (CAPTURED,)}
"""Of the same parts, with --quick."""

COLD, WARM, NEW_PROCESS = "cold", "warm", "new process"
"""Starts: with nothing compiled; the image once more; the first of another process, which finds what is on disk."""

SESSION = tuple(step for step in STEPS if step.name not in ("960x720", "weights reloaded"))
"""Sixteen of the session's prompts. Loading weights is no matter of speed here."""

QUICK_SESSION = tuple(step for step in SESSION if step.name in ("512x512", "720x960", "LoRA at 0.8", "ControlNet on"))


@dataclass(frozen=True)
class Case:
    """width, height: pixels. batch: images."""

    width: int
    height: int
    batch: int

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    def __str__(self) -> str:
        return f"{self.size}, batch {self.batch}"


def cases(sizes: Iterable[tuple[int, int]], batches: Iterable[int]) -> list[Case]:
    """Every size at the first batch, then at the next."""
    sizes = tuple(sizes)
    return [Case(width, height, batch) for batch in batches for width, height in sizes]


def turns(names: Sequence[str]) -> list[list[str]]:
    """Who takes turns with whom: first all that are cheap at a new size, then core's with those that they are beside.

    So a run that is cut in core's compiling has the rest. A contender's later rows stand in place of its earlier ones.
    """
    ours = [name for name in names if name not in (CORE, BLOCKS)]
    theirs = [name for name in names if name in (CORE, BLOCKS)]
    if not theirs or ours == [EAGER]:
        return [list(names)]
    return [ours, [*(name for name in (EAGER, CAPTURED) if name in names), *theirs]]


def forty_sizes() -> list[tuple[int, int]]:
    """Forty different sizes of 512 to 1024 pixels a side, in steps of 8, large and small ones in turn."""
    sides = list(range(512, 1025, 8))
    # 65 sides; steps of 38 and 24, which 65 has no part in, visit each once, far from the one before.
    return [(sides[(38 * number + 64) % 65], sides[(24 * number + 64) % 65]) for number in range(40)]


def named(names: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """Those of `known` that were asked for, in its order; all where nobody asked."""
    return [name for name in known if names is None or name in names]


def size_of(text: str) -> tuple[int, int]:
    """ "720x960" as width and height. ValueError for anything else, and for sides that are no multiples of 8."""
    width, height = (int(side) for side in text.lower().split("x"))
    if min(width, height) < 64 or width % 8 or height % 8:
        raise ValueError(text)
    return width, height


class TimeBudget:
    """Seconds that a run may take, given out part by part; None gives as much as it takes.

    now: seconds of a clock that never goes back.
    """

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._end = None if seconds is None else now() + seconds
        self._deadline: float | None = None

    def parts(self, parts: Sequence[str], models_left: int) -> Iterator[str]:
        """Yield the parts of one model; while one is handled, `fits` goes by its deadline.

        The model has its equal part of what is left. A part that ends early leaves its time to those after it.
        """
        started = self._now()
        total = sum(SHARES[part] for part in parts)
        reached = 0.0
        for part in parts:
            reached += SHARES[part]
            if self._end is not None:
                self._deadline = started + (self._end - started) / models_left * reached / total
            yield part

    def fits(self, expected: float = 0.0) -> bool:
        """Whether something that takes so many seconds ends before the part's deadline."""
        return self._deadline is None or self._now() + expected < self._deadline


def skipped(part: str, model: str, what: str, contender: str, why: str = "no time left") -> Row:
    """A row for something that was not measured."""
    return {"part": part, "model": model, "what": what, "contender": contender, "why": why}


_NAMES = ("part", "model", "contender", "size", "batch", "step", "start", "number", "kernel", "what")
"""Of a row: what it is about."""


def merged(old: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """The new rows, and the old ones about something else. A contender's kernels are measured together."""
    measured = {_about(row) for row in new}
    profiled = {_profiled(row) for row in new if row["part"] == "profile"}
    kept = [row for row in old if _about(row) not in measured]
    return [row for row in kept if row["part"] != "profile" or _profiled(row) not in profiled] + list(new)


def replaced(rows: Iterable[Row], row: Row) -> list[Row]:
    """The rows with this one, in place of an earlier one about the same."""
    return [*(known for known in rows if _about(known) != _about(row)), row]


def _about(row: Row) -> tuple:
    return tuple(row.get(name) for name in _NAMES)


def _profiled(row: Row) -> tuple:
    return tuple(row.get(name) for name in ("model", "contender", "size", "batch"))


def in_session(control: bool, steps: Sequence[Step]) -> list[Step]:
    """The session's prompts for a model; control: whether there is a ControlNet for it here."""
    return [step for step in steps if control or not step.control]
