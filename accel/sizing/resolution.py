"""Size arithmetic: the width and height to run a model at, given the requested ones.

Pure functions over ints. Widths and heights are in pixels unless a name says latent; the latent scale (pixels a side
per latent element) is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

MODES = ("nearest", "up", "down")
PIXELS_PER_MEGAPIXEL = 1024 * 1024  # as the host counts them


@dataclass(frozen=True)
class Size:
    """A width and a height, in pixels."""

    width: int
    height: int

    @property
    def pixels(self) -> int:
        return self.width * self.height

    def latent(self, scale: int) -> tuple[int, int]:
        """(height, width) of the latent, at `scale` pixels a side per element."""
        return self.height // scale, self.width // scale

    def __str__(self) -> str:
        return f"{self.width}×{self.height}"


def safe_multiple(scale: int, downsamplings: int = 0, patch: int = 1) -> int:
    """The multiple of pixels at which no level of a model rounds its size.

    scale: pixels a side per latent element. downsamplings: how often the model halves the latent.
    patch: latent elements a side per token.
    """
    return scale * patch * 2**downsamplings


def budget_pixels(max_megapixels: float) -> int | None:
    """The largest number of pixels that `max_megapixels` allows; None for 0, which means no limit."""
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
    """The size closest to width × height whose sides are multiples of `multiple`, at least one each.

    A valid size is returned unchanged, so snapping is idempotent.

    mode: which way a side may move: "nearest" (ties go up), "up" or "down".
    keep_aspect: False rounds each side by itself. True also considers one multiple further and takes the pair
        nearest in aspect ratio; ties by area.
    max_megapixels: upper limit in units of 1024 × 1024 pixels, whatever the mode; 0 is no limit. A larger size is
        first scaled down at its aspect ratio.

    Raises ValueError, naming the valid range, for a side or multiple below 1, an unknown mode, and a budget below
    `multiple` × `multiple` pixels.
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
    # "up" may find nothing within the budget; around the target some pair always fits.
    choices = _around(target, multiple, mode, budget) or _around(target, multiple, "nearest", budget)
    if not keep_aspect:
        across, down = target  # of sizes whose sides moved equally far, the larger one
        return min(choices, key=lambda size: (abs(size.width - across) + abs(size.height - down), -size.pixels))
    return min(choices, key=lambda size: (aspect_error(size, requested), factor(size.pixels, target[0] * target[1])))


def _within(width: int, height: int, multiple: int, budget: int | None) -> tuple[float, float]:
    """Width and height of at most `budget` pixels, at their aspect ratio unless a side would get below `multiple`."""
    if budget is None or width * height <= budget:
        return width, height
    scale = math.sqrt(budget / (width * height))
    if width * scale < multiple:
        return multiple, budget / multiple
    if height * scale < multiple:
        return budget / multiple, multiple
    return width * scale, height * scale


def _around(target: tuple[float, float], multiple: int, mode: str, budget: int | None) -> list[Size]:
    """The sizes in whole multiples around `target` that the mode and the budget (pixels) allow."""
    sizes = (Size(width, height) for width, height in product(*(_sides(side, multiple, mode) for side in target)))
    return [size for size in sizes if budget is None or size.pixels <= budget]


def _sides(side: float, multiple: int, mode: str) -> list[int]:
    """Two or three neighbouring multiples: the one that `mode` rounds `side` to, and the next in each direction."""
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


def aspect_error(size: Size, requested: Size) -> float:
    """The ratio, 1 or more, between the two aspect ratios."""
    return factor(size.width * requested.height, size.height * requested.width)


def factor(a: float, b: float) -> float:
    """The ratio, 1 or more, of the larger to the smaller of two positive numbers."""
    return max(a, b) / min(a, b)
