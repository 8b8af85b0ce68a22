"""The graph for a call of a block: from the graph cache, from the store, or compiled now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..cache.entry import Entry
from ..cache.graph_cache import GraphCache, NoGraph
from ..cache.lease import Lease
from ..compile import block_compiler
from ..compile.benchmark import Probe
from ..compile.compiled_graph import CompiledGraph, CompileFailed, Facts
from ..compile.row_survey import RowSurvey, silent
from ..core.compile_settings import CompileSettings
from ..core.errors import one_line
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason, elsewhere
from ..fingerprint import kinds
from ..fingerprint.graph_key import GraphKey
from ..fingerprint.survey import Region
from ..signature import tree_spec
from ..signature.tensors import tensor_spec
from .block_observer import BlockObserver


@dataclass(eq=False)
class ResolvedGraph:
    """The graph that runs calls of one shape. probe: compares it with the block; None where nobody asked for that.

    guards_made: how often the inline cache guarded such a call.
    """

    entry: Entry
    graph: CompiledGraph
    probe: Probe | None
    guards_made: int = 0

    @property
    def is_stable(self) -> bool:
        """Whether the graph is the one to run, and no call need be compared any more."""
        return self.probe is None or (self.probe.done and self.probe.verdict is None)

    @property
    def counter(self) -> Entry | Probe:
        """What counts its calls now (`hits`)."""
        return self.probe if self.probe is not None and self.probe.done else self.entry


class GraphResolver:
    """Finds, loads or compiles the graphs of one block; the arguments are those of `block_runner.BlockRunner`."""

    def __init__(
        self,
        region: Region,
        cache: GraphCache,
        settings: CompileSettings,
        interrupts: tuple[type[BaseException], ...],
        rows: RowSurvey | None,
        lease: Lease | None,
    ):
        self._region = region
        self._cache = cache
        self._settings = settings
        self._interrupts = interrupts
        self._rows = rows
        self._lease = lease

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
        region, settings = self._region, self._settings
        device = elsewhere(weights, inputs)
        if device is not None:
            # A graph would be good for this split of the weights alone, and the next prompt splits them otherwise.
            fallbacks.note(region.kind.name, Reason("weights_elsewhere", device=str(device)))
            return None
        tensors = (*weights, *inputs)
        call, values = tree_spec.without_values(spec)
        key = GraphKey(
            kind=region.kind,
            call=call,
            # The kind tells the weights as they were when the run began; they may have been moved or cast since.
            inputs=tuple(tensor_spec(tensor) for tensor in tensors),
            backend=settings.backend,
            sizes=None if settings.any_size else tuple(tensor.shape for tensor in inputs),
        )

        store, name = self._cache.store, region.kind.name
        devices = {tensor.device for tensor in tensors}

        def fits(graph: CompiledGraph) -> bool:
            return graph.facts.values == values and graph.accepts(tensors)

        def load_graph() -> CompiledGraph | None:
            def build(data: bytes, facts: Facts) -> CompiledGraph:
                template = kinds.template_of(region.block, region.wraps)
                return block_compiler.load_block(template, spec, data, facts, self._interrupts, settings.backend)

            def could_fit(facts: Facts) -> bool:
                return facts.values == values and facts.allow(tensors)

            return store and store.load(key, name, devices, build, fits, values, self._interrupts, could_fit)

        def compile_graph() -> CompiledGraph:
            if observer is not None:
                observer.settled = False
            try:
                template = kinds.template_of(region.block, region.wraps)
            except Exception as error:
                raise CompileFailed(Reason("not_copied", error=one_line(error))) from error
            growing = self._rows.growing(region.block, inputs) if self._rows and settings.any_size else None
            with silent():
                graph = block_compiler.compile_block(
                    template,
                    region.kind,
                    weights,
                    spec,
                    inputs,
                    settings.backend,
                    settings.any_size,
                    growing,
                    self._interrupts,
                    savable=store is not None,
                )
            if store is not None:
                store.save(key, name, devices, graph, self._interrupts)
            return graph

        try:
            entry, graph = self._cache.find(key, name, fits, compile_graph, self._lease, load_graph)
            return ResolvedGraph(entry, graph, entry.probe(graph, inputs) if settings.measured else None)
        except torch.OutOfMemoryError as error:
            reason = Reason("compile_out_of_memory", error=one_line(error))
        raise NoGraph(key, reason)  # outside of the handler, whose exception would keep the compiler's tensors
