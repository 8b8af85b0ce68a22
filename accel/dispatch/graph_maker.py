"""A graph for a call of a block that has none in memory: loaded from the store, or compiled and saved there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ..cache.graph_cache import GraphCache, NoGraph
from ..compile import block_compiler
from ..compile.compiled_graph import CompiledGraph, CompileFailed
from ..core import torch_internals
from ..core.errors import one_line
from ..core.events import log
from ..core.reasons import Reason
from ..fingerprint import kinds
from ..fingerprint.block_call import Call
from ..fingerprint.survey import Region
from .batch_dry_run import BatchDryRun, silent
from .block_observer import BlockObserver
from .global_state_guard import global_state_restored


@dataclass(frozen=True, eq=False)
class GraphMaker:
    """Makes the graphs of one block; the fields are as for `block_runner.BlockRunner`."""

    region: Region
    cache: GraphCache
    interrupts: tuple[type[BaseException], ...]
    dry_run: BatchDryRun | None
    still: Callable[[Region], bool]

    def load(self, call: Call) -> CompiledGraph | None:
        """The saved graph that serves the call; None where there is none."""
        store = self.cache.store
        if store is None:
            return None
        for saved in store.candidates(call.key, call.kind.name, call.devices, call.values, self.interrupts):
            with saved:
                if saved.facts.may_serve(call):
                    data, facts = saved.read(), saved.facts
                    how = self.interrupts, self.region.tracing
                    graph = block_compiler.load_block(self._template(), call, data, facts, *how)
                    if graph.serves(call):
                        return saved.use(graph)
        return None

    def compile(self, call: Call, observer: BlockObserver | None) -> CompiledGraph:
        """A new graph, saved where there is a store."""
        if observer is not None:
            observer.is_stable = False
        larger = self.dry_run.larger(self.region.block, call.inputs) if self.dry_run and call.any_size else None
        graph = self._compiled(call, larger)
        if call.any_size and not graph.serves(call):
            # The block's code fixed a size that was traced larger than it is: it is traced as it is.
            graph = self._compiled(call, [tensor.shape for tensor in call.inputs])
        if self.cache.store is not None:
            self.cache.store.save(call.key, call.kind.name, call.devices, graph, self.interrupts)
        return graph

    def _compiled(self, call: Call, larger: Sequence[torch.Size] | None) -> CompiledGraph:
        try:
            template = self._template()
        except Exception as error:
            raise CompileFailed(Reason("not_copied", error=one_line(error))) from error
        if not self.still(self.region):
            raise NoGraph(call.key, Reason("code_changes"))
        savable, codes, tracing = self.cache.store is not None, self.region.codes, self.region.tracing
        try:
            with silent(), self._nothing_fake_left(), tracing():
                graph = block_compiler.compile_block(template, call, larger, self.interrupts, savable, codes, tracing)
        except CompileFailed as failed:
            if failed.reason.code == "compile_failed" and self.region.runs_others_code:
                log.debug("%s was not compiled around a part: %s", call.kind.name, failed.reason)
                raise CompileFailed(Reason("part_changed")) from failed
            raise
        if not self.still(self.region):  # other threads run too
            raise NoGraph(call.key, Reason("code_changes"))
        return graph

    def _template(self) -> torch.nn.Module:
        region = self.region
        return kinds.template_of(region.plain(region.block, None), region.wraps, region.read, region.wrapped)

    def _nothing_fake_left(self) -> AbstractContextManager:
        """Around tracing, which runs the code of weights' classes as it is: what that caches has no values there."""
        fake = torch_internals.FAKE_TENSOR.get(None)
        if fake is None or not self.region.kind.forms:
            return nullcontext()
        return global_state_restored(self.region.block, lambda value: type(value) is fake)
