"""The graph for a call of a block: from the graph cache, which has it loaded or compiled where it has none."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ..beside.making import Beside, is_possible
from ..cache.entry import Entry, Lease
from ..cache.graph_cache import GraphCache, NoGraph
from ..compile import block_compiler
from ..compile.backend import Pending
from ..compile.benchmark import Benchmark, Benchmarks, Calls, Pattern, elements_of
from ..compile.block_compiler import Tracing
from ..compile.compiled_graph import CompiledGraph, CompileFailed
from ..core import torch_internals
from ..core.compile_settings import CompileSettings
from ..core.errors import one_line, pass_on
from ..core.events import log
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason, RunEagerly, find_other_device
from ..fingerprint import kinds
from ..fingerprint.block_call import Call
from ..fingerprint.kept_state import packages_of
from ..fingerprint.survey import Region
from ..modules.code_owner import package_of
from ..signature import tree_spec
from .block_observer import BlockObserver


@dataclass(eq=False)
class ResolvedGraph:
    """The graph that runs calls of one shape.

    captured: the call was one of those that will be captured. benchmarks: what is known of the graph beside the block;
        None where others' code, which must not run twice, is in there. pattern: of the call's sizes; None likewise.
    benchmark: times it against the block at about this size; None where nobody asked for that. elements: of the inputs.
    guards: recognise later calls of that shape (`inline_cache.GraphGuard`); none until it was compared.
    """

    entry: Entry
    graph: CompiledGraph
    captured: bool = False
    benchmarks: Benchmarks | None = None
    pattern: Pattern | None = None
    benchmark: Benchmark | None = None
    elements: int = 1
    guards: dict[tuple, Any] = field(default_factory=dict)

    def serves(self, captured: bool) -> bool:
        """Whether it is what calls that will be captured run, or that will not: other times count for them."""
        return self.benchmark is None or self.captured == captured

    @property
    def is_compared(self) -> bool:
        """Whether the next call is run both ways, or one of them in its turn."""
        return self.verdict is None and (self.is_timed or not (self.pattern is None or self.pattern.is_settled))

    @property
    def is_timed(self) -> bool:
        """Whether the next call is timed."""
        return self.benchmark is not None and not self.benchmark.done

    @property
    def verdict(self) -> Reason | None:
        """Why the graph is not the one to run."""
        wrong = None if self.benchmarks is None else self.benchmarks.wrong
        return wrong or (None if self.benchmark is None else self.benchmark.verdict)

    @property
    def counter(self) -> Entry | Calls:
        """What counts its calls now (`hits`)."""
        calls = None if self.benchmark is None else self.benchmark.find_calls(self.elements)
        return self.entry if calls is None or not self.benchmark.done else calls


class CodePending(RunEagerly):
    """A graph's code is still being made."""

    def __init__(self, pending: Pending):
        super().__init__(Reason("compiling_beside"))
        self.pending = pending


@dataclass(frozen=True)
class BlocksRun:
    """Settings, cache and callbacks that the runners of a model's blocks share in one run.

    interrupts: exceptions that mean "stop the run" to the host, and are never swallowed. ask: as for `Host`.
    lease: keeps the run's graphs in the cache; None outside of a run.
    kind_unchanged: whether the block is still of the kind that a region says.
    make: makes the runner of another region of a block; None where calls with functions run eagerly.
    """

    cache: GraphCache
    settings: CompileSettings
    lease: Lease | None = None
    interrupts: tuple[type[BaseException], ...] = ()
    ask: Callable[[], None] = lambda: None
    kind_unchanged: Callable[[Region], bool] = lambda region: True
    make: Callable[[Region], Any] | None = None


