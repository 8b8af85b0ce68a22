"""The report as an image: where the last image's time went, what was skipped, how full the cache is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.sentences import counted
from ..step_cache.run import SKIPPED
from .run import Run, Skipping
from .savings import together
from .text import megabytes, plan_of, seconds, size_of, skipped_of

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

WIDTH = 512
"""Pixels; legible at this size."""

_MARGIN, _BAR, _LINE = 16, 22, 20
_INK, _GREY, _PALE = "#1a1a1a", "#595959", "#d9d9d9"
BLUE, ORANGE, SKY, GREEN = "#0072b2", "#d55e00", "#56b4e9", "#009e73"
"""Okabe and Ito's palette, safe for colour-blind readers; no meaning rests on colour alone."""

_MOST_STEPS = 120


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
            if run.skipping.steps_taken:
                self._steps(run.skipping)
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

    def _steps(self, told: Skipping) -> None:
        steps = told.steps_taken
        self._gap()
        self._write(f"DeepCache: {skipped_of(steps)}")
        if told.skipped_steps and told.target_db is not None:
            self._write(plan_of(told), colour=_GREY)
        self._step_bars(steps)
        self._legend([(BLUE, "full (high)"), (SKY, "skipped (low)")])

    def _wide(self, steps: int) -> float:
        return (WIDTH - 2 * _MARGIN) / steps

    def _step_bars(self, steps: str) -> None:
        shown = steps[:_MOST_STEPS]
        wide = self._wide(len(shown))
        for index, step in enumerate(shown):
            left = _MARGIN + index * wide
            # A skipped step is lower as well as paler, so colour is not needed to tell.
            top = self._y + (_BAR * 0.6 if step == SKIPPED else 0)
            box = (left, top, left + max(wide - 2, 1), self._y + _BAR)
            self._draw.rectangle(box, fill=SKY if step == SKIPPED else BLUE)
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
