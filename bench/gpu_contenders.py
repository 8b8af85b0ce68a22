"""The contenders of `bench gpu` on one model: what each one's node gives, what it compiled, captured and gave up.

Import it after `inprocess.boot` and `pack.load`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.cuda_graphs.pool import CapturePool
from comfy_accel.accel.dispatch.block_runner import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.accel.store import location
from comfy_accel.accel.store.graph_store import GraphStore
from comfy_accel.nodes import accelerate_model
from comfy_accel.nodes.compile_inputs import ANY_SIZE, RUN_EAGERLY
from comfy_accel.nodes.compile_inputs import settings as compiling

from . import deepcache, gpu_device, session
from .compilations import RecompileLimit, compiling_into, counts
from .deepcache_plan import Contender as Skipping
from .gpu_cases import (
    BLOCKS,
    CAPTURED,
    CHANNELS_LAST,
    COMPILED,
    CONTENDERS,
    CORE,
    EAGER,
    EASY_CACHE,
    NO_REPLAYS,
    SHIPPED,
)
from .report import Row

CACHE_BYTES = 24 << 30
"""Of compiled and captured graphs of one contender, where a part says no other."""

GRAPHS = "graphs"
"""Folder of saved graphs, beside inductor's."""

MOSTLY = 0.9
"""Of a contender's model calls that must be replays for it to count as CUDA graphs."""

EASY_THRESHOLD = 0.2
"""Default of core's node."""

_BLOCK_LISTS = ("double_blocks", "single_blocks", "joint_blocks", "transformer_blocks", "blocks", "layers")


class Lineup:
    """All contenders on one ModelPatcher; none finds what another compiled, but for those with a cache policy.

    These are `CAPTURED` with one more node, so they share its GraphCache, as they would in ComfyUI. `COMPILED` has one
    of its own, and traces for itself; what inductor has on disk of `CAPTURED` it finds.

    model: for `patcher`; None where only `applied` is used. backend: inductor, or eager for graphs alone.
    folder: for what inductor keeps on disk. shared: the process' own cache for `COMPILED` and `CAPTURED`, with its
    store on disk. capturer: in place of CUDA's. keeps: the first of ours saves its graphs, in `folder` / `GRAPHS`.
    """

    def __init__(
        self,
        model: Any,
        backend: str,
        folder: Path,
        limit: RecompileLimit,
        shared: GraphCache | None = None,
        capturer: Any = None,
        keeps: bool = False,
    ):
        self._model, self._backend, self._folder, self._limit = model, backend, folder, limit
        self._made: dict[str, Any] = {}
        self._gave_up: set[str] = set()
        self._network = ""
        """The model's class, under whose name captured calls are known."""
        self.blocks_cache = shared or GraphCache(max_bytes=CACHE_BYTES)
        self.cache = shared or GraphCache(max_bytes=CACHE_BYTES)
        self._keeps = keeps
        if capturer is not None:
            self.cache.captures = CapturePool(capturer)

    def patcher(self, name: str) -> Any:
        """The contender's ModelPatcher, made once."""
        if name not in self._made:
            self._made[name] = self.applied(name, self._model)
        return self._made[name]

    def applied(self, name: str, model: Any) -> Any:
        """What the contender's node, or nodes, give for this ModelPatcher."""
        self._network = type(model.model.diffusion_model).__name__
        if name in (EAGER, CORE):
            return session.node(name, self._backend)(model)
        if name == BLOCKS:
            return by_blocks(model, self._backend)
        if name == CHANNELS_LAST:
            model = channels_last(model)
        settings = CompileSettings(backend=self._backend)
        if self._keeps:
            self._keeps = False
            cache = self.blocks_cache if name in (COMPILED, SHIPPED) else self.cache
            cache.store = GraphStore(location.at(str(self._folder / GRAPHS)), None)
        if name == COMPILED:
            return accelerate(model, settings, self.blocks_cache)
        if name == SHIPPED:
            settings, graphs = as_shipped(self._backend)
            return accelerate(model, settings, self.blocks_cache, graphs=graphs)
        model = accelerate(model, settings, self.cache, graphs=True)
        if name in (CAPTURED, CHANNELS_LAST):
            return model
        if name == EASY_CACHE:
            return deepcache.apply(Skipping(deepcache.EASY_CACHE, threshold=EASY_THRESHOLD), model)
        # The interval itself is measured: what an adaptive schedule makes of random weights would say nothing.
        return apply_deep_cache(model, DeepCacheSettings(CONTENDERS[name].interval, schedule="uniform"))

    def place(self, name: str) -> Path:
        """Where inductor keeps the contender's files."""
        return self._folder / (name if name in (EAGER, CORE, BLOCKS) else "ours")

    @contextmanager
    def running(self, name: str) -> Iterator[Row]:
        """While the contender runs: inductor keeps its files where this one alone looks, and what it takes is counted.

        Yields a row that is filled when it ends: compilations and graph breaks as torch counts them, whether torch
        ever reached its recompile limit with this contender, calls of blocks that ours ran uncompiled, graphs
        captured and replayed, and why no more of them.
        """
        self._limit.heard = name in self._gave_up
        before, fell_back, graphs = counts(), fallbacks.counts(), self._graphs(name)
        row: Row = {}
        try:
            with compiling_into(self.place(name)), torch.inference_mode():  # the latter as ComfyUI runs every node
                yield row
        finally:
            if self._limit.heard:
                self._gave_up.add(name)
            spent = counts().since(before)
            blocks, calls = self._reasons(fell_back)
            row.update(
                compilations=spent.graphs,
                graph_breaks=spent.breaks,
                gave_up=self._limit.heard,
                uncompiled=sum(blocks.values()),
                captures=self._graphs(name)[0] - graphs[0],
                replays=self._graphs(name)[1] - graphs[1],
                reasons=[*blocks, *calls],
            )

    def kept_bytes(self) -> int:
        """Of the tensors that torch counts, those that captured calls keep, whoever runs."""
        pool = self.cache.captures
        if pool is None or not torch.cuda.is_available():
            return 0
        return gpu_device.private_bytes() + sum(member.buffer_bytes for member in pool.members)

    def graph_bytes(self, name: str) -> int | None:
        """Memory that captured calls hold; None for who captures none."""
        if not CONTENDERS[name].has_graphs or self.cache.captures is None:
            return None
        return self.cache.captures.nbytes

    def _graphs(self, name: str) -> tuple[int, int]:
        """Calls captured and replayed so far."""
        if not CONTENDERS[name].has_graphs:
            return 0, 0
        known = self.cache.statistics()
        return known["captures"], sum(row["hits"] for row in known["table"] if row["name"] == f"{self._network} call")

    def _reasons(self, before: dict[tuple[str, Reason], int]) -> tuple[dict[str, int], dict[str, int]]:
        """Reason → calls since then: of blocks that ran uncompiled, and of model calls that were not captured."""
        blocks: dict[str, int] = {}
        calls: dict[str, int] = {}
        for row in fallbacks.rows(since=before):
            found = calls if row["block"] == self._network else blocks
            found[row["reason"]] = found.get(row["reason"], 0) + row["calls"]
        return blocks, calls


