"""The contenders of `bench gpu` on one model: what each one's node gives, and what it compiled and captured.

Import it after `inprocess.boot` and `pack.load`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.fallbacks import fallbacks, rows_of
from comfy_accel.accel.cuda_graphs.pool import CapturePool
from comfy_accel.accel.dispatch.block_runner import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.step_cache.config import QUALITIES

from . import gpu_device
from .compilations import RecompileLimit, compiling_into, counts
from .gpu_cases import CAPTURED, CONTENDERS, CORE, EAGER, NO_REPLAYS
from .report import Row
from .session import node

CACHE_BYTES = 24 << 30
"""Graph cache of one contender, where a part sets no other."""

MOSTLY = 0.9
"""Share of a contender's model calls that must be replays for it to count as CUDA graphs."""


class Lineup:
    """All contenders on one ModelPatcher.

    `CAPTURED` has a GraphCache of its own. The others of ours share one, as in ComfyUI; they find the kernels that
    inductor wrote to disk for `CAPTURED`.

    folder: where inductor keeps its files. backend: inductor, or eager to count graphs alone. capturer: instead of
    CUDA's.
    """

    def __init__(self, folder: Path, limit: RecompileLimit, backend: str, model: Any, capturer: Any = None):
        self._folder, self._limit, self._backend, self._model = folder, limit, backend, model
        self._made: dict[str, Any] = {}
        self._gave_up: set[str] = set()
        self._network = type(model.model.diffusion_model).__name__
        """Captured calls are listed under this name."""
        self.blocks_cache = GraphCache(max_bytes=CACHE_BYTES)
        self.cache = GraphCache(max_bytes=CACHE_BYTES)
        if capturer is not None:
            self.cache.captures, self.blocks_cache.captures = CapturePool(capturer), CapturePool(capturer)

    def patcher(self, name: str) -> Any:
        """The contender's ModelPatcher, which its node, or nodes, give; made once."""
        if name not in self._made:
            self._made[name] = self._applied(name)
        return self._made[name]

    def _applied(self, name: str) -> Any:
        if name in (EAGER, CORE):
            return node(name, self._backend)(self._model)
        contender = CONTENDERS[name]
        settings = CompileSettings(backend=self._backend, measured=contender.quality is not None)
        model = accelerate(self._model, settings, self._cache_of(name), graphs=contender.has_graphs)
        return apply_deep_cache(model, QUALITIES[contender.quality]) if contender.skips else model

    @contextmanager
    def running(self, name: str) -> Iterator[Row]:
        """While the contender runs, inductor keeps its files in the contender's own folder.

        Yields a row that is filled at the end: compilations and graph breaks as torch counts them, whether torch ever
        reached its recompile limit with this contender, block calls that ours ran uncompiled, graphs captured and
        replayed, and the reasons why no more of them.
        """
        self._limit.heard = name in self._gave_up
        before, fell_back, (captures, replays) = counts(), fallbacks.counts(), self._graphs(name)
        row: Row = {}
        try:
            # In inference mode, as ComfyUI runs every node.
            with compiling_into(self._folder / (name if name in (EAGER, CORE) else "ours")), torch.inference_mode():
                yield row
        finally:
            if self._limit.heard:
                self._gave_up.add(name)
            spent, now = counts().since(before), self._graphs(name)
            fallen = rows_of(fallbacks.since(fell_back))
            row.update(
                compilations=spent.graphs,
                graph_breaks=spent.breaks,
                gave_up=self._limit.heard,
                uncompiled=sum(row["calls"] for row in fallen if row["block"] != self._network),
                captures=now[0] - captures,
                replays=now[1] - replays,
                reasons=list(dict.fromkeys(row["reason"] for row in fallen)),
            )

    def kept_bytes(self) -> int:
        """Bytes of tensors that captured calls keep alive, whichever contender runs."""
        if not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "native":
            return 0
        pools = filter(None, (self.cache.captures, self.blocks_cache.captures))
        return gpu_device.private_bytes() + sum(member.buffer_bytes for pool in pools for member in pool.members)

    def graph_bytes(self, name: str) -> int | None:
        """Memory that captured calls hold; None for a contender that captures none."""
        pool = self._cache_of(name).captures
        return None if pool is None or not CONTENDERS[name].has_graphs else pool.nbytes

    def _cache_of(self, name: str) -> GraphCache:
        return self.cache if name == CAPTURED else self.blocks_cache

    def _graphs(self, name: str) -> tuple[int, int]:
        """Calls captured and replayed so far."""
        if not CONTENDERS[name].has_graphs:
            return 0, 0
        cache = self._cache_of(name)
        calls = sum(entry.calls for entry in cache.entries() if entry.name == f"{self._network} call")
        return cache.statistics()["captures"], calls


def ran_as(name: str, replays: int, calls: int) -> str:
    """What a contender with graphs really ran as, by the replays among its model calls; the label of any other."""
    if not CONTENDERS[name].has_graphs:
        return CONTENDERS[name].label
    if not replays:
        return NO_REPLAYS
    return "CUDA graphs" if replays >= MOSTLY * calls else "CUDA graphs in part"
