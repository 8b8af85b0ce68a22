"""The graph for a call of a block: from the graph cache, from the store, or compiled now."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
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


@dataclass(eq=False)
class GraphResolver:
    """Finds, loads or compiles the graphs of one block; the fields are as for `block_runner.BlockRunner`."""

    region: Region
    cache: GraphCache
    settings: CompileSettings
    interrupts: tuple[type[BaseException], ...]
    dry_run: BatchDryRun | None
    lease: Lease | None

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
        region, settings = self.region, self.settings
        device = elsewhere(weights, inputs)
        if device is not None:
            # A graph would serve only this split of the weights, and the next run splits them differently.
            fallbacks.note(region.kind.name, Reason("weights_elsewhere", device=str(device)))
            return None
        tensors = (*weights, *inputs)
        call, values = tree_spec.without_values(spec)
        key = GraphKey(
            kind=region.kind,
            call=call,
            # The kind describes the weights at the start of the run; they may have been moved or cast since.
            inputs=tuple(tensor_spec(tensor) for tensor in tensors),
            backend=settings.backend,
            sizes=None if settings.any_size else tuple(tensor.shape for tensor in inputs),
        )

        store, name = self.cache.store, region.kind.name
        devices = {tensor.device for tensor in tensors}

        def fits(graph: CompiledGraph) -> bool:
            return graph.facts.values == values and graph.accepts(tensors)

        def load_graph() -> CompiledGraph | None:
            def build(data: bytes, facts: Facts) -> CompiledGraph:
                template = kinds.template_of(region.plain(region.block, None), region.wraps)
                return block_compiler.load_block(
                    template, region.kind, spec, data, facts, self.interrupts, settings.backend
                )

            def could_fit(facts: Facts) -> bool:
                return facts.values == values and facts.allow(tensors)

            return store and store.load(key, name, devices, build, fits, values, self.interrupts, could_fit, ending)

        def compile_for(larger: Sequence[torch.Size] | None) -> CompiledGraph:
            try:
                template = kinds.template_of(region.plain(region.block, None), region.wraps)
            except Exception as error:
                raise CompileFailed(Reason("not_copied", error=one_line(error))) from error
            with silent(), self._nothing_fake_left(), region.traceable():
                return block_compiler.compile_block(
                    template,
                    region.kind,
                    weights,
                    spec,
                    inputs,
                    settings.backend,
                    settings.any_size,
                    larger,
                    self.interrupts,
                    savable=store is not None,
                )

        def compile_graph() -> CompiledGraph:
            if observer is not None:
                observer.is_stable = False
            larger = self.dry_run.larger(region.block, inputs) if self.dry_run and settings.any_size else None
            graph = compile_for(larger)
            if settings.any_size and not fits(graph):
                # The block's code fixed a size that was traced larger than it is: it is traced as it is.
                graph = compile_for([tensor.shape for tensor in inputs])
            if store is not None:
                store.save(key, name, devices, graph, self.interrupts)
            return graph

        try:
            with ExitStack() as ending:
                entry, graph = self.cache.find(key, name, fits, compile_graph, self.lease, load_graph)
            if not settings.measured and not torch_internals.is_untried():
                return ResolvedGraph(entry, graph, None)
            may_capture = observer is not None and observer.may_capture
            return ResolvedGraph(entry, graph, entry.benchmark(graph, inputs, may_capture))
        except torch.OutOfMemoryError as error:
            reason = Reason("compile_out_of_memory", error=one_line(error))
        raise NoGraph(key, reason)  # outside of the handler, whose exception would keep the compiler's tensors

    def _nothing_fake_left(self) -> AbstractContextManager:
        """Around tracing, which runs the code of weights' classes as it is: what that caches has no values there."""
        fake = torch_internals.FAKE_TENSOR.get(None)
        if fake is None or not self.region.kind.forms:
            return nullcontext()
        return global_state_restored(self.region.block, lambda value: type(value) is fake)
