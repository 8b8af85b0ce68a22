"""A graph for a call of a block that has none in memory: loaded from the store, or compiled and saved there."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from ..cache.graph_cache import GraphCache, NoGraph
from ..compile import block_compiler
from ..compile.block_compiler import Tracing
from ..compile.compiled_graph import CompiledGraph, CompileFailed
from ..core import torch_internals
from ..core.errors import one_line
from ..core.events import log
from ..core.reasons import Reason
from ..fingerprint import kinds
from ..fingerprint.block_call import Call
from ..fingerprint.kept_state import code_of_others, packages_of
from ..fingerprint.survey import Region
from .block_observer import BlockObserver
from .global_state_guard import global_state_restored


@dataclass(frozen=True, eq=False)
class GraphMaker:
    """Makes the graphs of one block; the fields are as for `block_runner.BlockRunner`."""

    region: Region
    cache: GraphCache
    interrupts: tuple[type[BaseException], ...]
    still: Callable[[Region], bool]

    def serves(self, graph: CompiledGraph, call: Call) -> bool:
        """Whether the graph is right for the call; what had to be found out for that is saved with the graph."""
        known, store = graph.facts, self.cache.store
        is_right = graph.serves(call)
        if store is not None and graph.facts is not known:
            store.save_facts(graph, call.kind.name, self.interrupts)
        return is_right

    def load(self, call: Call) -> CompiledGraph | None:
        """The saved graph that serves the call; None where there is none."""
        store = self.cache.store
        if store is None:
            return None
        for saved in store.candidates(call.key, call.kind.name, call.devices, call.values, self.interrupts):
            with saved:
                if saved.facts.may_serve(call):
                    data, facts = saved.read(), saved.facts
                    how = self.interrupts, self.region.codes, self._tracing
                    graph = block_compiler.load_block(self._template(), call, data, facts, *how)
                    if graph.serves(call):
                        return saved.use(graph)
        return None

    def compile(self, call: Call, observer: BlockObserver | None) -> CompiledGraph:
        """A new graph, saved where there is a store."""
        if observer is not None:
            observer.is_stable = False
        graph = self._compiled(call)
        if call.any_size and not graph.serves(call):
            # The block's code fixed a size that was traced larger than it is: it is traced as it is.
            graph = self._compiled(call, lifts=False)
        if self.cache.store is not None:
            self.cache.store.save(call.key, call.kind.name, call.devices, graph, self.interrupts)
        return graph

    def _compiled(self, call: Call, lifts: bool = True) -> CompiledGraph:
        try:
            template = self._template()
        except Exception as error:
            raise CompileFailed(Reason("not_copied", error=one_line(error))) from error
        if not self.still(self.region):
            raise NoGraph(call.key, Reason("code_changes"))
        savable, codes, tracing = self.cache.store is not None, self.region.codes, self._tracing
        try:
            with tracing():
                graph = block_compiler.compile_block(template, call, lifts, self.interrupts, savable, codes, tracing)
        except CompileFailed as failed:
            if failed.reason.code == "compile_failed" and self.region.runs_others_code:
                log.debug("%s was not compiled around a part: %s", call.kind.name, failed.reason)
                raise CompileFailed(Reason("part_changed")) from failed
            if "Unsupported" in str(failed.reason) and any(code_of_others(codes or (), template)):
                raise CompileFailed(Reason("keeps_state")) from failed  # or does something else that torch cannot trace
            raise
        if not self.still(self.region):  # other threads run too
            raise NoGraph(call.key, Reason("code_changes"))
        return graph

    def _template(self) -> torch.nn.Module:
        region = self.region
        return kinds.template_of(region.plain(region.block), region.wraps, region.read, region.wrapped)

    @functools.cached_property
    def _tracing(self) -> Tracing:
        """Makes the context that blocks of this kind are traced in; graphs keep it, so it refers to no block."""
        packages = packages_of(self.region.block) if self.region.kind.forms else ()
        return functools.partial(_tracing, self.region.tracing, packages)


@contextmanager
def _tracing(tracing: Tracing, packages: Collection[str]) -> Iterator[None]:
    """packages: of quantised weights' classes, whose code runs as torch traces."""
    fake = torch_internals.FAKE_TENSOR.get(None)
    is_quiet = not packages or fake is None
    restored = nullcontext() if is_quiet else global_state_restored(packages, lambda value: type(value) is fake)
    with _silent(), restored, tracing():
        yield


@contextmanager
def _silent() -> Iterator[None]:
    """A context in which torch does not log errors of this thread: a trace at a larger size may meet some."""
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    thread = threading.get_ident()

    def others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    torch_log.addFilter(others)
    try:
        yield
    finally:
        torch_log.removeFilter(others)
