"""A pool of memory for CUDA graphs, whose idle memory counts as taken.

Between replays torch's allocator takes most of a graph's private pool for free, since no tensor is there; but nobody
else can have it. Programs that reckon with `reserved - active` (ComfyUI does) would load more than there is room for.
So the idle blocks are held by storages that nobody touches; a capture, which may use the blocks, lets go of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

log = logging.getLogger("accel")

_SMALL = 1 << 20
"""Bytes; up to here torch takes requests from other segments than those that these blocks are in."""


class BallastedPool:
    """Memory of one device that recordings share; each of them holds this, so it goes with the last.

    stream: on which all of them are captured, since idle blocks belong to a stream.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream):
        self.handle = torch.cuda.graph_pool_handle()
        self._device, self._stream = device, stream
        self._ballast: list[torch.UntypedStorage] = []

    def lift(self) -> None:
        """Before a capture: its blocks are free for it."""
        self._ballast.clear()

    def settle(self) -> None:
        """After a capture, whether or not it failed. Where torch refuses, the blocks count as free, as ever."""
        try:
            self._fill(idle_blocks(torch.cuda.memory_snapshot(self.handle, include_traces=False), self._device.index))
        except (AttributeError, LookupError, TypeError, RuntimeError) as error:
            self._ballast.clear()
            log.debug("idle memory of CUDA graphs counts as free: %s", error)

    def _fill(self, sizes: list[int]) -> None:
        if not sizes:
            return
        index, before = self._device.index, torch.cuda.memory_reserved(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            torch._C._cuda_beginAllocateCurrentThreadToPool(index, self.handle)
            try:
                # Storages, not tensors, which torch may be told to fill.
                self._ballast = [torch.UntypedStorage(size, device=self._device) for size in sizes]
            finally:
                torch._C._cuda_endAllocateToPool(index, self.handle)
                torch._C._cuda_releasePool(index, self.handle)
        if torch.cuda.memory_reserved(self._device) > before:
            self._ballast.clear()  # it took other memory than the idle


def idle_blocks(segments: Iterable[Mapping[str, Any]], device: int) -> list[int]:
    """Bytes of each idle block that a request of its size would get, the largest first.

    segments: as `torch.cuda.memory_snapshot` gives them for one pool.
    """
    return sorted(
        (
            block["size"]
            for segment in segments
            if segment["device"] == device
            for block in segment["blocks"]
            if block["state"] == "inactive" and block["size"] > _SMALL
        ),
        reverse=True,
    )
