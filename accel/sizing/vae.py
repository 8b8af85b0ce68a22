"""When a VAE is compiled, and when it is better left alone. Decisions alone: no VAE is touched here.

A VAE runs once per image, so compiling it pays back only over many images, and costs a probe's memory
in the one place of a workflow where memory is shortest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

POLICIES = SKIP, AUTO, COMPILE_DECODER, COMPILE_BOTH = ("skip", "auto", "compile decoder", "compile both")

DEFAULT_AFTER = 20
"""Compiling a decoder costs what it can gain in some tens of images at least."""

PROBE_ROOM = 2.0
"""Comparing a graph with its block keeps the outputs of both: so many times a decoding's memory must be free."""

_MOST_SHAPES = 256
"""Shapes that are counted; the one seen longest ago is forgotten for a new one beyond."""


@dataclass(frozen=True)
class VaePolicy:
    """What is compiled of a VAE.

    compiled: one of `POLICIES`. after: for AUTO, how many equal latents are decoded as they are before compiling.
    free_memory: give memory that the allocator merely keeps back to the device where the size changes.

    Raises:
        ValueError: naming what it must be.
    """

    compiled: str = SKIP
    after: int = DEFAULT_AFTER
    free_memory: bool = False

    def __post_init__(self) -> None:
        if self.compiled not in POLICIES:
            raise ValueError(f"the policy is {self.compiled!r}; it must be one of: {', '.join(POLICIES)}")
        if self.after < 1:
            raise ValueError(f"after is {self.after}; it must be 1 or more")

    def compiles(self, call: str) -> bool:
        """Whether a call of the VAE, by its method's name ("decode_tiled"), may ever run compiled."""
        if call.startswith("encode"):
            return self.compiled == COMPILE_BOTH
        return self.compiled != SKIP


class Repeats:
    """For AUTO: which latent shapes have come often enough, and at which memory was too short.

    One for each VAE that a node gives out.
    """

    def __init__(self, after: int):
        self._after = after
        self._seen: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._too_large: int | None = None

    def come(self, shape: Sequence[int]) -> bool:
        """Count one more latent of the shape; True if enough equal ones came before it and memory sufficed."""
        shape = tuple(shape)
        before = self._seen.pop(shape, 0)
        self._seen[shape] = before + 1
        if len(self._seen) > _MOST_SHAPES:
            self._seen.popitem(last=False)
        return before >= self._after and not self.is_too_large(shape)

    def was_short(self, shape: Sequence[int]) -> None:
        """Memory ran out at this shape: it and larger ones stay as they are from now on."""
        size = _elements(shape)
        self._too_large = size if self._too_large is None else min(size, self._too_large)

    def is_too_large(self, shape: Sequence[int]) -> bool:
        return self._too_large is not None and _elements(shape) >= self._too_large


def has_room(free: float, needed: float) -> bool:
    """Whether a call can run compiled and be compared with the plain one; both in bytes, needed by a plain call."""
    return free >= PROBE_ROOM * needed


def gives_back(
    before: Sequence[int] | None, now: Sequence[int], reserved: int, allocated: int, needed: float | None
) -> bool:
    """Whether the allocator should give back what it keeps, before a call of another size than the last.

    before, now: shapes of the last call (None: there was none) and of this one. reserved: bytes that the
    allocator holds on the device. allocated: those of them that tensors use. needed: bytes for this call; None where
    nobody knows, and then nothing is given back.
    """
    if before is None or tuple(before) == tuple(now) or needed is None:
        return False
    return reserved - allocated > needed


def one_tile(
    shape: Sequence[int], tile_x: int | None = None, tile_y: int | None = None, tile_t: int | None = None
) -> tuple[int, ...]:
    """The shape [B, C, (T,) H, W] of the largest piece that a tiled call works on; None: not cut in that direction."""
    bounded = list(shape)
    for dimension, tile in ((-1, tile_x), (-2, tile_y), (-3, tile_t if len(bounded) == 5 else None)):
        if tile is not None and len(bounded) + dimension > 1:
            bounded[dimension] = min(bounded[dimension], tile)
    return tuple(bounded)


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