def as_shipped(backend: str) -> tuple[CompileSettings, bool]:
    """How Accelerate Model compiles, and whether it records calls, where nobody has changed its optional inputs."""
    inputs = inspect.signature(accelerate_model.AccelModel.execute).parameters
    given = {name: inputs[name].default for name in ("check_gain", "graphs")}
    graphs = given.pop("graphs") != accelerate_model.GRAPHS[0]
    return compiling(ANY_SIZE, backend, RUN_EAGERLY, **given), graphs


def ran_as(name: str, replays: int, calls: int) -> str:
    """What a contender with graphs really ran as, by the replays among its model calls; the others as themselves."""
    if not CONTENDERS[name].has_graphs:
        return CONTENDERS[name].label
    if not replays:
        return NO_REPLAYS
    return "CUDA graphs" if replays >= MOSTLY * calls else "CUDA graphs in part"


def channels_last(model: Any) -> Any:
    """A ModelPatcher of a copy of the model, with weights of convolutions in memory as channels-last libraries want."""
    patched = model.clone()
    patched.model = copy.deepcopy(model.model, {id(model.model.current_patcher): None})
    for module in patched.model.diffusion_model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.to(memory_format=torch.channels_last)
    return patched


def by_blocks(model: Any, backend: str) -> Any:
    """A clone of the ModelPatcher whose block lists core compiles one by one, as KJNodes' node has core do it.

    With the filter of guards that today's core sets, in every core: without it each block would be compiled again for
    its place in the per-call dict.
    """
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    can_stay = "disable_dynamic" in inspect.signature(model.clone).parameters
    patched = model.clone(disable_dynamic=True) if can_stay else model.clone()
    options = {"guard_filter_fn": _no_guard_on_options}
    set_torch_compile_wrapper(model=patched, backend=backend, options=options, keys=block_keys(model))
    return patched


def block_keys(model: Any) -> list[str]:
    """Keys of a ModelPatcher's repeated blocks: its own block lists, in a UNet those of the transformers inside."""
    network = model.model.diffusion_model
    lists = {
        path: module
        for path, module in network.named_modules()
        if isinstance(module, torch.nn.ModuleList) and path.rpartition(".")[2] in _BLOCK_LISTS
    }
    own = {path: module for path, module in lists.items() if "." not in path}
    return [
        f"diffusion_model.{path}.{index}" for path, module in (own or lists).items() for index in range(len(module))
    ]


def _no_guard_on_options(guards: list) -> list[bool]:
    return ["transformer_options" not in guard.name for guard in guards]
