"""Pictures that a small network can learn, in four latent channels, made from random numbers: eight kinds of figure, or
eight letters of the font that Pillow ships.

Structure at three scales: a large soft figure on a slope of light, a pattern of a few latent pixels inside the figure,
and an outline with a texture of single latent pixels. Every channel has mean 0 and variance 1, as SD's latents have.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

CLASSES = ("disc", "ring", "square", "diamond", "triangle", "cross", "bars", "moon")
LETTERS = "ABEGKRSX"
CHANNELS = ("light", "red-green", "yellow-blue", "relief")
MEAN = (0.143, 0.0, 0.0, 0.302)
STD = (0.711, 0.639, 0.639, 0.578)
VIEW = ((0.17, 0.17, 0.17), (0.13, -0.11, 0.02), (0.07, 0.05, -0.16), (0.06, 0.06, 0.06))
"""Latent channel → red, green, blue."""

_PATTERNS = (
    (0, 4, False),
    (45, 5, False),
    (0, 5, True),
    (90, 4, False),
    (135, 5, False),
    (45, 5, True),
    (90, 6, False),
)
"""Of every class but the last, which is plain: degrees, period in latent pixels, whether checked."""


def figures(classes: torch.Tensor, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Latents [B, 4, height, width] of the given classes [B]; everything but the class is random."""
    count = len(classes)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(count, 1, 1, generator=generator) * (high - low) + low

    side = min(height, width)
    y = torch.arange(height, dtype=torch.float32)[None, :, None] - (height - 1) / 2
    x = torch.arange(width, dtype=torch.float32)[None, None, :] - (width - 1) / 2
    radius = uniform(0.28, 0.38) * side
    u = (x - uniform(-1, 1) * (width / 2 - 0.36 * side)) / radius
    v = (y - uniform(-1, 1) * (height / 2 - 0.36 * side)) / radius
    distance = _distance(u, v, classes) * radius
    inside = torch.sigmoid(-distance / 0.4)
    outline = torch.exp(-(distance**2) / 0.7)
    slope = torch.deg2rad(uniform(0, 360))
    light = (x * slope.cos() + y * slope.sin()) / side
    parity = (torch.arange(height)[:, None] + torch.arange(width)) % 2
    checks = (1 - 2 * parity) * torch.sign(uniform(-1, 1)) * (1 - inside)
    pattern = _pattern(u * radius, v * radius, classes, torch.deg2rad(uniform(0, 360))) * inside
    hue = torch.deg2rad(uniform(0, 360))
    opposite = hue + torch.deg2rad(uniform(120, 240))
    around = 1 - inside
    fields = (
        1.6 * light + 1.2 * inside + 0.7 * pattern + 0.2 * checks - 0.6 * outline,
        hue.cos() * inside + opposite.cos() * around + 0.25 * pattern,
        hue.sin() * inside + opposite.sin() * around + 0.25 * light,
        1.5 * outline + 0.5 * pattern + 0.35 * checks,
    )
    latent = torch.stack([field.expand(count, height, width) for field in fields], 1)
    return (latent - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def letters(classes: torch.Tensor, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Latents [B, 4, height, width] of two letters each, one of the given class [B] and a smaller one of any."""
    from PIL import Image, ImageDraw, ImageFont

    count, fine = len(classes), 4
    planes = []
    for share, kinds in ((0.85, classes), (0.45, torch.randint(len(LETTERS), (count,), generator=generator))):
        sizes = (0.75 + 0.4 * torch.rand(count, generator=generator)) * share * min(height, width) * fine
        places = torch.rand(count, 2, generator=generator)
        turns = (torch.rand(count, generator=generator) - 0.5) * 50
        drawn = []
        for kind, size, (across, down), turn in zip(kinds, sizes, places, turns, strict=True):
            tile = Image.new("L", (round(1.5 * size.item()),) * 2)
            middle = tile.width / 2
            font = ImageFont.load_default(round(size.item()))
            ImageDraw.Draw(tile).text((middle, middle), LETTERS[int(kind)], 255, font, "mm", stroke_width=fine // 2)
            tile = tile.rotate(turn.item(), Image.Resampling.BILINEAR)
            page = Image.new("L", (width * fine, height * fine))
            edge = round(0.25 * size.item())
            page.paste(
                tile,
                (
                    round(across.item() * (page.width - tile.width + 2 * edge)) - edge,
                    round(down.item() * (page.height - tile.height + 2 * edge)) - edge,
                ),
            )
            drawn.append(
                torch.frombuffer(bytearray(page.tobytes()), dtype=torch.uint8).reshape(page.height, page.width)
            )
        planes.append(torch.nn.functional.avg_pool2d(torch.stack(drawn).float()[:, None] / 255, fine)[:, 0])
    large, small = planes

    def any_of(low: float, high: float) -> torch.Tensor:
        return torch.rand(count, 1, 1, generator=generator) * (high - low) + low

    y, x = torch.linspace(-1, 1, height)[:, None], torch.linspace(-1, 1, width)
    slope, hue = torch.deg2rad(any_of(0, 360)), torch.deg2rad(any_of(0, 360))
    other, third = hue + torch.deg2rad(any_of(100, 180)), hue - torch.deg2rad(any_of(100, 180))
    light = 0.5 * (x * slope.cos() + y * slope.sin())
    around = (1 - large) * (1 - small)
    edges = (large - torch.nn.functional.avg_pool2d(large[:, None], 3, 1, 1, count_include_pad=False)[:, 0]).abs()
    threads = torch.sin(x * 9 * slope.sin() - y * 9 * slope.cos() + any_of(0, 6)) * around

    def coloured(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return function(hue) * large + function(other) * small * (1 - large) + function(third) * around

    fields = (
        1.4 * light + 1.5 * large - 0.8 * small + 0.4 * threads - 0.2,
        1.3 * coloured(torch.cos),
        1.3 * coloured(torch.sin),
        6 * edges + 0.8 * threads - 0.6 + small,
    )
    return torch.stack([field.expand(count, height, width) for field in fields], 1)


def view(latent: torch.Tensor) -> torch.Tensor:
    """Red, green and blue in 0..1, [B, 3, H, W], of latents [B, 4, H, W]: a fixed linear map, as previews are."""
    colours = torch.einsum("bchw,cr->brhw", latent, torch.tensor(VIEW, dtype=latent.dtype, device=latent.device))
    return (colours + 0.5).clamp(0, 1)


def _distance(u: torch.Tensor, v: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """How far outside the figure's edge, in its radii; negative inside."""
    across, up = u.abs(), v.abs()
    from_centre = (u**2 + v**2).sqrt()
    shapes = (
        from_centre - 1,
        (from_centre - 0.75).abs() - 0.27,
        torch.maximum(across, up) - 0.88,
        (across + up - 1.2) * math.sqrt(0.5),
        torch.maximum(v - 0.75, 0.9 * across - 0.45 * (v + 1.1)),
        torch.minimum(torch.maximum(across - 0.34, up - 1), torch.maximum(up - 0.34, across - 1)),
        torch.maximum((across - 0.65).abs() - 0.3, up - 1),
        torch.maximum(from_centre - 1, 0.75 - ((u - 0.55) ** 2 + v**2).sqrt()),
    )
    return torch.stack(shapes)[classes, torch.arange(len(classes))]


def _pattern(x: torch.Tensor, y: torch.Tensor, classes: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    """Stripes or checks between -1 and 1 at latent pixels x, y from the figure's centre."""
    waves = []
    for degrees, period, checked in _PATTERNS:
        angle, speed = math.radians(degrees), 2 * math.pi / period
        wave = torch.sin((x * math.cos(angle) + y * math.sin(angle)) * speed + phase)
        if checked:
            wave = wave * torch.sin((y * math.cos(angle) - x * math.sin(angle)) * speed + phase)
        waves.append(wave)
    waves.append(torch.zeros_like(waves[0]))
    return torch.stack(waves)[classes, torch.arange(len(classes))]