class GraphResolver:
    """Finds the graphs of one block, or makes them. run: the one that the block is called in."""

    def __init__(self, region: Region, run: BlocksRun):
        self._region, self._run = region, run
        self._cache, self._interrupts = run.cache, run.interrupts

    def resolve(self, call: Call, observer: BlockObserver | None, may_wait: bool = False) -> ResolvedGraph | None:
        """The graph for a call; None, with a note, where it has to run eagerly. may_wait: the call waits for its
        graph's code, wherever that is made. Raises NoGraph and CodePending."""
        name, region, is_beside = call.kind.name, self._region, self._run.settings.beside and not may_wait
        device = find_other_device(call.weights, call.inputs)
        if device is not None:
            # A graph would serve only this split of the weights, and the next run splits them differently.
            fallbacks.note(name, Reason("weights_elsewhere", device=str(device)))
            return None
        code = type(region.block), region.code.codes
        if code in self._cache.stateful_blocks:
            raise NoGraph(call.key, self._cache.stateful_blocks[code])
        try:
            entry, graph = self._cache.find(
                call.key,
                name,
                fits=lambda graph: self._serves(graph, call),
                compile_graph=lambda: self._compile(call, observer, is_beside),
                lease=self._run.lease,
                load_graph=lambda: self._load(call),
            )
        except NoGraph as failed:
            if failed.reason.code in ("keeps_state", "others_may_keep"):
                self._cache.stateful_blocks[code] = failed.reason
            raise
        except torch.OutOfMemoryError as error:
            reason = Reason("compile_failed", error=f"out of memory: {one_line(error)}")
        else:
            if graph.pending is not None and not self._take_code(call, entry, graph, is_beside):
                return self.resolve(call, observer, may_wait=True)
            return self._make_resolved(call, entry, graph, observer is not None and observer.may_capture)
        raise NoGraph(call.key, reason)  # outside of the handler, whose exception would keep the compiler's tensors

    def _take_code(self, call: Call, entry: Entry, graph: CompiledGraph, is_beside: bool) -> bool:
        """Whether the graph runs this call, once its code is there. Raises CodePending."""
        pending = graph.pending
        while pending is not None and not pending.is_done:
            if is_beside:
                raise CodePending(pending)
            self._run.ask()
            time.sleep(0.2)
        try:
            with entry.busy:  # nobody asks now what the graph is right for
                if graph.pending is None:
                    return graph.serves(call)  # another thread has taken it
                block_compiler.take_code(graph, call.devices)
        except Exception as error:
            pass_on(error, self._interrupts)
            log.warning("%s is compiled while the image waits: %s", call.kind.name, one_line(error))
            self._cache.drop_graph(entry, graph)
            return False
        self._cache.has_grown(entry, graph)
        log.info("%s runs compiled from now on.", call.kind.name)
        self._save(call, graph)
        return graph.serves(call)

    def _save(self, call: Call, graph: CompiledGraph) -> None:
        if self._cache.store is not None:
            self._cache.store.save(call.key, call.kind.name, call.devices, graph, self._interrupts)

    def _make_resolved(self, call: Call, entry: Entry, graph: CompiledGraph, captured: bool) -> ResolvedGraph:
        known, elements = entry.benchmarks(graph), elements_of(call.inputs)
        one_way = self._region.runs_others_code or tree_spec.runs_others_code(call.spec)
        benchmark = known.get_or_create(call.inputs, captured, one_way) if self._run.settings.measured else None
        if one_way:
            return ResolvedGraph(entry, graph, captured, benchmark=benchmark, elements=elements)
        dense = [one is other for one, other in zip(call.inputs, call.given, strict=True)]
        pattern = known.pattern(call.tensors if call.kind.varying else call.inputs, dense)
        return ResolvedGraph(entry, graph, captured, known, pattern, benchmark, elements)

    def _serves(self, graph: CompiledGraph, call: Call) -> bool:
        """Whether the graph is right for the call; what had to be found out for that is saved with the graph."""
        known, store = graph.facts, self._cache.store
        is_right = graph.serves(call)
        if store is not None and graph.facts is not known:
            store.save_facts(graph, call.kind.name, self._interrupts)
        return is_right

    def _load(self, call: Call) -> CompiledGraph | None:
        """The saved graph that serves the call; None where there is none."""
        store = self._cache.store
        if store is None:
            return None
        for saved in store.candidates(call.key, call.kind.name, call.devices, call.values, self._interrupts):
            with saved:
                if saved.facts.values == call.values and saved.facts.allow(call.tensors):
                    graph = block_compiler.load_block(
                        self._template(),
                        call,
                        saved.read(),
                        saved.facts,
                        interrupts=self._interrupts,
                        code=self._region.code,
                        tracing=self._tracing,
                    )
                    if graph.serves(call):
                        return saved.use(graph)
        return None

    def _compile(self, call: Call, observer: BlockObserver | None, is_beside: bool) -> CompiledGraph:
        """A new graph, saved where there is a store."""
        if observer is not None:
            observer.is_stable = False
        is_beside = is_beside and call.backend == "inductor" and is_possible()
        graph = self._compile_block(call, is_beside)
        if call.any_size and not graph.serves(call):
            # The block's code fixed a size that was traced larger than it is: it is traced as it is.
            graph = self._compile_block(call, is_beside, lifts=False)
        if graph.pending is None:
            self._save(call, graph)
        elif self._cache.store is not None:  # torch may be set otherwise when its code is there
            self._cache.store.identify(call.key, call.kind.name, call.devices, graph)
        return graph

    def _compile_block(self, call: Call, is_beside: bool, lifts: bool = True) -> CompiledGraph:
        try:
            template = self._template()
        except Exception as error:
            raise CompileFailed(Reason("compile_failed", error=one_line(error))) from error
        if not self._run.kind_unchanged(self._region):
            raise NoGraph(call.key, Reason("code_changes"))
        try:
            with self._tracing():
                graph = block_compiler.compile_block(
                    template,
                    call,
                    lifts,
                    interrupts=self._interrupts,
                    savable=self._cache.store is not None,
                    code=self._region.code,
                    tracing=self._tracing,
                    compiler=Beside(call.backend) if is_beside else None,
                )
        except CompileFailed as failed:
            if failed.is_of_compiler and self._region.runs_others_code:
                log.debug("%s was not compiled around a part: %s", call.kind.name, failed.reason)
                raise CompileFailed(Reason("part_changed")) from failed
            raise
        if not self._run.kind_unchanged(self._region):  # other threads run too
            raise NoGraph(call.key, Reason("code_changes"))
        return graph

    def _template(self) -> torch.nn.Module:
        region = self._region
        return kinds.template_of(region.context.plain(region.block), region.context.wraps, region.read, region.wrapped)

    @functools.cached_property
    def _tracing(self) -> Tracing:
        """Makes the context that blocks of this kind are traced in; graphs keep it, so it refers to no block."""
        packages = packages_of(self._region.block) if self._region.kind.forms else ()
        return functools.partial(_clean_type_tables, functools.partial(self._region.context.traceable, True), packages)


