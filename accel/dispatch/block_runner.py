"""A block's stand-in: runs each call with its compiled graph, or eagerly where it has none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..cache.entry import Entry, Lease
from ..cache.graph_cache import GraphCache, NoGraph
from ..compile.compiled_graph import CompiledGraph
from ..core.compile_settings import CompileSettings, Trouble
from ..core.errors import Failure
from ..core.events import emit
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason, RunEagerly, not_in_this_mode
from ..fingerprint import kinds
from ..fingerprint.survey import Region
from ..modules.streamed_weights import WeightSource
from ..modules.substitution import Apart
from ..signature import tree_spec
from ..signature.tensors import dense, share_memory
from .batch_dry_run import BatchDryRun
from .block_observer import BlockObserver
from .current_code import CurrentCode
from .inline_cache import InlineCache, call_key
from .lora import Added, AddedWeights, with_added
from .resolver import GraphResolver, ResolvedGraph


class NotReady(RuntimeError):
    """A block would have to look up or compile its graph while a call of its model is captured."""


class BlockRunner:
    """Stands in for one block's forward during model calls (a layer of `substitution`).

    simplify_options: what a dict among the arguments is replaced by, so that a host's per-call options do not reach
        the compiler; it raises `RunEagerly` when they concern the block.
    interrupts: exceptions that mean "stop the run" to the host, and are never swallowed.
    dry_run: tells sizes that are 1 because the batch is from those that always are.
    lease: keeps the run's graphs in the cache; None outside of a run.
    on_shortage: called when a graph ran out of memory, before the block runs eagerly.
    source: of the block's weights, where these are not in place.
    still: whether the block is still of the kind that its region says.
    """

    for_own_alone = True

    def __init__(
        self,
        region: Region,
        cache: GraphCache,
        settings: CompileSettings,
        simplify_options: Callable[[dict], dict] | None = None,
        interrupts: tuple[type[BaseException], ...] = (),
        dry_run: BatchDryRun | None = None,
        lease: Lease | None = None,
        on_shortage: Callable[[], None] = lambda: None,
        source: WeightSource | None = None,
        still: Callable[[Region], bool] = lambda region: True,
    ):
        self._region = region
        self._cache = cache
        self._settings = settings
        self._simplify = simplify_options
        self._interrupts = interrupts
        self._on_shortage = on_shortage
        self._resolver = GraphResolver(region, cache, settings, interrupts, dry_run, lease, still)
        kind, wraps = region.kind, region.wraps
        self._weights = source or kinds.weight_slots(region.block, kind.weights, wraps, kind.forms)
        self._lora = None if wraps is None else AddedWeights(region.block, kind.tensors, wraps)
        self._inline = InlineCache(cache, self._weights, simplify_options)
        self.eager_calls = 0
        """Calls that ran without a graph."""
        self.observer: BlockObserver | None = None
        """Set while whole model calls are captured."""
        self.code: CurrentCode | None = None
        self.instead: BlockRunner | Reason | None = None
        """As of `current_code.InPlace`, of the runner that is in place."""
        self._passing: object = None

    @property
    def kind(self) -> kinds.Kind:
        return self._region.kind

    def tensors_of(self, call: tuple) -> list[torch.Tensor]:
        """The input tensors of a call (args, kwargs) of the block, as its graph takes them."""
        tensors: list[torch.Tensor] = []
        tree_spec.flatten(call, tensors, self._simplify)
        return tensors

    def __call__(self, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        observer = self.observer
        if observer is not None and observer.runs_eagerly:
            return inner(*args, **kwargs)
        code = self.code
        if code is not None:
            if code.is_due or self._passing is code.passing:
                code.compare(self._region.block, self._passing is code.passing)
            self._passing = code.passing
            if self.instead is not None:
                return self._call_instead(self.instead, inner, args, kwargs)
        if self._lora is None or self._are_bare():
            hit = self._inline.match(args, kwargs)
            if hit is not None:
                call, tensors = hit
                resolved, counter = call.resolved, call.counter
                if resolved.benchmark is None or resolved.benchmark.verdict is None:
                    counter.hits += 1
                    if observer is not None:
                        observer.used.append((resolved.entry, resolved.graph, counter))
                    try:
                        return resolved.graph.run(tensors)
                    except Exception as error:
                        failure = self._failure_of(error)
                    del hit, tensors  # the block may bring its weights itself
                    return self._recover(failure, resolved, inner, args, kwargs)
        return self._call_unmatched(inner, args, kwargs)

    def _call_instead(self, other: BlockRunner | Reason, inner: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if isinstance(other, Reason):
            return self._eagerly(inner, args, kwargs, other, is_trouble=False)
        other.observer, before = self.observer, other.eager_calls
        try:
            return other(inner, *args, **kwargs)
        finally:
            self.eager_calls += other.eager_calls - before

    def _are_bare(self) -> bool:
        """Whether nothing is added to the weights in this call."""
        try:
            return not self._lora.read()
        except RunEagerly:
            return False

    @torch.compiler.disable
    def _call_unmatched(self, inner: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call that no guard matched: described in full, and looked up or resolved.

        Not for Dynamo: where the whole model is compiled too it would trace the compiler.
        """
        inputs: list[torch.Tensor] = []
        try:
            spec = tree_spec.flatten((args, kwargs), inputs, self._simplify)
            verdict = self._inline.verdict(spec, inputs)
            if verdict is not None:
                raise RunEagerly(verdict)
            added = () if self._lora is None else self._lora.read()
            weights = self._weights.take(inputs)
            if any(weight is None for weight in weights):  # taken away since
                raise RunEagerly(Reason("code_changes"))
        except RunEagerly as refusal:
            return self._eagerly(inner, args, kwargs, refusal.reason, is_trouble=False)
        except tree_spec.UnsupportedArgument as why:
            return self._eagerly(inner, args, kwargs, Reason("unsupported_argument", what=str(why)))
        reason = not_in_this_mode(weights, inputs)
        if reason is not None:
            return self._eagerly(inner, args, kwargs, reason, is_trouble=False)
        given, inputs = inputs, [dense(tensor) for tensor in inputs]
        device = next((tensor.device for tensor in (*weights, *inputs)), torch.device("cpu"))
        try:
            resolved, is_new = self._resolve(spec, weights, inputs)
        except NoGraph as why:
            refusal = why.with_traceback(None)
            del weights
        else:
            del weights
            if resolved is None:
                self._count_eager()
                return inner(*args, **kwargs)
            if not is_new and resolved.is_stable:
                self._inline.guard(args, kwargs, spec, given, resolved)
            return self._run(resolved, inner, args, kwargs, spec, given, inputs, added, device)
        self._count_eager()
        try:
            out = inner(*args, **kwargs)
        except BaseException:
            # The call itself is wrong, which says nothing of the block.
            self._inline.clear()
            if refusal.tried:
                self._cache.clear_failure(refusal.key)
            raise
        self._note(refusal.reason)
        return out

    def _run(self, resolved, inner, args, kwargs, spec, given, inputs, added, device):
        entry, graph, benchmark = resolved.entry, resolved.graph, resolved.benchmark
        if graph.facts.changed and share_memory(given, graph.facts.changed):
            return self._eagerly(inner, args, kwargs, Reason("changes_shared_memory"))
        if benchmark is not None and benchmark.verdict is not None:
            self._inline.add_verdict(spec, given, benchmark.verdict)
            return self._eagerly(inner, args, kwargs, benchmark.verdict, is_trouble=False)
        is_compared = benchmark is None or benchmark.done

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            out = graph.run(tensors)
            for index in graph.facts.changed:
                if inputs[index] is not given[index]:
                    given[index].copy_(inputs[index])
                    out = _replaced(out, inputs[index], given[index])
            return out

        try:
            compiled = self._call_of(run, inputs, added, again=not is_compared)
        except RunEagerly as refusal:
            return self._eagerly(inner, args, kwargs, refusal.reason, is_trouble=False)
        counter = resolved.counter
        counter.hits += 1
        observer = self.observer
        if observer is not None:
            observer.used.append((entry, graph, counter))
            observer.is_stable &= is_compared

        try:
            if is_compared:
                return compiled()
            return self._compare(graph, benchmark, compiled, inner, spec, given, inputs, device)
        except RunEagerly as refusal:  # streamed weights that could not be taken once more, which says nothing of it
            failure = refusal.reason
        except Exception as error:
            failure = self._failure_of(error)
        del compiled  # and the weights in it: the block may bring them itself
        if isinstance(failure, Reason):
            return self._eagerly(inner, args, kwargs, failure, is_trouble=False)
        return self._recover(failure, resolved, inner, args, kwargs)

    def _failure_of(self, error: Exception) -> Failure:
        """Why a graph failed; raises the error again where it stops the run, or ends a capture."""
        if isinstance(error, self._interrupts) or (self.observer is not None and self.observer.capturing):
            raise error
        return Failure.of(error)

    def _recover(self, failure: Failure, resolved: ResolvedGraph, inner: Callable, args: tuple, kwargs: dict) -> Any:
        """Run the call eagerly after its graph failed. Not in the handler, whose exception would keep tensors alive."""
        self._inline.clear()
        if failure.is_shortage:
            self._on_shortage()
            if resolved.benchmark is not None:
                resolved.benchmark.done = True  # without a verdict
        self._count_eager()
        out = inner(*args, **kwargs)
        if not failure.is_shortage:
            self._reject(resolved.entry, resolved.graph, Reason("compile_failed", error=failure.error))
        self._note(Reason("graph_failed", error=failure.error))
        return out

    def _reject(self, entry: Entry, graph: CompiledGraph, reason: Reason) -> None:
        """Drop a graph that failed where its block did not; a loaded one is compiled anew, a compiled one is not."""
        store = self._cache.store
        if graph.saved_as is not None and store is not None and store.distrust(graph.saved_as):
            self._cache.drop_graph(entry, graph)
        else:
            entry.mark_failed(reason)

    def _compare(self, graph, benchmark, call, inner, spec, given, inputs, device):
        """The call run both ways, the block on copies of its inputs; inputs that it changes are compared too."""
        copies = [tensor.clone() for tensor in inputs]

        def compiled():
            return call(), [given[index] for index in graph.facts.changed]

        def eager():
            args, kwargs = tree_spec.rebuild(spec, copies)
            return inner(*args, **kwargs), [copies[index] for index in graph.facts.changed]

        may_capture = self.observer is not None and self.observer.may_capture
        out, changed = benchmark.call(compiled, eager, device, captured=may_capture)
        for index, tensor in zip(graph.facts.changed, changed, strict=True):
            if tensor is not given[index]:
                given[index].copy_(tensor)
                out = _replaced(out, tensor, given[index])
        # A capture waits for the verdict, and with one round a call the few steps of a distilled model would pass.
        while may_capture and not benchmark.done and not graph.facts.changed:
            benchmark.call(compiled, eager, device, captured=True)
        if benchmark.verdict is not None:
            fallbacks.note(self._region.kind.name, benchmark.verdict)
        if benchmark.done:
            emit("probe_end", name=self._region.kind.name, gain=benchmark.gain, reason=benchmark.verdict)
        return out

    def _call_of(
        self, run: Callable[[Sequence[torch.Tensor]], Any], inputs: Sequence[torch.Tensor], added: Added, again: bool
    ) -> Callable[[], Any]:
        """The call of a graph on the block's weights and these inputs. again: eager calls come in between.

        Raises RunEagerly, and so does the call.
        """
        return functools.partial(run, (*with_added(self._weights.take(inputs), added), *inputs))

    def _resolve(self, spec, weights, inputs) -> tuple[ResolvedGraph | None, bool]:
        """The graph for the call, None where it runs eagerly; and whether it was resolved only now."""
        is_capturing = self.observer is not None and self.observer.capturing
        if not is_capturing:
            self._inline.expire()
        key = call_key(spec, weights, inputs)
        try:
            return self._inline.lookup(key), False
        except KeyError:
            pass
        if is_capturing:
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


