"""What `bench gpu` measures, in which order, and what still fits into a given time. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .report import Row

MODELS = ("SDXL", "SD1.5", "Flux", "Z-Image", "Qwen-Image", "Wan")
"""SDXL first, in case a run is cut short."""

SIZES = ((1024, 1024), (512, 512), (720, 960), (768, 768), (1280, 720))
"""Width and height in pixels, in this order."""

BATCHES = (1, 4)

QUICK_MODELS, QUICK_SIZES, QUICK_BATCHES = ("SDXL",), ((512, 512), (720, 960)), (1,)

SHARES = {"steps": 0.77, "profile": 0.05, "sizes40": 0.12, "attention": 0.03, "rope": 0.03}
"""The parts in order, each with its share of a model's time."""

PARTS = tuple(SHARES)

EAGER, CORE = "eager", "core"
COMPILED, CAPTURED = "compiled-blocks", "cuda-graphs"
SPEED_UP, BALANCED, FAST = "speed-up", "balanced", "fast"
"""Speed Up at each quality. As the node does, it compares graphs with their blocks first."""

DEFAULT, NATIVE, CHANNELS_LAST = "default", "native", "channels-last"
FLAGS = {
    DEFAULT: ("--cuda-malloc",),
    NATIVE: ("--disable-cuda-malloc",),
    CHANNELS_LAST: ("--disable-cuda-malloc", "--force-channels-last"),
}
"""ComfyUI's own. With the default ones main.py chooses cudaMallocAsync on most cards."""

NO_REPLAYS = "compiled blocks"
"""`ran_as` of a contender with graphs, none of whose calls was replayed."""


@dataclass(frozen=True)
class Contender:
    """label: shown to people. has_graphs: captures whole model calls where it can. quality: of Speed Up."""

    label: str
    has_graphs: bool = False
    quality: str | None = None

    @property
    def skips(self) -> bool:
        """Whether it skips work in some steps, so that its images differ by design."""
        return self.quality not in (None, "Exact")


CONTENDERS = {
    EAGER: Contender("eager"),
    CAPTURED: Contender("ours, CUDA graphs", has_graphs=True),
    COMPILED: Contender("ours, compiled blocks"),
    SPEED_UP: Contender("Speed Up, Exact", True, "Exact"),
    BALANCED: Contender("Speed Up, Balanced", True, "Balanced"),
    FAST: Contender("Speed Up, Fast", True, "Fast"),
    CORE: Contender("core's TorchCompileModel"),
}
"""In the order in which each case runs them: what takes long to prepare, core's node, comes last."""

SAMPLED = 3
"""Steps of a first image, and of an image that is compared with the eager one."""

MADE_TO_SKIP = 30
"""Steps of a run in which steps are skipped."""

COLD, WARM = "cold", "warm"
"""Starts: with nothing compiled, and the same image again."""


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


def forty_sizes() -> list[tuple[int, int]]:
    """Forty different sizes of 512 to 1024 pixels a side, multiples of 8, large and small ones alternating."""
    sides = list(range(512, 1025, 8))
    # 38 and 24 share no factor with the 65 sides, so each is visited once, far from the previous one.
    return [(sides[(38 * number + 64) % 65], sides[(24 * number + 64) % 65]) for number in range(40)]


def named(names: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """Those of `known` that are in `names`, in the order of `known`; None selects all."""
    return [name for name in known if names is None or name in names]


def size_of(text: str) -> tuple[int, int]:
    """ "720x960" as width and height. ValueError for anything else, and for sides that are no multiples of 8."""
    width, height = (int(side) for side in text.lower().split("x"))
    if min(width, height) < 64 or width % 8 or height % 8:
        raise ValueError(text)
    return width, height


class TimeBudget:
    """Shares out the seconds that a run may take, part by part; None: no limit.

    now: seconds of a monotonic clock.
    """

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._end = None if seconds is None else now() + seconds
        self._deadline: float | None = None

    def parts(self, parts: Sequence[str], models_left: int) -> Iterator[str]:
        """Yield the parts of one model; while one is handled, `fits` goes by its deadline.

        Each model gets an equal share of the time left. A part that ends early leaves its time to the next ones.
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
        """Whether something that takes that many seconds ends before the part's deadline."""
        return self._deadline is None or self._now() + expected < self._deadline


def skipped(part: str, model: str, what: str, contender: str, why: str = "no time left") -> Row:
    """A row for something that was not measured."""
    return {"part": part, "model": model, "what": what, "contender": contender, "why": why}


_NAMES = ("part", "model", "flags", "contender", "size", "batch", "start", "number", "what")
"""Fields that say what a row is about. A contender's kernels are about the same, and replaced together."""


def merged(old: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """The new rows, and the old ones about something else."""

    def about(row: Row) -> tuple:
        return tuple(row.get(name) for name in _NAMES)

    measured = set(map(about, new))
    return [row for row in old if about(row) not in measured] + list(new)
