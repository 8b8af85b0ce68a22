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
    from PIL import Image

    image = Image.new("RGB", (WIDTH, 160 * (len(facts) + 1)), "white")  # more than a fact needs
    return image.crop((0, 0, WIDTH, _Sheet(image).fill(facts)))


class _Sheet:
    """Draws from top to bottom."""

    def __init__(self, image: Image.Image):
        from PIL import ImageDraw, ImageFont

        self._draw: ImageDraw.ImageDraw = ImageDraw.Draw(image)
        try:
            self._font, self._large = ImageFont.load_default(15), ImageFont.load_default(19)
        except (TypeError, ImportError):  # Pillow before 10.1, or without FreeType: one size, and that is small
            self._font = self._large = ImageFont.load_default()
        self._y = _MARGIN

    def fill(self, facts: Sequence[Fact]) -> int:
        """Draw everything; the height used."""
        self._write("Accel Report", self._large)
        for fact in facts:
            self._y += 8
            self._write(fact.sentence.partition("\n")[0], self._font)
            bar = [part for part in fact.bar if part.length > 0]
            if bar:
                self._stack(bar)
        return self._y + _MARGIN

    def _stack(self, bar: Sequence[Part]) -> None:
        """Parts end to end, above their names. What is gone is an outline."""
        names = list(dict.fromkeys(part.name for part in bar if not part.is_gone))
        colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
        left, scale = float(_MARGIN), (WIDTH - 2 * _MARGIN) / sum(part.length for part in bar)
        for part in bar:
            right = left + part.length * scale
            self._box((left, self._y, max(right - 2, left + 1), self._y + _BAR), colours.get(part.name))
            left = right
        self._y += _BAR + 4
        x = float(_MARGIN)
        for name in dict.fromkeys(part.name for part in bar):
            wide = 36 + self._draw.textlength(name, self._font)
            if x > _MARGIN and x + wide > WIDTH:
                x, self._y = float(_MARGIN), self._y + _LINE
            self._box((x, self._y + 4, x + 11, self._y + 15), colours.get(name))
            self._draw.text((x + 17, self._y), name, fill=_INK, font=self._font)
            x += wide
        self._y += _LINE

    def _box(self, corners: tuple[float, float, float, float], colour: str | None) -> None:
        self._draw.rectangle(corners, fill=colour, outline=colour or _GREY)

    def _write(self, text: str, font: Any) -> None:
        if self._draw.textlength(text, font) > WIDTH - 2 * _MARGIN:
            while text and self._draw.textlength(f"{text}...", font) > WIDTH - 2 * _MARGIN:
                text = text[:-1]
            text += "..."
        self._draw.text((_MARGIN, self._y), text, fill=_INK, font=font)
        self._y += _LINE + (6 if font is self._large else 2)