@contextmanager
def tables_restored(packages: Collection[str], foreign: Callable[[Any], bool]) -> Iterator[None]:
    """A context after which no global table (dict) of these packages has a foreign value, or a tuple with one.

    Torch runs the code of quantised weights' classes as it traces. What that keeps by size and device (a Hadamard
    matrix, a workspace) must not be there for the next real call to find. foreign: whether a value must not stay.
    """
    try:
        yield
    finally:
        modules = sys.modules.copy().items()  # collecting garbage may drop generated code
        own = [list(vars(module).values()) for name, module in modules if package_of(name) in packages]
        for table in [value for values in own for value in values if type(value) is dict]:
            for key, value in list(table.items()):
                if any(map(foreign, value if type(value) is tuple else (value,))):
                    del table[key]


@contextmanager
def _clean_type_tables(tracing: Tracing, packages: Collection[str]) -> Iterator[None]:
    """A context that leaves nothing of a trace in the tables of quantised weights' classes, which are of these
    packages."""
    fake = torch_internals.FAKE_TENSOR.get(None)
    restored = tables_restored(packages, lambda value: type(value) is fake) if packages and fake else nullcontext()
    # A trace at a larger size may meet errors, which torch would log.
    torch_log, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    torch_log.addFilter(is_of_others)
    try:
        with restored, tracing():
            yield
    finally:
        torch_log.removeFilter(is_of_others)
