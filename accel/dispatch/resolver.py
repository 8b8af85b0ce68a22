"""The graph for a call of a block: from the graph cache, which has it loaded or compiled where it has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache.entry import Entry, Lease
from ..cache.graph_cache import GraphCache, NoGraph
from ..compile.benchmark import Benchmark
from ..compile.compiled_graph import CompiledGraph
from ..core import torch_internals
from ..core.compile_settings import CompileSettings
from ..core.errors import one_line
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason, elsewhere
from ..fingerprint.block_call import Call
from ..fingerprint.survey import Region
from ..signature import tree_spec
from .batch_dry_run import BatchDryRun
from .block_observer import BlockObserver
from .graph_maker import GraphMaker


@dataclass(eq=False)
class ResolvedGraph:
    """The graph that runs calls of one shape.

    benchmark: compares it with the block at this size; None where nobody asked for that.
    captured: the call was one of those that will be captured.
    """

    entry: Entry
    graph: CompiledGraph
    benchmark: Benchmark | None
    captured: bool = False

    @property
    def is_compared(self) -> bool:
        """Whether calls are still run both ways."""
        return self.benchmark is not None and not self.benchmark.done

    @property
    def verdict(self) -> Reason | None:
        """Why the graph is not the one to run."""
        return None if self.benchmark is None else self.benchmark.verdict

    @property
    def counter(self) -> Entry | Benchmark:
        """What counts its calls now (`hits`)."""
        return self.benchmark if self.benchmark is not None and self.benchmark.done else self.entry


class GraphResolver:
    """Finds the graphs of one block; the arguments are as for `block_runner.BlockRunner`."""

    def __init__(
        self,
        region: Region,
        cache: GraphCache,
        settings: CompileSettings,
        interrupts: tuple[type[BaseException], ...],
        dry_run: BatchDryRun | None,
        lease: Lease | None,
        still: Callable[[Region], bool],
    ):
        self._cache, self._lease = cache, lease
        self._is_measured = settings.measured
        self._maker = GraphMaker(region, cache, interrupts, dry_run, still)

    def resolve(self, call: Call, observer: BlockObserver | None) -> ResolvedGraph | None:
        """The graph for a call; None, with a note, where it has to run eagerly. Raises NoGraph."""
        name, maker = call.kind.name, self._maker
        device = elsewhere(call.weights, call.inputs)
        if device is not None:
            # A graph would serve only this split of the weights, and the next run splits them differently.
            fallbacks.note(name, Reason("weights_elsewhere", device=str(device)))
            return None
        code = type(maker.region.block), maker.region.codes
        if code in self._cache.keep_state:
            raise NoGraph(call.key, Reason("keeps_state"))
        try:
            entry, graph = self._cache.find(
                call.key,
                name,
                lambda graph: graph.serves(call),
                lambda: maker.compile(call, observer),
                self._lease,
                lambda: maker.load(call),
            )
            captured = observer is not None and observer.may_capture
            is_compared = self._is_measured or torch_internals.is_untried()
            if not is_compared or maker.region.runs_others_code or tree_spec.runs_others_code(call.spec):
                return ResolvedGraph(entry, graph, None, captured)
            return ResolvedGraph(entry, graph, entry.benchmark(graph, call.inputs, captured), captured)
        except NoGraph as failed:
            if failed.reason.code == "keeps_state":
                self._cache.keep_state.add(code)
            raise
        except torch.OutOfMemoryError as error:
            reason = Reason("compile_out_of_memory", error=one_line(error))
        raise NoGraph(call.key, reason)  # outside of the handler, whose exception would keep the compiler's tensors