def _replaced(out: Any, one: torch.Tensor, other: torch.Tensor) -> Any:
    """The output with one tensor in another's place: a block that hands back what it was given hands back that one."""
    if type(out) in (tuple, list):
        return type(out)(_replaced(part, one, other) for part in out)
    return other if out is one else out


class ApartRunner(BlockRunner):
    """A BlockRunner for a host that wants what it does apart from the model's own work, as where it keeps account of
    the model's memory: all of a call, so that nothing is made on one side and freed on the other."""

    def __init__(self, apart: Apart, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._apart = apart

    def __call__(self, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            context = self._apart()
        except RunEagerly as refusal:
            reason = refusal.reason
        else:
            with context:
                return super().__call__(inner, *args, **kwargs)
        return self._eagerly(inner, args, kwargs, reason, is_trouble=False)


class StreamedBlockRunner(BlockRunner):
    """The stand-in of a block whose weights are taken for each call of its graph, and released before an eager one.

    Eager, the block brings its weights to the device layer by layer, as the host has it do.
    """

    def __call__(self, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        def eager(*args: Any, **kwargs: Any) -> Any:
            self._weights.release()
            return inner(*args, **kwargs)

        try:
            return super().__call__(eager, *args, **kwargs)
        finally:
            self._weights.release()

    def _call_of(
        self, run: Callable[[Sequence[torch.Tensor]], Any], inputs: Sequence[torch.Tensor], added: Added, again: bool
    ) -> Callable[[], Any]:
        if not again:
            return super()._call_of(run, inputs, added, again)
        self._weights.release()  # either way includes the cost of taking them, and neither keeps the other's
        return lambda: run((*self._weights.take(inputs), *inputs))


class StreamedApartRunner(ApartRunner, StreamedBlockRunner):
    """Both: the weights are taken and released there too."""
