"""The report as an image: where the last image's time went, what was skipped, how full the cache is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.sentences import counted
from ..step_cache.run import COMPARED, HALF, SKIPPED
from .run import Run, Skipping
from .savings import together
from .text import megabytes, quality_of, seconds, size_of, skipped_of

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

WIDTH = 512
"""Pixels; legible at this size."""

_MARGIN, _BAR, _LINE = 16, 22, 20
_INK, _GREY, _PALE = "#1a1a1a", "#595959", "#d9d9d9"
BLUE, ORANGE, SKY, GREEN = "#0072b2", "#d55e00", "#56b4e9", "#009e73"
"""Okabe and Ito's palette, safe for colour-blind readers; no meaning rests on colour alone."""

_MOST_STEPS = 120

_PLOT, _BELOW, _ABOVE = 80, 8.0, 24.0
"""The plot of a quality target: height in pixels, and its range below and above the target in dB."""


def draw(run: Run | None, cache: Mapping[str, Any], psnr: float | None = None) -> Image.Image:
    """The chart in RGB, `WIDTH` pixels wide and as high as its content.

    run: the last one. cache: its statistics. psnr: dB between the image and its reference; None without one.
    """
    from PIL import Image

    # Pillow cannot grow an image: the first pass measures the height, the second draws.
    height = _Sheet(Image.new("RGB", (WIDTH, 1))).fill(run, cache, psnr)
    image = Image.new("RGB", (WIDTH, height), "white")
    _Sheet(image).fill(run, cache, psnr)
    return image


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

    def fill(self, run: Run | None, cache: Mapping[str, Any], psnr: float | None) -> int:
        """Draw everything; the height used."""
        self._write("Accel Report", self._large)
        if run is None:
            self._write("No image was made with these nodes yet.", colour=_GREY)
        else:
            self._write(f"{run.model}, {size_of(run)}", colour=_GREY)
            self._time(run)
            if run.compiling is not None:
                self._calls(run)
            if run.skipping.plan:
                self._plan(run.skipping)
            elif run.skipping.steps_taken:
                self._steps(run.skipping.steps_taken)
        self._budget(cache)
        if psnr is not None:
            self._gap()
            self._write("Equal to the reference" if psnr >= 100 else f"{psnr:.1f} dB PSNR against the reference")
        return self._y + _MARGIN

    def _time(self, run: Run) -> None:
        compiling = min(run.compile_seconds + run.load_seconds, run.seconds)
        saved = together(*run.savings)["saved_seconds"]
        parts = [(run.seconds - compiling, BLUE, "sampling"), (compiling, ORANGE, "compiling or loading")]
        if saved is not None and saved > 0:
            parts.append((saved, None, "saved"))
        self._gap()
        self._write(f"Time of the last image: {seconds(run.seconds)}" + ("" if saved else ", saving not measured"))
        self._stack([(value, colour, f"{name} {seconds(value)}") for value, colour, name in parts if value > 0])

    def _calls(self, run: Run) -> None:
        word = "traced, uncompiled" if run.is_traced else "compiled"
        parts = [(run.totals.compiled_calls, GREEN, word), (run.totals.eager_calls, _PALE, "uncompiled")]
        self._gap()
        self._write("Calls of blocks")
        self._stack([(value, colour, f"{name} {value}") for value, colour, name in parts if value])

    def _steps(self, steps: str) -> None:
        self._gap()
        self._write(f"DeepCache: {skipped_of(steps)}")
        self._step_bars(steps)
        self._legend([(BLUE, "full (high)"), *_halves(steps), (SKY, "skipped (low)")])

    def _plan(self, told: Skipping) -> None:
        """What a quality target decided: above each step's bar its estimate, below it the noise level."""
        letters, levels, decibels = zip(*told.plan, strict=True)
        self._gap()
        self._write(f"DeepCache: {skipped_of(letters)}")
        self._write(quality_of(told))
        self._estimates(letters[:_MOST_STEPS], decibels[:_MOST_STEPS], told.target_db)
        self._step_bars("".join(letters))
        shown = levels[:_MOST_STEPS]
        wide, places = self._wide(len(shown)), sorted({round(part * (len(shown) - 1) / 4) for part in range(5)})
        for place in places:
            label = f"{shown[place]:.2g}"
            left = _MARGIN + (place + 0.5) * wide - self._draw.textlength(label, self._font) / 2
            self._draw.text((max(left, _MARGIN), self._y - 2), label, fill=_GREY, font=self._font)
        self._y += _LINE
        bars = [(BLUE, "full (high)"), (BLUE, "compared too (dot)"), *_halves(letters), (SKY, "skipped (low)")]
        self._legend([*bars, (SKY, "dB by estimate"), (None, "if it had been skipped")])
        self._write("Numbers below the steps: noise level", colour=_GREY)

    def _estimates(self, letters: Sequence[str], decibels: Sequence[float | None], target: float) -> None:
        """Each step's estimate as a dot, and the target as a line. An outline is a step that was not skipped."""
        bottom, top, wide = target - _BELOW, target + _ABOVE, self._wide(len(letters))

        def height(value: float) -> float:
            return self._y + _PLOT * (top - min(max(value, bottom), top)) / (top - bottom)

        asked = height(target)
        for left in range(_MARGIN, WIDTH - _MARGIN, 8):
            self._draw.line((left, asked, left + 4, asked), fill=ORANGE)
        self._draw.text((_MARGIN, asked + 1), f"{target:g} dB asked", fill=_INK, font=self._font)
        for place, (letter, value) in enumerate(zip(letters, decibels, strict=True)):
            if value is not None:
                x, y, radius = _MARGIN + (place + 0.5) * wide, height(value), min(4.0, wide / 2)
                fill = SKY if letter == SKIPPED else "white"
                self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill, outline=_GREY)
        self._y += _PLOT + 8

    def _wide(self, steps: int) -> float:
        return (WIDTH - 2 * _MARGIN) / steps

    def _step_bars(self, steps: str) -> None:
        shown = steps[:_MOST_STEPS]
        wide = self._wide(len(shown))
        for index, step in enumerate(shown):
            left = _MARGIN + index * wide
            # A skipped step is lower as well as paler, so colour is not needed to tell.
            top = self._y + _BAR * {SKIPPED: 0.6, HALF: 0.3}.get(step, 0.0)
            box = (left, top, left + max(wide - 2, 1), self._y + _BAR)
            self._draw.rectangle(box, fill=SKY if step == SKIPPED else BLUE)
            if step == COMPARED:
                x, y, radius = left + wide / 2 - 1, self._y + _BAR / 2, min(3.0, wide / 3)
                self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill="white")
        self._y += _BAR + 4

    def _budget(self, cache: Mapping[str, Any]) -> None:
        self._gap()
        used, most = cache["bytes"], cache["max_bytes"]
        self._write(f"Graph cache: {counted(cache['graphs'], 'graph')}, {megabytes(used)} of {megabytes(most)}")
        full = WIDTH - 2 * _MARGIN
        self._box(_MARGIN, full, None)
        if most and used:
            self._box(_MARGIN, max(full * min(used / most, 1), 2), GREEN)
        self._y += _BAR

    def _stack(self, parts: list[tuple[float, str | None, str]]) -> None:
        """Bars end to end, above their legend. A bar without colour is an outline."""
        total = sum(value for value, _, _ in parts)
        if not total:
            return
        left, full = float(_MARGIN), WIDTH - 2 * _MARGIN
        for value, colour, _ in parts:
            wide = full * value / total
            self._box(left, wide, colour)
            left += wide
        self._y += _BAR + 4
        self._legend([(colour, label) for _, colour, label in parts])

    def _box(self, left: float, wide: float, colour: str | None) -> None:
        right = max(left + wide - 1, left + 1)
        self._draw.rectangle((left, self._y, right, self._y + _BAR), fill=colour, outline=colour or _GREY)

    def _legend(self, entries: list[tuple[str | None, str]]) -> None:
        x = float(_MARGIN)
        for colour, label in entries:
            wide = 18 + self._draw.textlength(label, self._font) + 18
            if x > _MARGIN and x + wide > WIDTH:
                x, self._y = float(_MARGIN), self._y + _LINE
            self._draw.rectangle((x, self._y + 4, x + 11, self._y + 15), fill=colour, outline=colour or _GREY)
            self._draw.text((x + 17, self._y), label, fill=_INK, font=self._font)
            x += wide
        self._y += _LINE

    def _write(self, text: str, font: Any = None, colour: str = _INK) -> None:
        font = font or self._font
        if self._draw.textlength(text, font) > WIDTH - 2 * _MARGIN:
            while text and self._draw.textlength(f"{text}...", font) > WIDTH - 2 * _MARGIN:
                text = text[:-1]
            text += "..."
        self._draw.text((_MARGIN, self._y), text, fill=colour, font=font)
        self._y += _LINE + (6 if font is self._large else 2)

    def _gap(self) -> None:
        self._y += 10


def _halves(letters: Sequence[str]) -> list[tuple[str, str]]:
    return [(BLUE, "half skipped (medium)")] if HALF in letters else []
