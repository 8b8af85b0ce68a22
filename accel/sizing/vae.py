"""When to compile a VAE: the decisions, without any VAE.

A VAE runs once per image, so compiling it pays back only over many images, and benchmarking a graph takes memory
where a workflow has least to spare.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

POLICIES = SKIP, AUTO, COMPILE_DECODER, COMPILE_BOTH = ("skip", "auto", "compile decoder", "compile both")

DEFAULT_AFTER = 20
"""Compiling a decoder costs as much as it gains over some tens of images."""

PROBE_ROOM = 2.0
"""Free memory needed, as a multiple of one decode: comparing a graph with its block keeps the outputs of both."""

_MOST_SHAPES = 256
"""Shapes that are counted; beyond this, the least recently seen one is dropped."""


@dataclass(frozen=True)
class VaePolicy:
    """What to compile of a VAE.

    compiled: one of `POLICIES`. after: for AUTO, how many latents of one shape are decoded eagerly before compiling.
    free_memory: return unused memory of the allocator to the device when the size changes.

    Raises ValueError: a value is invalid; the message names the valid ones.
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
        """Whether calls of this method of the VAE ("decode_tiled") may run compiled."""
        if call.startswith("encode"):
            return self.compiled == COMPILE_BOTH
        return self.compiled != SKIP


class Repeats:
    """How often each latent shape was decoded, and at which size memory ran out; AUTO decides by it.

    One per VAE that a node returns.
    """

    def __init__(self, after: int):
        self._after = after
        self._seen: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._too_large: int | None = None

    def count(self, shape: Sequence[int]) -> bool:
        """Count a latent of this shape; True if there were enough before it and memory suffices."""
        shape = tuple(shape)
        before = self._seen.pop(shape, 0)
        self._seen[shape] = before + 1
        if len(self._seen) > _MOST_SHAPES:
            self._seen.popitem(last=False)
        return before >= self._after and not self.is_too_large(shape)

    def was_short(self, shape: Sequence[int]) -> None:
        """Memory ran out at this shape: this one and larger ones run eagerly from now on."""
        size = math.prod(shape)
        self._too_large = size if self._too_large is None else min(size, self._too_large)

    def is_too_large(self, shape: Sequence[int]) -> bool:
        return self._too_large is not None and math.prod(shape) >= self._too_large


def has_room(free: float, needed: float) -> bool:
    """Whether there is memory to run a call compiled and compare it. Bytes; needed: by an eager call."""
    return free >= PROBE_ROOM * needed


def gives_back(
    before: Sequence[int] | None, now: Sequence[int], reserved: int, allocated: int, needed: float | None
) -> bool:
    """Whether the allocator should return unused memory before a call of another size than the last.

    before, now: shapes of the last call (None if there was none) and of this one. reserved: bytes that the allocator
    has on the device. allocated: those of them that tensors use. needed: bytes for this call; None if unknown, in
    which case nothing is returned.
    """
    if before is None or tuple(before) == tuple(now) or needed is None:
        return False
    return reserved - allocated > needed


def one_tile(
    shape: Sequence[int], tile_x: int | None = None, tile_y: int | None = None, tile_t: int | None = None
) -> tuple[int, ...]:
    """The shape [B, C, (T,) H, W] of the largest tile of a tiled call. None: not tiled in that direction."""
    bounded = list(shape)
    for dimension, tile in ((-1, tile_x), (-2, tile_y), (-3, tile_t if len(bounded) == 5 else None)):
        if tile is not None and len(bounded) + dimension > 1:
            bounded[dimension] = min(bounded[dimension], tile)
    return tuple(bounded)
