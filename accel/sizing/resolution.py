"""Size arithmetic: which width and height a model runs at, given what was asked for.

Pure functions over ints. Widths and heights are pixels unless a name says latent; the latent scale
(pixels a side that one latent element covers) is an argument, never assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

MODES = ("nearest", "up", "down")
PIXELS_PER_MEGAPIXEL = 1024 * 1024  # ComfyUI's own megapixel


@dataclass(frozen=True)
class Size:
    """A width and a height, in pixels."""

    width: int
    height: int

    @property
    def pixels(self) -> int:
        return self.width * self.height

    def latent(self, scale: int) -> tuple[int, int]:
        """(height, width) of the latent, at `scale` pixels a side for each element."""
        return self.height // scale, self.width // scale

    def __str__(self) -> str:
        return f"{self.width}×{self.height}"


def safe_multiple(scale: int, downsamplings: int = 0, patch: int = 1) -> int:
    """The multiple of pixels at which no level of a model has to round its size.

    scale: pixels per latent element. downsamplings: how often the model halves the latent.
    patch: latent elements a side that one token covers.
    """
    return scale * patch * 2**downsamplings


def budget_pixels(max_megapixels: float) -> int | None:
    """The most pixels that `max_megapixels` allows; None for 0, which is no limit."""
    if max_megapixels < 0 or not math.isfinite(max_megapixels):
        raise ValueError(f"max_megapixels is {max_megapixels}; it must be 0 (no limit) or more.")
    return math.floor(max_megapixels * PIXELS_PER_MEGAPIXEL) if max_megapixels else None


def snap(
    width: int,
    height: int,
    multiple: int,
    mode: str = "nearest",
    keep_aspect: bool = False,
    max_megapixels: float = 0.0,
) -> Size:
    """The size whose sides are multiples of `multiple`, closest to width × height.

    A size that is right already comes back as it is, so snapping twice changes nothing. No side is
    ever smaller than one multiple.

    mode: which way a side may move: "nearest" (a tie goes up), "up" or "down".
    keep_aspect: False rounds each side by itself. True also looks one multiple further and takes the
        pair whose aspect ratio is nearest to the requested one; of equals, the nearest in area.
    max_megapixels: never exceeded, whatever the mode, in units of 1024 × 1024 pixels; 0 is no limit.
        A size beyond it is first shrunk with its aspect ratio kept.

    Raises ValueError, naming the valid range, for a side or multiple below 1, an unknown mode, and a
    budget that one multiple by one multiple exceeds.
    """
    for name, value in (("width", width), ("height", height), ("multiple", multiple)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 or more.")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}.")
    budget = budget_pixels(max_megapixels)
    if budget is not None and budget < multiple * multiple:
        least = multiple * multiple / PIXELS_PER_MEGAPIXEL
        raise ValueError(
            f"max_megapixels is {max_megapixels}; at a multiple of {multiple} it must be 0 (no limit)"
            f" or at least {math.ceil(least * 1e4) / 1e4}: the smallest size is {Size(multiple, multiple)}."
        )

    requested = Size(width, height)
    if width % multiple == 0 and height % multiple == 0 and (budget is None or requested.pixels <= budget):
        return requested

    target = _within(max(width, multiple), max(height, multiple), multiple, budget)
    # "up" may find nothing below the budget; around the target there is always a pair that fits.
    choices = _around(target, multiple, mode, budget) or _around(target, multiple, "nearest", budget)
    if not keep_aspect:
        return min(choices, key=lambda size: _distance(size, target))
    return min(choices, key=lambda size: (aspect_error(size, requested), factor(size.pixels, target[0] * target[1])))


def _within(width: int, height: int, multiple: int, budget: int | None) -> tuple[float, float]:
    """Width and height of at most `budget` pixels, in their own aspect ratio as far as one multiple a side allows."""
    if budget is None or width * height <= budget:
        return width, height
    scale = math.sqrt(budget / (width * height))
    if width * scale < multiple:
        return multiple, budget / multiple
    if height * scale < multiple:
        return budget / multiple, multiple
    return width * scale, height * scale


def _around(target: tuple[float, float], multiple: int, mode: str, budget: int | None) -> list[Size]:
    """The sizes of whole multiples beside `target` that the mode and the budget (pixels) allow."""
    sizes = (Size(width, height) for width, height in product(*(_sides(side, multiple, mode) for side in target)))
    return [size for size in sizes if budget is None or size.pixels <= budget]


def _sides(side: float, multiple: int, mode: str) -> list[int]:
    """Two or three neighbouring multiples: where `mode` puts `side`, and one further each way that it may move."""
    slack = 1e-9  # so that a side shrunk to 1023.9999999999 counts as 1024
    steps = side / multiple
    if mode == "up":
        nearest = math.ceil(steps - slack)
        counts = (nearest, nearest + 1)
    elif mode == "down":
        nearest = math.floor(steps + slack)
        counts = (nearest - 1, nearest)
    else:
        nearest = math.floor(steps + 0.5)
        counts = (nearest - 1, nearest, nearest + 1)
    return [count * multiple for count in counts if count >= 1]


def _distance(size: Size, target: tuple[float, float]) -> tuple[float, int]:
    """How far the sides moved, in pixels; of two equally far the larger size comes first."""
    return abs(size.width - target[0]) + abs(size.height - target[1]), -size.pixels


def aspect_error(size: Size, requested: Size) -> float:
    """The factor, 1 or more, between the two aspect ratios; the same when width and height change places."""
    return factor(size.width * requested.height, size.height * requested.width)


def factor(a: float, b: float) -> float:
    """How many times the larger of two positive numbers is the smaller one; 1 or more."""
    return max(a, b) / min(a, b)
