"""A memory pool for CUDA graphs whose idle blocks count as allocated.

Between replays torch's allocator counts most of a graph's private pool as free, since no tensor is in it, yet nobody
else can have it. Programs that reckon with `reserved - active` would load more than fits. So storages that nobody
touches hold the idle blocks; they are released for a capture, which may use the blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

log = logging.getLogger("accel")

_SMALL = 1 << 20
"""Bytes; torch serves requests up to this size from segments of their own."""


class BallastedPool:
    """Memory of one device that captured graphs share; each graph holds it, so it goes with the last.

    stream: on which all of them are captured, since idle blocks belong to a stream.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream):
        self.handle = torch.cuda.graph_pool_handle()
        self._device, self._stream = device, stream
        self._ballast: list[torch.UntypedStorage] = []

    def release(self) -> None:
        """Release the idle blocks, before a capture."""
        self._ballast.clear()

    def hold(self) -> None:
        """Hold the idle blocks, after a capture or a failed one. Where torch refuses, they count as free."""
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
                # Storages rather than tensors, which torch may be told to fill.
                self._ballast = [torch.UntypedStorage(size, device=self._device) for size in sizes]
            finally:
                torch._C._cuda_endAllocateToPool(index, self.handle)
                torch._C._cuda_releasePool(index, self.handle)
        if torch.cuda.memory_reserved(self._device) > before:
            self._ballast.clear()  # it took new memory rather than the idle blocks


def idle_blocks(segments: Iterable[Mapping[str, Any]], device: int) -> list[int]:
    """Bytes of each idle block that a request of its size would get, the largest first.

    segments: of one pool, from `torch.cuda.memory_snapshot`.
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
