"""How to bring an image of the requested size to the size that a model takes, and back.

Integer arithmetic only; `resize` applies it to tensors. In pixels, unless a `unit` is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from .resolution import Size

HOW = ("resize", "pad edge", "pad reflect", "pad constant", "crop")
ANCHORS = ("center", *("top", "bottom", "left", "right"), *("top left", "top right", "bottom left", "bottom right"))


@dataclass(frozen=True)
class Fit:
    """The transformation of one image from `asked` to `snapped`.

    The image is resized to `scaled`. Padding then places it at (left, top) of the snapped size; cropping cuts the
    snapped size out of it at (left, top). how: one of `HOW`. anchor: one of `ANCHORS`: where the image stays, or
    which part of it.
    """

    asked: Size
    snapped: Size
    scaled: Size
    left: int = 0
    top: int = 0
    how: str = "resize"
    anchor: str = "center"

    @property
    def is_identity(self) -> bool:
        """Whether the image already has the right size."""
        return self.asked == self.snapped

    @property
    def pads(self) -> bool:
        return self.how.startswith("pad")

    def box(self, size: Size) -> tuple[int, int, int, int]:
        """(left, top, width, height) of the image inside a padded one of `size`.

        `size` is the snapped size, or another if the image was upscaled since.
        """
        if size == self.snapped:
            return self.left, self.top, self.scaled.width, self.scaled.height
        left, right = (side * size.width // self.snapped.width for side in (self.left, self.left + self.scaled.width))
        top, bottom = (side * size.height // self.snapped.height for side in (self.top, self.top + self.scaled.height))
        return left, top, max(1, right - left), max(1, bottom - top)

    def over(self, unit: int) -> Fit:
        """The same fit in elements of `unit` pixels a side; all its numbers must be multiples of `unit`."""

        def size(of: Size) -> Size:
            return Size(of.width // unit, of.height // unit)

        sizes = size(self.asked), size(self.snapped), size(self.scaled)
        return Fit(*sizes, self.left // unit, self.top // unit, self.how, self.anchor)

    def summary(self) -> str:
        """One line for people: `720×960 → 704×960, 2.2 % narrower`."""
        if self.is_identity:
            return f"{self.asked}, as asked"
        return f"{self.asked} → {self.snapped}, {self._change()}"

    def _change(self) -> str:
        words = []
        if self.scaled != self.asked and not (self.scaled == self.snapped and self.how == "resize"):
            words.append(f"resized to {self.scaled}")
        across, down = self.snapped.width - self.scaled.width, self.snapped.height - self.scaled.height
        cut = [f"{-by} px cut from the {side}" for side, by in (("width", across), ("height", down)) if by < 0]
        added = [f"{by} px added to the {side}" for side, by in (("width", across), ("height", down)) if by > 0]
        words += cut + added
        return " and ".join(words) if words else _stretch(self.asked, self.snapped)


def fit(asked: Size, snapped: Size, how: str, anchor: str = "center", unit: int = 1, multiple: int = 1) -> Fit:
    """The fit from `asked` to `snapped`.

    how: "resize" stretches. "pad ..." adds a border and never cuts, stretches or enlarges; it shrinks an image that
        is too large. "crop" cuts and never stretches or adds a border; it resizes if a side is too short, or if
        `multiple` pixels or more would be lost.
    unit: pixels that every number must be a multiple of: the latent scale, for latents.

    Raises ValueError for an unknown how or anchor.
    """
    for name, value, known in (("how", how, HOW), ("anchor", anchor, ANCHORS)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of: {', '.join(known)}.")
    if how == "resize":
        return Fit(asked, snapped, snapped, how=how, anchor=anchor)
    if how == "crop":
        scaled = _covering(asked, snapped, unit, multiple)
    else:
        scaled = _inside(asked, snapped, unit)
    left, top = _place(abs(snapped.width - scaled.width), abs(snapped.height - scaled.height), anchor, unit)
    return Fit(asked, snapped, scaled, left, top, how, anchor)


def _inside(asked: Size, snapped: Size, unit: int) -> Size:
    """The largest size within `snapped` at the aspect ratio of `asked`, and not larger than it."""
    if asked.width <= snapped.width and asked.height <= snapped.height:
        return asked
    if asked.width * snapped.height >= asked.height * snapped.width:
        return Size(snapped.width, min(snapped.height, _rounded(asked.height * snapped.width, asked.width, unit)))
    return Size(min(snapped.width, _rounded(asked.width * snapped.height, asked.height, unit)), snapped.height)


def _covering(asked: Size, snapped: Size, unit: int, multiple: int) -> Size:
    """The size at the aspect ratio of `asked` that `snapped` is cut out of."""
    if 0 <= asked.width - snapped.width < multiple and 0 <= asked.height - snapped.height < multiple:
        return asked
    if asked.width * snapped.height <= asked.height * snapped.width:
        return Size(snapped.width, max(snapped.height, _rounded(asked.height * snapped.width, asked.width, unit)))
    return Size(max(snapped.width, _rounded(asked.width * snapped.height, asked.height, unit)), snapped.height)


def _rounded(dividend: int, divisor: int, unit: int) -> int:
    """The positive multiple of `unit` nearest to the quotient."""
    return max(1, (2 * dividend + divisor * unit) // (2 * divisor * unit)) * unit


def _place(across: int, down: int, anchor: str, unit: int) -> tuple[int, int]:
    """(left, top) of a rectangle anchored in one that is wider by `across` and higher by `down` pixels."""
    left = 0 if "left" in anchor else across if "right" in anchor else across // 2
    top = 0 if "top" in anchor else down if "bottom" in anchor else down // 2
    return left // unit * unit, top // unit * unit


def _stretch(asked: Size, snapped: Size) -> str:
    sides = ((asked.width, snapped.width, "narrower", "wider"), (asked.height, snapped.height, "shorter", "taller"))
    return " and ".join(
        f"{abs(after - before) / before:.1%}".replace("%", " %") + f" {less if after < before else more}"
        for before, after, less, more in sides
        if before != after
    )
