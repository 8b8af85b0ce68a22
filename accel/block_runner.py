"""A block's stand-in: finds the compiled graph for a call, or runs the block as it is."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import call_spec, compilers, kinds
from .added_weights import AddedWeights, with_added
from .block_observer import BlockObserver
from .causes import one_line
from .compiled_graph import CompiledGraph, Facts
from .eager_calls import RunEagerly, elsewhere, not_in_this_mode
from .events import emit
from .fallbacks import fallbacks
from .graph_cache import Claim, GraphCache, NoGraph
from .graph_entry import Entry
from .graph_key import GraphKey, tensor_spec
from .probe import Probe
from .regions import Region
from .row_survey import RowSurvey, silent

_MAX_REMEMBERED = 64
"""Call shapes a stand-in remembers the graph of; more than one model call ever has."""

_type_and_place = operator.attrgetter("dtype", "device")


class NotReady(RuntimeError):
    """A block would look for its graph, or make one, while a call of its model is recorded."""


class Trouble(RuntimeError):
    """Raised instead of running eagerly, where the user asked to stop."""


@dataclass(frozen=True)
class CompileSettings:
    """How blocks are compiled.

    backend: a name of `compilers.BACKENDS`, or any that torch knows.
    any_size: one graph for all sizes; False makes one for each.
    stop_on_trouble: raise `Trouble` where a block would fall back to eager.
    min_repetitions: kinds with fewer blocks in the model stay eager.
    measured: compare each new graph with its block (`probe`) and give up one that does not pay.
    """

    backend: str = "inductor"
    any_size: bool = True
    stop_on_trouble: bool = False
    min_repetitions: int = 1
    measured: bool = False

    def __post_init__(self) -> None:
        if self.min_repetitions < 1:
            raise ValueError(f"min_repetitions is {self.min_repetitions}; it must be 1 or more")


@dataclass(frozen=True)
class _Found:
    """What runs a call. probe: compares it with the block; None where nobody asked for that."""

    entry: Entry
    graph: CompiledGraph
    probe: Probe | None


class BlockRunner:
    """Stands in for one block's forward during model calls (a layer of `substitution`).

    simplify_options: what a dict among the arguments is replaced by, so that a host's per-call options
        do not reach the compiler; it raises `RunEagerly` when they concern the block.
    interrupts: exceptions that mean "stop the run" to the host, and are never swallowed.
    rows: tells sizes that are 1 because the batch is from those that always are.
    claim: what the run that the stand-in is for holds in the cache; None where there is no run.
    on_shortage: told when a graph ran out of memory; the block itself runs after it.
    """

    def __init__(
        self,
        region: Region,
        cache: GraphCache,
        settings: CompileSettings,
        simplify_options: Callable[[dict], dict] | None = None,
        interrupts: tuple[type[BaseException], ...] = (),
        rows: RowSurvey | None = None,
        claim: Claim | None = None,
        on_shortage: Callable[[], None] = lambda: None,
    ):
        self._region = region
        self._cache = cache
        self._settings = settings
        self._simplify = simplify_options
        self._interrupts = interrupts
        self._rows = rows
        self._claim = claim
        self._on_shortage = on_shortage
        where = region.block, region.kind.weights, region.wraps
        self._slots = kinds.weight_slots(*where)
        self._wrappers = None if region.wraps is None else AddedWeights(*where)
        self._remembered: dict[tuple, _Found | None] = {}
        self._generation = cache.generation
        self.eager_calls = 0
        """Calls that ran without a graph."""
        self.observer: BlockObserver | None = None
        """Whoever records the whole model call that this one is part of."""

    @property
    def kind(self) -> kinds.Kind:
        return self._region.kind

    def tensors_of(self, call: tuple) -> list[torch.Tensor]:
        """The input tensors of a call (args, kwargs) of the block, as a graph gets them."""
        tensors: list[torch.Tensor] = []
        call_spec.flatten(call, tensors, self._simplify)
        return tensors

    def __call__(self, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.observer is not None and self.observer.resting:
            return inner(*args, **kwargs)
        inputs: list[torch.Tensor] = []
        try:
            spec = call_spec.flatten((args, kwargs), inputs, self._simplify)
            added = () if self._wrappers is None else self._wrappers.now()
        except RunEagerly as reason:
            return self._eagerly(inner, args, kwargs, str(reason), is_trouble=False)
        except call_spec.UnsupportedArgument as reason:
            return self._eagerly(inner, args, kwargs, f"it is called with {reason}")
        weights = self._slots.read()
        reason = not_in_this_mode(weights, inputs)
        if reason is not None:
            return self._eagerly(inner, args, kwargs, reason, is_trouble=False)
        given, inputs = inputs, [call_spec.dense(tensor) for tensor in inputs]
        try:
            found = self._look_up(spec, weights, inputs)
        except NoGraph as why:
            refusal = why
        else:
            if found is None:
                self.eager_calls += 1
                return inner(*args, **kwargs)
            return self._run(found, inner, args, kwargs, spec, given, inputs, weights, added)
        self.eager_calls += 1
        try:
            out = inner(*args, **kwargs)
        except BaseException:
            # The call itself fails, which says nothing of the block.
            self._remembered.clear()
            if refusal.tried:
                self._cache.forgive(refusal.key)
            raise
        self._note(str(refusal))
        return out

    def _run(self, found, inner, args, kwargs, spec, given, inputs, weights, added):
        entry, graph, probe = found.entry, found.graph, found.probe
        if graph.facts.changed and call_spec.share_memory(given, graph.facts.changed):
            return self._eagerly(inner, args, kwargs, "it changes an argument that shares memory with another")
        if probe is not None and probe.verdict is not None:
            return self._eagerly(inner, args, kwargs, probe.verdict, is_trouble=False)
        try:
            tensors = (*with_added(weights, added), *inputs)
        except RunEagerly as reason:
            return self._eagerly(inner, args, kwargs, str(reason), is_trouble=False)
        is_settled = probe is None or probe.done
        (probe if probe is not None and is_settled else entry).hits += 1
        observer = self.observer
        if observer is not None:
            observer.used.append((entry, graph))
            observer.settled &= is_settled

        def run() -> Any:
            out = graph.run(tensors)
            for index in graph.facts.changed:
                if inputs[index] is not given[index]:
                    given[index].copy_(inputs[index])
            return out

        try:
            if is_settled:
                return run()
            return self._probe(graph, probe, run, inner, spec, given, inputs, tensors[0].device)
        except self._interrupts:
            raise
        except Exception as error:
            if observer is not None and observer.recording:
                raise
            is_shortage = isinstance(error, torch.OutOfMemoryError)
            reason = one_line(error)
        # Outside of the handler, whose exception would keep the failed call's tensors.
        self._remembered.clear()
        if is_shortage:
            self._on_shortage()
            if probe is not None:
                probe.abandon()
        self.eager_calls += 1
        out = inner(*args, **kwargs)
        if not is_shortage:
            self._reject(entry, graph, reason)
        self._note(f"its compiled graph failed: {reason}")
        return out

    def _reject(self, entry: Entry, graph: CompiledGraph, reason: str) -> None:
        """A graph failed where its block did not: one that was loaded is compiled anew, one compiled here is none."""
        store = self._cache.store
        if graph.saved_as is not None and store is not None and store.distrust(graph.saved_as):
            self._cache.drop_graph(entry, graph)
        else:
            entry.give_up(reason)

    def _probe(self, graph, probe, run, inner, spec, given, inputs, device):
        """A call run both ways, on copies where the block might change its inputs; what they become is compared too."""
        copies = [tensor.clone() for tensor in inputs]

        def compiled():
            return run(), [given[index] for index in graph.facts.changed]

        def eager():
            args, kwargs = call_spec.rebuild(spec, copies)
            return inner(*args, **kwargs), [copies[index] for index in graph.facts.changed]

        out, changed = probe.call(compiled, eager, device)
        for index, tensor in zip(graph.facts.changed, changed, strict=True):
            if tensor is not given[index]:
                given[index].copy_(tensor)
        if probe.verdict is not None:
            fallbacks.note(self._region.kind.name, probe.verdict)
        if probe.done:
            emit("probe_end", name=self._region.kind.name, gain=probe.gain, reason=probe.verdict)
        return out

    def _look_up(self, spec, weights, inputs):
        is_recorded = self.observer is not None and self.observer.recording
        if self._generation != self._cache.generation and not is_recorded:
            self._remembered.clear()
            self._generation = self._cache.generation
        signature = (
            spec,
            tuple(map(_type_and_place, weights)),
            tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs),
        )
        try:
            return self._remembered[signature]
        except KeyError:
            pass
        if is_recorded:
            raise NotReady(f"{self._region.kind.name} ({self._region.path}) has no graph at hand")
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered.clear()
        try:
            found = self._find_or_compile(spec, weights, inputs)
        except NoGraph:
            self._remembered[signature] = None
            raise
        self._remembered[signature] = found
        self._generation = self._cache.generation
        return found

    def _find_or_compile(self, spec, weights, inputs):
        region, settings = self._region, self._settings
        device = elsewhere(weights, inputs)
        if device is not None:
            # A graph would be good for this split of the weights alone, and the next prompt splits them otherwise.
            fallbacks.note(region.kind.name, f"its weights are partly on {device}, its inputs are not")
            return None
        tensors = (*weights, *inputs)
        call, values = call_spec.without_values(spec)
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
                return compilers.load_block(template, spec, data, facts, self._interrupts)

            def could_fit(facts: Facts) -> bool:
                return facts.values == values and facts.allow(tensors)

            return store and store.load(key, name, devices, build, fits, values, self._interrupts, could_fit)

        def compile_graph() -> CompiledGraph:
            if self.observer is not None:
                self.observer.settled = False
            try:
                template = kinds.template_of(region.block, region.wraps)
            except Exception as error:
                raise compilers.CompileFailed(f"it cannot be copied: {one_line(error)}") from error
            growing = self._rows.growing(region.block, inputs) if self._rows and settings.any_size else None
            with silent():
                graph = compilers.compile_block(
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
            entry, graph = self._cache.find(key, name, fits, compile_graph, self._claim, load_graph)
            return _Found(entry, graph, entry.probe(graph, inputs) if settings.measured else None)
        except torch.OutOfMemoryError as error:
            reason = f"out of memory while compiling: {one_line(error)}"
        raise NoGraph(key, reason)  # outside of the handler, whose exception would keep the compiler's tensors

    def _eagerly(self, inner, args, kwargs, reason, is_trouble=True):
        self._note(reason, is_trouble)
        self.eager_calls += 1
        return inner(*args, **kwargs)

    def _note(self, reason: str, is_trouble: bool = True) -> None:
        if is_trouble and self._settings.stop_on_trouble:
            raise Trouble(f"{self._region.kind.name} ({self._region.path}) cannot run compiled: {reason}")
        fallbacks.note(self._region.kind.name, reason)
