"""The sizes that model families were trained at, and the size nearest to a requested one.

Pure arithmetic over `Size`, in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .resolution import PIXELS_PER_MEGAPIXEL, Size, aspect_error, budget_pixels, factor


def _with_turned(sizes: Sequence[tuple[int, int]]) -> tuple[Size, ...]:
    """The sizes in both orientations, each once, in order of width."""
    return tuple(Size(*pair) for pair in sorted({*sizes, *(pair[::-1] for pair in sizes)}))


def _aspect_buckets() -> tuple[Size, ...]:
    """512 × 512, and for each width from 256 to 1024 the largest height up to 1024 within 512 × 768 pixels."""
    heights = {width: min(1024, 512 * 768 // width // 64 * 64) for width in range(256, 1025, 64)}
    return _with_turned([*heights.items(), (512, 512)])


_SDXL = tuple(
    (width, height)
    for width, heights in {
        512: (1856, 1920, 1984, 2048),
        576: (1664, 1728, 1792),
        640: (1536, 1600),
        704: (1344, 1408, 1472),
        768: (1280, 1344),
        832: (1152, 1216),
        896: (1088, 1152),
        960: (1024, 1088),
        1024: (1024,),
    }.items()
    for height in heights
)
"""Portrait and square; training used both orientations of each, except for 704 × 1344, which is only landscape."""

TRAINED: dict[str, tuple[Size, ...]] = {
    # Stable Diffusion 1.x was trained at 512 × 512 (model card), its finetunes in the default buckets of
    # bucketmanager.py in github.com/NovelAI/novelai-aspect-ratio-bucketing.
    "SD1.5": _aspect_buckets(),
    # The 40 sizes of "SDXL: Improving Latent Diffusion Models", arXiv 2307.01952, appendix I (heights first there).
    "SDXL": tuple(size for size in _with_turned(_SDXL) if size != Size(704, 1344)),
    # Flux was trained at 0.1 to 2 megapixels; the only published list is that of Flux Kontext, in src/flux/util.py
    # of github.com/black-forest-labs/flux.
    "Flux": _with_turned(
        ((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104))
        + ((1024, 1024),)
    ),
    # `aspect_ratios` in the README of github.com/QwenLM/Qwen-Image.
    "Qwen-Image": _with_turned(((1328, 1328), (928, 1664), (1104, 1472), (1056, 1584))),
}
"""Model family → the sizes it was trained at."""

FAMILIES = tuple(TRAINED)


def nearest_trained(sizes: Sequence[Size], asked: Size, mode: str = "nearest", max_megapixels: float = 0.0) -> Size:
    """The size nearest in aspect ratio, which is how training assigns images to buckets; ties by area.

    mode: "up" and "down" consider only sizes with no side smaller, or larger, if there are any.
    max_megapixels: as for `resolution.snap`.

    Raises ValueError, naming the smallest size, if every size exceeds the budget.
    """

    budget = budget_pixels(max_megapixels)
    allowed = [size for size in sizes if budget is None or size.pixels <= budget]
    if not allowed:
        least = min(sizes, key=lambda size: size.pixels)
        megapixels = math.ceil(least.pixels / PIXELS_PER_MEGAPIXEL * 1e4) / 1e4
        raise ValueError(
            f"max_megapixels is {max_megapixels}; here it must be 0 (no limit) or at least {megapixels}:"
            f" the smallest size is {least}."
        )

    def distance(size: Size) -> tuple[float, float]:
        return aspect_error(size, asked), factor(size.pixels, asked.pixels)

    return min(_that_way(allowed, asked, mode), key=distance)


def _that_way(sizes: Sequence[Size], asked: Size, mode: str) -> Sequence[Size]:
    """Those with no side smaller ("up"), or larger ("down"); all where there are none."""
    found = sizes
    if mode == "up":
        found = [size for size in sizes if size.width >= asked.width and size.height >= asked.height]
    elif mode == "down":
        found = [size for size in sizes if size.width <= asked.width and size.height <= asked.height]
    return found or sizes
