"""Images beside and above each other on one sheet, each with its label."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

MARGIN = 12
LINE = 16


def save(path: Path, columns: Sequence[Sequence[tuple[str, Image.Image]]]) -> None:
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
