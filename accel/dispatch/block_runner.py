"""A block's stand-in: finds the compiled graph for a call, or runs the block as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..cache.entry import Entry
from ..cache.graph_cache import GraphCache, NoGraph
from ..cache.lease import Lease
from ..compile.compiled_graph import CompiledGraph
from ..compile.row_survey import RowSurvey
from ..core.compile_settings import CompileSettings, Trouble
from ..core.errors import Failure
from ..core.events import emit
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason, RunEagerly, not_in_this_mode
from ..fingerprint import kinds
from ..fingerprint.survey import Region
from ..signature import tree_spec
from ..signature.tensors import dense, share_memory
from .block_observer import BlockObserver
from .inline_cache import InlineCache, call_key
from .lora import AddedWeights, with_added
from .resolver import GraphResolver, ResolvedGraph


class NotReady(RuntimeError):
    """A block would look for its graph, or make one, while a call of its model is recorded."""


class BlockRunner:
    """Stands in for one block's forward during model calls (a layer of `substitution`).

    simplify_options: what a dict among the arguments is replaced by, so that a host's per-call options
        do not reach the compiler; it raises `RunEagerly` when they concern the block.
    interrupts: exceptions that mean "stop the run" to the host, and are never swallowed.
    rows: tells sizes that are 1 because the batch is from those that always are.
    lease: what the run that the stand-in is for holds in the cache; None where there is no run.
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
        lease: Lease | None = None,
        on_shortage: Callable[[], None] = lambda: None,
    ):
        self._region = region
        self._cache = cache
        self._settings = settings
        self._simplify = simplify_options
        self._interrupts = interrupts
        self._on_shortage = on_shortage
        self._resolver = GraphResolver(region, cache, settings, interrupts, rows, lease)
        where = region.block, region.kind.weights, region.wraps
        self._slots = kinds.weight_slots(*where)
        self._wrappers = None if region.wraps is None else AddedWeights(*where)
        self._inline = InlineCache(cache, self._slots, simplify_options)
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
        tree_spec.flatten(call, tensors, self._simplify)
        return tensors

    def __call__(self, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        observer = self.observer
        if observer is not None and observer.resting:
            return inner(*args, **kwargs)
        if self._wrappers is None or self._are_bare():
            hit = self._inline.match(args, kwargs)
            if hit is not None:
                call, tensors = hit
                resolved, counter = call.resolved, call.counter
                if resolved.probe is None or resolved.probe.verdict is None:
                    counter.hits += 1
                    if observer is not None:
                        observer.used.append((resolved.entry, resolved.graph, counter))
                    return self._with_graph(resolved.graph.run, tensors, resolved, inner, args, kwargs)
        return self._call_unmatched(inner, args, kwargs)

    def _are_bare(self) -> bool:
        """Whether nothing is added to the weights in this call."""
        try:
            return not self._wrappers.now()
        except RunEagerly:
            return False

    def _call_unmatched(self, inner: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call that no guard matched: described in full."""
        inputs: list[torch.Tensor] = []
        try:
            spec = tree_spec.flatten((args, kwargs), inputs, self._simplify)
            added = () if self._wrappers is None else self._wrappers.now()
        except RunEagerly as refusal:
            return self._eagerly(inner, args, kwargs, refusal.reason, is_trouble=False)
        except tree_spec.UnsupportedArgument as why:
            return self._eagerly(inner, args, kwargs, Reason("unsupported_argument", what=str(why)))
        weights = self._slots.read()
        reason = not_in_this_mode(weights, inputs)
        if reason is not None:
            return self._eagerly(inner, args, kwargs, reason, is_trouble=False)
        given, inputs = inputs, [dense(tensor) for tensor in inputs]
        try:
            resolved, is_new = self._resolve(spec, weights, inputs)
        except NoGraph as why:
            refusal = why
        else:
            if resolved is None:
                self._count_eager()
                return inner(*args, **kwargs)
            if not is_new and resolved.is_stable:
                self._inline.guard(args, kwargs, spec, given, resolved)
            return self._run(resolved, inner, args, kwargs, spec, given, inputs, weights, added)
        self._count_eager()
        try:
            out = inner(*args, **kwargs)
        except BaseException:
            # The call itself fails, which says nothing of the block.
            self._inline.clear()
            if refusal.tried:
                self._cache.clear_failure(refusal.key)
            raise
        self._note(refusal.reason)
        return out

    def _run(self, resolved, inner, args, kwargs, spec, given, inputs, weights, added):
        entry, graph, probe = resolved.entry, resolved.graph, resolved.probe
        if graph.facts.changed and share_memory(given, graph.facts.changed):
            return self._eagerly(inner, args, kwargs, Reason("changes_shared_memory"))
        if probe is not None and probe.verdict is not None:
            return self._eagerly(inner, args, kwargs, probe.verdict, is_trouble=False)
        try:
            tensors = (*with_added(weights, added), *inputs)
        except RunEagerly as refusal:
            return self._eagerly(inner, args, kwargs, refusal.reason, is_trouble=False)
        is_compared = probe is None or probe.done
        counter = resolved.counter
        counter.hits += 1
        observer = self.observer
        if observer is not None:
            observer.used.append((entry, graph, counter))
            observer.settled &= is_compared

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            out = graph.run(tensors)
            for index in graph.facts.changed:
                if inputs[index] is not given[index]:
                    given[index].copy_(inputs[index])
            return out

        def probed(tensors: Sequence[torch.Tensor]) -> Any:
            return self._probe(graph, probe, lambda: run(tensors), inner, spec, given, inputs, tensors[0].device)

        return self._with_graph(run if is_compared else probed, tensors, resolved, inner, args, kwargs)

    def _with_graph(self, run, tensors, resolved: ResolvedGraph, inner, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What `run` makes of the tensors; the call as it is, where the graph fails."""
        try:
            return run(tensors)
        except self._interrupts:
            raise
        except Exception as error:
            if self.observer is not None and self.observer.recording:
                raise
            failure = Failure.of(error)
        # Outside of the handler, whose exception would keep the failed call's tensors.
        self._inline.clear()
        if failure.is_shortage:
            self._on_shortage()
            if resolved.probe is not None:
                resolved.probe.abandon()
        self._count_eager()
        out = inner(*args, **kwargs)
        if not failure.is_shortage:
            self._reject(resolved.entry, resolved.graph, Reason("compile_failed", error=failure.error))
        self._note(Reason("graph_failed", error=failure.error))
        return out

    def _reject(self, entry: Entry, graph: CompiledGraph, reason: Reason) -> None:
        """A graph failed where its block did not: one that was loaded is compiled anew, one compiled here is none."""
        store = self._cache.store
        if graph.saved_as is not None and store is not None and store.distrust(graph.saved_as):
            self._cache.drop_graph(entry, graph)
        else:
            entry.mark_failed(reason)

    def _probe(self, graph, probe, run, inner, spec, given, inputs, device):
        """A call run both ways, on copies where the block might change its inputs; what they become is compared too."""
        copies = [tensor.clone() for tensor in inputs]

        def compiled():
            return run(), [given[index] for index in graph.facts.changed]

        def eager():
            args, kwargs = tree_spec.rebuild(spec, copies)
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

    def _resolve(self, spec, weights, inputs) -> tuple[ResolvedGraph | None, bool]:
        """The graph for the call, None where it runs eagerly; and whether it was resolved only now."""
        is_recorded = self.observer is not None and self.observer.recording
        if not is_recorded:
            self._inline.expire()
        key = call_key(spec, weights, inputs)
        try:
            return self._inline.lookup(key), False
        except KeyError:
            pass
        if is_recorded:
            raise NotReady(f"{self._region.kind.name} ({self._region.path}) has no graph at hand")
        try:
            resolved = self._resolver.resolve(spec, weights, inputs, self.observer)
        except NoGraph:
            self._inline.add(key, None)
            raise
        self._inline.add(key, resolved)
        return resolved, True

    def _count_eager(self) -> None:
        self.eager_calls += 1
        if self.observer is not None:
            self.observer.eager_calls += 1

    def _eagerly(self, inner, args, kwargs, reason, is_trouble=True):
        self._note(reason, is_trouble)
        self._count_eager()
        return inner(*args, **kwargs)

    def _note(self, reason: Reason, is_trouble: bool = True) -> None:
        if is_trouble and self._settings.stop_on_trouble:
            raise Trouble(f"{self._region.kind.name} ({self._region.path}) cannot run compiled: {reason}")
        fallbacks.note(self._region.kind.name, reason)
