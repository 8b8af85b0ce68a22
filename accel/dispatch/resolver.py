"""The graph for a call of a block: from the graph cache, which has it loaded or compiled where it has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache.entry import Entry, Lease
from ..cache.graph_cache import GraphCache, NoGraph
from ..compile.benchmark import Benchmark, Benchmarks, Pattern
from ..compile.compiled_graph import CompiledGraph
from ..core.compile_settings import CompileSettings
from ..core.errors import one_line
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason, elsewhere
from ..fingerprint.block_call import Call
from ..fingerprint.survey import Region
from ..signature import tree_spec
from .block_observer import BlockObserver
from .graph_maker import GraphMaker


@dataclass(eq=False)
class ResolvedGraph:
    """The graph that runs calls of one shape.

    captured: the call was one of those that will be captured. benchmarks: what is known of the graph beside the block;
        None where others' code, which must not run twice, is in there. pattern: of the call's sizes.
    benchmark: times it against the block at this size; None where nobody asked for that.
    """

    entry: Entry
    graph: CompiledGraph
    captured: bool = False
    benchmarks: Benchmarks | None = None
    pattern: Pattern | None = None
    benchmark: Benchmark | None = None

    def serves(self, captured: bool) -> bool:
        """Whether it is what calls that will be captured run, or that will not: other times count for them."""
        return self.benchmark is None or self.captured == captured

    @property
    def is_compared(self) -> bool:
        """Whether the next call is run both ways."""
        return self.pattern is not None and (self.is_timed or not self.pattern.is_settled) and self.verdict is None

    @property
    def is_timed(self) -> bool:
        """Whether the next call is timed both ways."""
        return self.benchmark is not None and not self.benchmark.done

    @property
    def verdict(self) -> Reason | None:
        """Why the graph is not the one to run."""
        wrong = None if self.benchmarks is None else self.benchmarks.wrong
        return wrong or (None if self.benchmark is None else self.benchmark.verdict)

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
        lease: Lease | None,
        still: Callable[[Region], bool],
    ):
        self._cache, self._lease = cache, lease
        self._is_measured = settings.measured
        self._maker = GraphMaker(region, cache, interrupts, still)

    def resolve(self, call: Call, observer: BlockObserver | None) -> ResolvedGraph | None:
        """The graph for a call; None, with a note, where it has to run eagerly. Raises NoGraph."""
        name, maker = call.kind.name, self._maker
        device = elsewhere(call.weights, call.inputs)
        if device is not None:
            # A graph would serve only this split of the weights, and the next run splits them differently.
            fallbacks.note(name, Reason("weights_elsewhere", device=str(device)))
            return None
        code = type(maker.region.block), maker.region.codes
        if code in self._cache.stateful_blocks:
            raise NoGraph(call.key, Reason("keeps_state"))
        try:
            entry, graph = self._cache.find(
                call.key,
                name,
                lambda graph: maker.serves(graph, call),
                lambda: maker.compile(call, observer),
                self._lease,
                lambda: maker.load(call),
            )
            captured = observer is not None and observer.may_capture
            if maker.region.runs_others_code or tree_spec.runs_others_code(call.spec):
                return ResolvedGraph(entry, graph, captured)
            known = entry.benchmarks(graph)
            benchmark = known.of(call.inputs, captured) if self._is_measured else None
            dense = [one is other for one, other in zip(call.inputs, call.given, strict=True)]
            pattern = known.pattern(call.tensors if call.kind.varying else call.inputs, dense)
            return ResolvedGraph(entry, graph, captured, known, pattern, benchmark)
        except NoGraph as failed:
            if failed.reason.code == "keeps_state":
                self._cache.stateful_blocks.add(code)
            raise
        except torch.OutOfMemoryError as error:
            reason = Reason("compile_out_of_memory", error=one_line(error))
        raise NoGraph(call.key, reason)  # outside of the handler, whose exception would keep the compiler's tensors
