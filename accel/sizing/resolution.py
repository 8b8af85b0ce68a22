"""Size arithmetic: the width and height to run a model at, given the requested ones.

Pure functions over ints. Widths and heights are in pixels unless a name says latent; the latent scale (pixels a side
per latent element) is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """A width and a height, in pixels."""

    width: int
    height: int

    def latent(self, scale: int) -> tuple[int, int]:
        """(height, width) of the latent, at `scale` pixels a side per element."""
        return self.height // scale, self.width // scale

    def __str__(self) -> str:
        return f"{self.width}×{self.height}"


def snap(asked: Size, multiple: int) -> Size:
    """The size nearest to `asked` whose sides are multiples of `multiple`, at least one each; ties go up.

    Each side is rounded by itself, so that none moves further than it must, and a size that is right is kept.
    """
    return Size(_nearest(asked.width, multiple), _nearest(asked.height, multiple))


def _nearest(side: int, multiple: int) -> int:
    return max(1, (2 * side + multiple) // (2 * multiple)) * multiple


def change(asked: Size, snapped: Size) -> str:
    """One line for people: `720×960 → 704×960, 2.2 % narrower`."""
    if asked == snapped:
        return f"{asked}, as asked"
    sides = ((asked.width, snapped.width, "narrower", "wider"), (asked.height, snapped.height, "shorter", "taller"))
    words = [
        f"{100 * abs(after - before) / before:.1f} % {less if after < before else more}"
        for before, after, less, more in sides
        if before != after
    ]
    return f"{asked} → {snapped}, {' and '.join(words)}"
