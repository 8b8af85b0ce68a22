"""Pictures that measurements write: labelled images on one sheet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

MARGIN, LINE = 12, 16
"""Of a contact sheet: pixels between images, and of a label."""

ZOOM = 8
"""Of latents' views, which are small."""

FINE = 2
"""Drawn so many times larger, then scaled down, for smooth lines."""


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
