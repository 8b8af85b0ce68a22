"""The graph for a call of a block: from the graph cache, from the store, or compiled now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ..cache.entry import Entry, Lease
from ..cache.graph_cache import GraphCache, NoGraph
from ..compile import block_compiler
from ..compile.benchmark import Benchmark
from ..compile.compiled_graph import CompiledGraph, CompileFailed, Facts
from ..core import torch_internals
from ..core.compile_settings import CompileSettings
from ..core.errors import one_line
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason, elsewhere
from ..fingerprint import kinds
from ..fingerprint.kinds import GraphKey
from ..fingerprint.survey import Region
from ..signature import tree_spec
from ..signature.tensors import tensor_spec
from .batch_dry_run import BatchDryRun, silent
from .block_observer import BlockObserver
from .global_state_guard import global_state_restored


@dataclass(eq=False)
class ResolvedGraph:
    """The graph that runs calls of one shape.

    benchmark: compares it with the block at this size; None where nobody asked for that.
    guards_made: how often the inline cache guarded such a call.
    """

    entry: Entry
    graph: CompiledGraph
    benchmark: Benchmark | None
    guards_made: int = 0

    @property
    def is_stable(self) -> bool:
        """Whether the graph is the one to run, and no call need be compared any more."""
        return self.benchmark is None or (self.benchmark.done and self.benchmark.verdict is None)

    @property
    def counter(self) -> Entry | Benchmark:
        """What counts its calls now (`hits`)."""
        return self.benchmark if self.benchmark is not None and self.benchmark.done else self.entry


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of the block, and which graphs serve it.

    tensors: weights, then inputs. key: of the graphs' entry.
    values: the numbers and texts among the arguments, which a graph has compiled in.
    """

    spec: tree_spec.Spec
    weights: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    tensors: tuple[torch.Tensor, ...]
    key: GraphKey
    values: tuple[str, ...]

    @property
    def devices(self) -> set[torch.device]:
        return {tensor.device for tensor in self.tensors}

    def could_fit(self, facts: Facts) -> bool:
        return facts.values == self.values and facts.allow(self.tensors)

    def fits(self, graph: CompiledGraph) -> bool:
        return graph.facts.values == self.values and graph.accepts(self.tensors)


@dataclass(eq=False)
class GraphResolver:
    """Finds, loads or compiles the graphs of one block; the fields are as for `block_runner.BlockRunner`."""

    region: Region
    cache: GraphCache
    settings: CompileSettings
    interrupts: tuple[type[BaseException], ...]
    dry_run: BatchDryRun | None
    lease: Lease | None
    still: Callable[[Region], bool] = lambda region: True

    def resolve(
        self,
        spec: tree_spec.Spec,
        weights: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        observer: BlockObserver | None,
    ) -> ResolvedGraph | None:
        """The graph for a call with these weights and dense inputs; None, with a note, where it has to run eagerly.

        Raises NoGraph.
        """
        name = self.region.kind.name
        device = elsewhere(weights, inputs)
        if device is not None:
            # A graph would serve only this split of the weights, and the next run splits them differently.
            fallbacks.note(name, Reason("weights_elsewhere", device=str(device)))
            return None
        call = self._call(spec, weights, inputs)
        try:
            made, loaded = lambda: self._compiled(call, observer), lambda: self._loaded(call)
            entry, graph = self.cache.find(call.key, name, call.fits, made, self.lease, loaded)
            if not self.settings.measured and not torch_internals.is_untried():
                return ResolvedGraph(entry, graph, None)
            may_capture = observer is not None and observer.may_capture
            return ResolvedGraph(entry, graph, entry.benchmark(graph, inputs, may_capture))
        except torch.OutOfMemoryError as error:
            reason = Reason("compile_out_of_memory", error=one_line(error))
        raise NoGraph(call.key, reason)  # outside of the handler, whose exception would keep the compiler's tensors

    def _call(self, spec: tree_spec.Spec, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> _Call:
        call, values = tree_spec.without_values(spec)
        tensors = (*weights, *inputs)
        key = GraphKey(
            kind=self.region.kind,
            call=call,
            # The kind describes the weights at the start of the run; they may have been moved or cast since.
            inputs=tuple(tensor_spec(tensor) for tensor in tensors),
            backend=self.settings.backend,
            sizes=None if self.settings.any_size else tuple(tensor.shape for tensor in inputs),
        )
        return _Call(spec, weights, inputs, tensors, key, values)

    def _loaded(self, call: _Call) -> CompiledGraph | None:
        kind, store = self.region.kind, self.cache.store
        if store is None:
            return None

        def build(data: bytes, facts: Facts) -> CompiledGraph:
            return block_compiler.load_block(
                self._template(), kind, call.spec, data, facts, self.interrupts, self.settings.backend
            )

        return store.load(
            call.key, kind.name, call.devices, build, call.fits, call.values, self.interrupts, call.could_fit
        )

    def _compiled(self, call: _Call, observer: BlockObserver | None) -> CompiledGraph:
        """A new graph, saved where there is a store."""
        store, any_size = self.cache.store, self.settings.any_size
        if observer is not None:
            observer.is_stable = False
        larger = self.dry_run.larger(self.region.block, call.inputs) if self.dry_run and any_size else None
        graph = self._compiled_for(call, larger, savable=store is not None)
        if any_size and not call.fits(graph):
            # The block's code fixed a size that was traced larger than it is: it is traced as it is.
            graph = self._compiled_for(call, [tensor.shape for tensor in call.inputs], savable=store is not None)
        if store is not None:
            store.save(call.key, self.region.kind.name, call.devices, graph, self.interrupts)
        return graph

    def _compiled_for(self, call: _Call, larger: Sequence[torch.Size] | None, savable: bool) -> CompiledGraph:
        try:
            template = self._template()
        except Exception as error:
            raise CompileFailed(Reason("not_copied", error=one_line(error))) from error
        if not self.still(self.region):
            raise NoGraph(call.key, Reason("code_changes"))
        with silent(), self._nothing_fake_left(), self.region.traceable():
            graph = block_compiler.compile_block(
                template,
                self.region.kind,
                call.weights,
                call.spec,
                call.inputs,
                self.settings.backend,
                self.settings.any_size,
                larger,
                self.interrupts,
                savable,
                self.region.codes,
            )
        if not self.still(self.region):  # other threads run too
            raise NoGraph(call.key, Reason("code_changes"))
        return graph

    def _template(self) -> torch.nn.Module:
        return kinds.template_of(self.region.plain(self.region.block, None), self.region.wraps)

    def _nothing_fake_left(self) -> AbstractContextManager:
        """Around tracing, which runs the code of weights' classes as it is: what that caches has no values there."""
        fake = torch_internals.FAKE_TENSOR.get(None)
        if fake is None or not self.region.kind.forms:
            return nullcontext()
        return global_state_restored(self.region.block, lambda value: type(value) is fake)
