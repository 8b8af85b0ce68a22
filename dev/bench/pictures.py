"""Pictures that measurements write: labelled images on one sheet, and curves over a common axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]

MARGIN, LINE = 12, 16
"""Of a contact sheet: pixels between images, and of a label."""

ZOOM = 4
"""Of latents' views, which are small."""

WIDTH, HEIGHT = 1000, 640
LEFT, RIGHT, TOP, BOTTOM = 70, 25, 50, 60
FINE = 2
"""Drawn so many times larger, then scaled down, for smooth lines."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#111111", "#e69f00")
"""Okabe and Ito's, which colour-blind people can tell apart."""


def contact_sheet(path: Path, columns: Sequence[Sequence[tuple[str, Image.Image]]]) -> None:
    """Write a PNG with one column per entry of `columns`, its labelled images one above the other."""
    widths = [max(max(image.width, len(label) * 7) for label, image in column) for column in columns]
    rows = max(len(column) for column in columns)
    heights = [max(column[row][1].height for column in columns if row < len(column)) for row in range(rows)]
    sheet = Image.new(
        "RGB",
        (sum(widths) + MARGIN * (len(columns) + 1), sum(heights) + (LINE + MARGIN) * rows + MARGIN),
        "white",
    )
    draw = ImageDraw.Draw(sheet)
    x = MARGIN
    for column, width in zip(columns, widths, strict=True):
        y = MARGIN
        for (label, image), height in zip(column, heights, strict=False):
            draw.text((x, y), label, fill="black")
            sheet.paste(image, (x, y + LINE))
            y += LINE + height + MARGIN
        x += width + MARGIN
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def strip(views) -> Image.Image:
    """RGB views [B, 3, H, W] in 0..1, one above the other, with a line of white between."""
    import torch

    framed = torch.nn.functional.pad(views, (0, 0, 0, 1), value=1)
    pixels = framed.permute(0, 2, 3, 1).reshape(-1, framed.shape[3], 3)[:-1]
    image = Image.fromarray((pixels * 255).round().byte().numpy())
    return image.resize((image.width * ZOOM, image.height * ZOOM), Image.Resampling.NEAREST)


def curves(path: Path, title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[Point]]) -> None:
    """Write a picture with one line per name, its points marked; points that are not finite are left out."""
    lines = {name: [point for point in points if all(map(math.isfinite, point))] for name, points in lines.items()}
    points = [point for line in lines.values() for point in line]
    if not points:
        raise ValueError("there is no point to draw")
    x_ticks, y_ticks = (ticks(min(values), max(values)) for values in zip(*points, strict=True))
    sheet = Image.new("RGB", (WIDTH * FINE, HEIGHT * FINE), "white")
    draw = ImageDraw.Draw(sheet)
    font, bold = (ImageFont.load_default(size * FINE) for size in (14, 17))

    def place(point: Point) -> Point:
        x = (point[0] - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        y = (point[1] - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return (
            (LEFT + x * (WIDTH - LEFT - RIGHT)) * FINE,
            (HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)) * FINE,
        )

    def write(x: float, y: float, text: str, anchor: str, used=font, fill="#333333") -> None:
        draw.text((x, y), text, fill=fill, font=used, anchor=anchor)

    for tick in x_ticks:
        x, y = place((tick, y_ticks[0]))
        draw.line([(x, TOP * FINE), (x, y)], fill="#dddddd", width=FINE)
        write(x, y + 6 * FINE, f"{tick:g}", "ma")
    for tick in y_ticks:
        x, y = place((x_ticks[0], tick))
        draw.line([(x, y), ((WIDTH - RIGHT) * FINE, y)], fill="#dddddd", width=FINE)
        write(x - 6 * FINE, y, f"{tick:g}", "rm")
    write(LEFT * FINE, 14 * FINE, title, "la", bold, "black")
    write(WIDTH * FINE / 2, (HEIGHT - 12) * FINE, x_label, "ms")
    write(LEFT * FINE, (TOP - 4) * FINE, y_label, "ls")
    for index, (name, curve) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        corners = [place(point) for point in sorted(curve)]
        if len(corners) > 1:
            draw.line(corners, fill=colour, width=3 * FINE, joint="curve")
        for x, y in corners:
            draw.ellipse([x - 4 * FINE, y - 4 * FINE, x + 4 * FINE, y + 4 * FINE], fill=colour)
        x, y = (LEFT + 14) * FINE, (TOP + 14 + 20 * index) * FINE
        draw.line([(x, y), (x + 26 * FINE, y)], fill=colour, width=3 * FINE)
        write(x + 34 * FINE, y, name, "lm")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).save(path, optimize=True)


def ticks(low: float, high: float, wanted: int = 8) -> list[float]:
    """Round numbers at equal distances, about `wanted` of them, from at most `low` to at least `high`."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / wanted
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(nice * magnitude for nice in (1, 2, 2.5, 5, 10) if nice * magnitude >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]
