"""Facts as an image: the first line of each, above a bar of what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .facts import Fact, Part

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

WIDTH = 512
"""Pixels; legible at this size."""

_MARGIN, _BAR, _LINE = 16, 22, 20
_INK, _GREY = "#1a1a1a", "#595959"
COLOURS = BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
"""Okabe and Ito's palette, safe for colour-blind readers; no meaning rests on colour alone."""


def draw(facts: Sequence[Fact]) -> Image.Image:
    """The chart in RGB, `WIDTH` pixels wide and as high as its content."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH, 160 * (len(facts) + 1)), "white")  # more than a fact needs
    pen, y = ImageDraw.Draw(image), _MARGIN
    try:
        font, large = ImageFont.load_default(15), ImageFont.load_default(19)
    except (TypeError, ImportError):  # Pillow before 10.1, or without FreeType: one size, and that is small
        font = large = ImageFont.load_default()
    pen.text((_MARGIN, y), "Accel Report", fill=_INK, font=large)
    y += _LINE + 6
    for fact in facts:
        pen.text((_MARGIN, y + 8), _fitting(fact.sentence.partition("\n")[0], pen, font), fill=_INK, font=font)
        y += _LINE + 10
        bar = [part for part in fact.bar if part.length > 0]
        if bar:
            y = _stack(bar, pen, font, y)
    return image.crop((0, 0, WIDTH, y + _MARGIN))


def _stack(bar: Sequence[Part], pen: ImageDraw.ImageDraw, font: Any, y: int) -> int:
    """Draw the parts end to end, above their names, from y on; where they end. What is gone is an outline."""
    names = list(dict.fromkeys(part.name for part in bar if not part.is_gone))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}

    def box(name: str, *corners: float) -> None:
        pen.rectangle(corners, fill=colours.get(name), outline=colours.get(name, _GREY))

    left, scale = float(_MARGIN), (WIDTH - 2 * _MARGIN) / sum(part.length for part in bar)
    for part in bar:
        right = left + part.length * scale
        box(part.name, left, y, max(right - 2, left + 1), y + _BAR)
        left = right
    x, y = float(_MARGIN), y + _BAR + 4
    for name in dict.fromkeys(part.name for part in bar):
        wide = 36 + pen.textlength(name, font)
        if x > _MARGIN and x + wide > WIDTH:
            x, y = float(_MARGIN), y + _LINE
        box(name, x, y + 4, x + 11, y + 15)
        pen.text((x + 17, y), name, fill=_INK, font=font)
        x += wide
    return y + _LINE


def _fitting(text: str, pen: ImageDraw.ImageDraw, font: Any) -> str:
    most = WIDTH - 2 * _MARGIN
    if pen.textlength(text, font) <= most:
        return text
    while text and pen.textlength(f"{text}...", font) > most:
        text = text[:-1]
    return f"{text}..."
