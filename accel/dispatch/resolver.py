"""What runs a call of a block: a graph that is there, was kept, or is compiled now."""

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
from ..core.eager_calls import elsewhere
from ..core.errors import one_line
from ..core.fallbacks import fallbacks
from ..fingerprint import kinds
from ..fingerprint.graph_key import GraphKey
from ..fingerprint.survey import Region
from ..signature import tree_spec
from ..signature.tensors import tensor_spec
from .block_observer import BlockObserver


@dataclass(eq=False)
class Found:
    """What runs a call. probe: compares it with the block; None where nobody asked for that.

    noted: how often calls that it runs were noted as ones to recognise (`known_call`).
    """

    entry: Entry
    graph: CompiledGraph
    probe: Probe | None
    noted: int = 0

    @property
    def is_settled(self) -> bool:
        """Whether a call need not be compared any more, and the graph is the one to run."""
        return self.probe is None or (self.probe.done and self.probe.verdict is None)


class GraphFinder:
    """Finds or makes the graphs of one block; the arguments are as of `block_runner.BlockRunner`."""

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

    def find(
        self,
        spec: tree_spec.Spec,
        weights: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        observer: BlockObserver | None,
    ) -> Found | None:
        """For a call with these weights and dense inputs; None where it is to run eagerly, which is noted.

        Raises NoGraph.
        """
        region, settings = self._region, self._settings
        device = elsewhere(weights, inputs)
        if device is not None:
            # A graph would be good for this split of the weights alone, and the next prompt splits them otherwise.
            fallbacks.note(region.kind.name, f"its weights are partly on {device}, its inputs are not")
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
                raise CompileFailed(f"it cannot be copied: {one_line(error)}") from error
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
            return Found(entry, graph, entry.probe(graph, inputs) if settings.measured else None)
        except torch.OutOfMemoryError as error:
            reason = f"out of memory while compiling: {one_line(error)}"
        raise NoGraph(key, reason)  # outside of the handler, whose exception would keep the compiler's tensors
