"""A block's stand-in: runs each call with its compiled graph, or eagerly where it has none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..beside.making import tell_if_late
from ..cache.graph_cache import NoGraph
from ..compile.backend import Pending
from ..compile.benchmark import Pattern, draws_again
from ..compile.compiled_graph import CompiledGraph
from ..core.compile_settings import Trouble
from ..core.errors import Failure, pass_on, strip_frames
from ..core.events import emit, log
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason, Refusal, RunEagerly, check_mode
from ..core.torch_internals import COMPILER_AROUND, allow_inlining
from ..fingerprint import kinds
from ..fingerprint.block_call import Call
from ..fingerprint.plain_values import Indescribable
from ..fingerprint.survey import Region
from ..modules import host_calls, opaque_layers
from ..modules.streamed_weights import WeightSource, weights_taken
from ..modules.substitution import Outside
from ..signature import tree_spec
from ..signature.output_check import compare_to_rounding
from ..signature.tensors import copy_with_strides, dense, have_equal_values, is_expanded, share_memory
from .block_observer import BlockObserver
from .current_code import CurrentCode
from .inline_cache import InlineCache, KnownCalls
from .lora import AddedWeights, add_updates
from .resolver import BlocksRun, CodePending, GraphResolver, ResolvedGraph

compiler_around = COMPILER_AROUND.get(lambda: None)
"""Gives the compiler that traces this thread's code; None where none does."""

COMPILED, COMPARED = "compiled", "compared"
"""How a call ran: by its graph, or by both graph and block. A call that ran uncompiled has its reason instead."""


class NotReady(RuntimeError):
    """A block has no compared graph at hand while a call of its model is captured."""


class BlockRunner:
    """Stands in for one block's forward during model calls (a layer of `substitution`).

    simplify_options: replaces a dict among the arguments, which keeps a host's per-call options from the compiler;
        raises `RunEagerly` when they concern the block.
    source: brings the block's weights where they are not in place.
    outside_recording: makes the context that keeps the call out of the host's record of the model's memory.
    """

    for_own_alone = True

    def __init__(
        self,
        region: Region,
        run: BlocksRun,
        simplify_options: Callable[[dict], dict] | None = None,
        source: WeightSource | None = None,
        outside_recording: Outside = nullcontext,
    ):
        self._region, self._blocks_run, self._simplify = region, run, simplify_options
        self._resolver = GraphResolver(region, run)
        self._outside_recording, self._is_streamed = outside_recording, source is not None
        self._is_surrounded = self._is_streamed or outside_recording is not nullcontext
        self._weights = source or region.slots
        wraps = region.context.wraps
        self._lora = None if wraps is None else AddedWeights(region.block, region.kind.tensors, wraps)
        self._calls_layers = region.calls_layers
        known = KnownCalls.get_or_create(region, run.cache, run.settings, type(self._weights))
        self._inline = InlineCache(region.path, run.cache, self._weights, simplify_options, known, run.lease)
        self.eager_calls = 0
        """Calls that ran without a graph."""
        self.ways: set[str | Reason | None] = set()
        """How calls have run since this was last cleared. None: uncompiled for the rest of the run."""
        self.observer: BlockObserver | None = None
        """Set while whole model calls are captured."""
        self.code: CurrentCode | None = None
        self.replacement: BlockRunner | Reason | None = None
        """Runs the block while code differs from what its region was surveyed with, or says why it runs eagerly."""
        self._passing: object = None
        self._for_functions: dict[tuple[tree_spec.Function, ...], BlockRunner] = {}
        self._pending: Pending | None = None
        """Code that is still being made; until it is done, calls without a graph run uncompiled."""
        self._eager_reason: Reason | None = None
        """Why the block runs eagerly for the rest of the run."""
        self.no_graph_reason: Reason | None = None
        """Why the latest call without a graph had none."""

    @property
    def kind(self) -> kinds.Kind:
        return self._region.kind

    @allow_inlining
    def __call__(self, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or compiler_around() is not None:
            self._leave_to_others()
            return inner(*args, **kwargs)
        if not self._is_surrounded:
            return self._call(inner, args, kwargs)
        try:
            outside_recording = self._outside_recording()
        except RunEagerly as refusal:
            reason = refusal.reason
        else:
            with outside_recording, weights_taken(self._weights, inner) as streaming:
                return self._call(streaming, args, kwargs)
        return self._run_eagerly(self._describe(inner, args, kwargs), reason)

    def _call(self, inner: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        observer, code = self.observer, self.code
        if observer is not None and observer.runs_eagerly:
            return inner(*args, **kwargs)
        if code is not None:
            again = self._passing is code.passing
            if code.needs_comparison(self._region.block, again):
                code.compare(self._region.block, again)
            self._passing = code.passing
            if self.replacement is not None:
                return self._call_replacement(self.replacement, inner, args, kwargs)
        if self._calls_layers:
            opaque_layers.begin(self._region.block)
        match = self._inline.match(args, kwargs, self._is_captured) if self._has_no_lora() else None
        if match is None:
            return self._call_unmatched(inner, args, kwargs)
        resolved, guard, tensors, given = match
        guard.counter.hits += 1
        self.ways.add(COMPILED)
        if observer is not None:
            observer.used.append((resolved.entry, resolved.graph, guard.counter))
        try:
            out = (guard.fast_run or resolved.graph.run)(tensors)
            for at in guard.copied:
                out = _copy_back(out, tensors[at - len(given)], given[at])
            return out
        except Exception as error:
            failure = self._failure_of(error, in_graph=True)
        del match, tensors, given  # the block may bring its weights itself
        return self._run_after_failure(self._describe(inner, args, kwargs), resolved, failure)

    def _call_replacement(self, runner: BlockRunner | Reason, inner: Callable, args: tuple, kwargs: dict) -> Any:
        if isinstance(runner, Reason):
            return self._run_eagerly(self._describe(inner, args, kwargs), runner)
        runner.observer, runner.ways, eager_before = self.observer, self.ways, runner.eager_calls
        try:
            return runner(inner, *args, **kwargs)
        finally:
            self.eager_calls += runner.eager_calls - eager_before

    @torch.compiler.assume_constant_result  # a tracer runs it once, and leaves it out
    def _leave_to_others(self) -> None:
        fallbacks.note(self.kind.name, Reason("compiled_around"), how="without Accel")

    @property
    def _is_captured(self) -> bool:
        """Whether calls like this one may be captured later."""
        return self.observer is not None and self.observer.may_capture

    @property
    def _is_capturing(self) -> bool:
        return self.observer is not None and self.observer.capturing

    def _has_no_lora(self) -> bool:
        """Whether nothing is added to the weights in this call."""
        try:
            return self._lora is None or not self._lora.read()
        except RunEagerly:
            return False

    def _call_unmatched(self, inner: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a call that no guard matched."""
        call, refusal, graph = self._describe(inner, args, kwargs), None, None
        if self._eager_reason is not None:
            self.ways.add(None)
            return self._run_eagerly(call, self._eager_reason)
        try:
            if self._pending is not None and not self._pending.is_done:
                raise CodePending(self._pending)
            graph = self._find_graph(call)
        except Refusal as error:
            refusal = strip_frames(error)
        if isinstance(refusal, NoGraph):
            return self._run_without_graph(call, refusal)
        if isinstance(refusal, CodePending):
            return self._run_while_pending(call, refusal)
        if refusal is not None:
            return self._run_eagerly(call, refusal.reason, is_trouble=not isinstance(refusal, RunEagerly))
        if isinstance(graph, BlockRunner):
            return self._call_replacement(graph, inner, args, kwargs)
        if graph is None:
            self.ways.add(None)
            return self._run_eagerly(call, self.no_graph_reason)
        return self._run(call, graph)

    def _run_while_pending(self, call: Call, refusal: CodePending) -> Any:
        """Run a call eagerly while its code is made; a later one like it may run compiled."""
        if self._is_capturing:
            raise NotReady(f"{self.kind.name} ({self._region.path}) has no code yet")
        self._pending = refusal.pending
        tell_if_late()
        self.ways.add(COMPARED)
        if self.observer is not None:
            self.observer.is_stable = False
        return self._run_eagerly(call, refusal.reason)

    def _describe(self, inner: Callable, args: tuple, kwargs: dict[str, Any]) -> Call:
        run = self._blocks_run.settings
        return Call(self.kind, backend=run.backend, any_size=run.any_size, inner=inner, args=args, kwargs=kwargs)

    def _find_graph(self, call: Call) -> ResolvedGraph | BlockRunner | None:
        """The call's graph, with its weights taken into the call; a runner for calls with functions like this one's;
        None where it runs eagerly. Raises Refusal: no graph may run it."""
        try:
            call.spec = tree_spec.flatten((call.args, call.kwargs), call.given, self._simplify, functions=True)
        except tree_spec.UnsupportedArgument as error:
            raise Refusal(Reason("unsupported_argument", what=str(error))) from None
        functions = tree_spec.functions_in(call.spec)
        if functions and self._region.given is None:
            return self._runner_for(functions)
        self._take_weights(call)
        resolved = self._resolve(call)
        if resolved is not None:
            self._prepare(call, resolved)
        return resolved

    def _runner_for(self, functions: tuple[tree_spec.Function, ...]) -> BlockRunner:
        """The runner of calls with these functions, whose code is part of its graphs. Raises Refusal."""
        refusal = Refusal(Reason("unsupported_argument", what="a function"))
        if self._blocks_run.make is None:
            raise refusal
        try:
            region = self._region.specialize_for_functions(functions)
        except Indescribable as error:
            log.debug("%s is called with a function that is not compiled: %s", self.kind.name, error)
            raise refusal from None
        runner = self._for_functions.get(functions)
        if runner is None or runner._region is not region:
            runner = self._for_functions[functions] = self._blocks_run.make(region)
        return runner

    def _take_weights(self, call: Call) -> None:
        verdict = self._inline.verdict(call, self._is_captured)
        if verdict is not None:
            self.ways.add(verdict)
            raise RunEagerly(verdict)
        call.added = () if self._lora is None else self._lora.read()
        call.weights = self._weights.take(call.given)
        if any(weight is None for weight in call.weights):  # taken away since
            raise RunEagerly(Reason("code_changes"))
        reason = check_mode(call.weights, call.given)
        if reason is not None:
            raise RunEagerly(reason)
        call.inputs = [dense(tensor) for tensor in call.given]

    def _resolve(self, call: Call) -> ResolvedGraph | None:
        """The graph for the call; None where it runs eagerly. Raises NoGraph."""
        is_known, resolved = self._inline.find(call, self._is_captured)
        if self._is_capturing and (not is_known or (resolved is not None and self._is_compared(resolved))):
            raise NotReady(f"{self.kind.name} ({self._region.path}) has no compared graph at hand")
        if is_known:
            return resolved
        try:
            resolved = self._resolver.resolve(call, self.observer)
        except NoGraph:
            self._inline.add(call, None)
            raise
        self._inline.add(call, resolved)
        call.weights = ()  # compiling takes minutes, in which they may be replaced
        return resolved

    def _prepare(self, call: Call, resolved: ResolvedGraph) -> None:
        """Give the call the weights that its graph takes. Raises Refusal: the graph must not run it."""
        changed = resolved.graph.facts.changed
        if changed and share_memory(call.given, changed):
            raise Refusal(Reason("changes_shared_memory"))
        if resolved.verdict is not None:
            self.ways.add(resolved.verdict)
            raise RunEagerly(resolved.verdict)
        if self._is_compared(resolved) and self._is_streamed:
            call.weights = ()  # either way includes the cost of taking them, and neither keeps the other's
            self._weights.release()
            return
        if not call.weights:  # given back while the graph was made
            call.weights = self._weights.take(call.inputs)
            if not resolved.graph.facts.allow(call.tensors):
                raise RunEagerly(Reason("code_changes"))
        call.weights = add_updates(call.weights, call.added)

    def _run(self, call: Call, resolved: ResolvedGraph) -> Any:
        """The call by its graph; eagerly where that fails."""
        is_compared, observer = self._is_compared(resolved), self.observer
        resolved.counter.hits += 1
        self.ways.add(COMPARED if is_compared else COMPILED)
        if observer is not None:
            observer.used.append((resolved.entry, resolved.graph, resolved.counter))
            observer.is_stable &= not resolved.is_timed
        try:
            return self._compare(call, resolved) if is_compared else self._run_graph(call, resolved.graph)
        except Exception as error:
            failure = self._failure_of(error, call.in_graph)
        return self._run_after_failure(call, resolved, failure)

    def _is_compared(self, resolved: ResolvedGraph) -> bool:
        """Whether the block runs beside its graph, or they take turns: for a new shape, and once for a kind's last."""
        known = resolved.benchmarks
        is_last = self._region.is_last and known is not None and not known.is_last_compared and known.wrong is None
        return resolved.is_compared or is_last

    def _run_graph(self, call: Call, graph: CompiledGraph) -> Any:
        """The graph's output; what it writes to its inputs is written to the given tensors too."""
        weights = call.weights or add_updates(self._weights.take(call.inputs), call.added)
        call.in_graph = True
        out = graph.run((*weights, *call.inputs))
        call.in_graph = False
        for index in graph.facts.changed:
            out = _copy_back(out, call.inputs[index], call.given[index])
        return out

    def _run_without_graph(self, call: Call, refusal: NoGraph) -> Any:
        """Run the call eagerly after there was no graph for it."""
        self.no_graph_reason = refusal.reason
        try:
            out = self._run_eagerly(call)
        except BaseException:
            # The call itself is wrong, which says nothing of the block.
            self._inline.clear()
            if refusal.tried:
                self._blocks_run.cache.clear_failure(refusal.key)
            raise
        self._note(refusal.reason, is_trouble=True)
        self.ways.add(None)
        return out

    def _failure_of(self, error: Exception, in_graph: bool) -> Failure | Reason:
        """Why a call failed; raises the error again where it stops the run, or ends a capture.

        in_graph: the graph ran, and is to blame unless others' code in it is.
        """
        if isinstance(error, RunEagerly):  # the weights could not be taken again: not the graph's fault
            return error.reason
        pass_on(error, self._blocks_run.interrupts)
        if self._is_capturing:
            raise error
        return Failure.from_error(error, in_graph and not host_calls.is_others(error))

    def _run_after_failure(self, call: Call, resolved: ResolvedGraph, failure: Failure | Reason) -> Any:
        """Run the call eagerly after its graph failed. Not in the handler, whose exception would keep tensors alive.

        The graph is dropped, for every block of the kind, only where it failed itself and its block did not: a loaded
        one is compiled anew, a compiled one is not.
        """
        if isinstance(failure, Reason):
            return self._run_eagerly(call, failure)
        self._inline.clear()
        if failure.is_shortage and resolved.benchmark is not None:
            resolved.benchmark.done = True  # without a verdict
        out, reason = self._run_eagerly(call), Reason("graph_failed", error=failure.error)
        if not failure.is_own and not failure.is_shortage:  # may fail in each call, which would run it twice
            reason = self._eager_reason = Reason("failed_beside_graph", error=failure.error)
        elif not failure.is_shortage:
            cache, graph = self._blocks_run.cache, resolved.graph
            cache.drop_graph(resolved.entry, graph)  # by other blocks too, which would find out one by one
            if graph.saved_as is None or cache.store is None or not cache.store.distrust(graph.saved_as):
                resolved.entry.mark_failed(Reason("compile_failed", error=failure.error))
        self._note(reason, is_trouble=True)
        return out

    def _compare(self, call: Call, resolved: ResolvedGraph) -> Any:
        """The output of graph and block compared, or of one in turn where others' code in them must not run twice."""

        def eager():
            resolved.counter.hits -= 1  # counted before it was known whose turn it is
            return self._run_eagerly(call)

        if resolved.pattern is None:
            compiled = partial(self._run_graph, call, resolved.graph)
            out = resolved.benchmark.call_one_way(compiled, eager, call.device, self._is_captured)
        else:
            out = self._run_both_ways(call, resolved, resolved.pattern)
        if resolved.verdict is not None:
            fallbacks.note(self.kind.name, resolved.verdict)
        if not resolved.is_timed:
            gain = None if resolved.benchmark is None else resolved.benchmark.gain
            emit("probe_end", name=self.kind.name, gain=gain, reason=resolved.verdict)
        return out

    def _run_both_ways(self, call: Call, resolved: ResolvedGraph, pattern: Pattern) -> Any:
        """The graph's output, compared with the block's; inputs that they change are copied, and compared too."""
        known, benchmark, changes = resolved.benchmarks, resolved.benchmark, resolved.graph.facts.changed
        given, draw_again = call.given, draws_again(call.device)
        # Of what was given, since code may write to a dense input and to a copy of another (`x.contiguous().mul_(2)`),
        # or the other way round (`x.t().reshape(-1).mul_(2)`).
        copies = [copy_with_strides(tensor) if index in changes else tensor for index, tensor in enumerate(call.given)]
        before = [tensor.clone() if index in changes else tensor for index, tensor in enumerate(call.inputs)]
        strided = [i for i, tensor in enumerate(call.inputs) if tensor is not given[i] and i not in changes]
        types = {spec.dtype for spec in resolved.entry.key.inputs}

        def difference(out: Any, expected: Any) -> float | None:
            excess = compare_to_rounding(out, expected, before, types)
            if any(not have_equal_values(call.inputs[index], given[index]) for index in strided):
                excess = float("inf")
            known.is_last_compared |= self._region.is_last
            return known.judge(pattern, excess)

        def compiled():
            draw_again()
            return self._run_graph(call, resolved.graph), [given[index] for index in changes]

        def eager():
            draw_again()
            args, kwargs = tree_spec.rebuild(call.spec, copies)
            return call.inner(*args, **kwargs), [copies[index] for index in changes]

        may_capture = self._is_captured
        if resolved.is_timed:
            out, changed = benchmark.call(compiled, eager, call.device, may_capture, difference)
        else:
            out, changed = known.compare(pattern, compiled, eager, difference)
        for index, tensor in zip(changes, changed, strict=True):
            out = _copy_back(out, tensor, given[index])
        # A capture waits for the verdict, and with one round a call the few steps of a distilled model would pass.
        while may_capture and resolved.is_timed and not changes:
            benchmark.call(compiled, eager, call.device, True, difference)
        if known.wrong is not None:
            self._blocks_run.cache.forget()
        return out

    def _run_eagerly(self, call: Call, reason: Reason | None = None, is_trouble: bool = False) -> Any:
        """Run the call eagerly, which brings its weights itself; the reason is noted first."""
        if reason is not None:
            self._note(reason, is_trouble)
        call.weights = ()
        self.eager_calls += 1
        if self.observer is not None:
            self.observer.eager_calls += 1
        return call.inner(*call.args, **call.kwargs)

    def _note(self, reason: Reason, is_trouble: bool) -> None:
        if is_trouble and self._blocks_run.settings.stop_on_trouble:
            raise Trouble(f"{self.kind.name} ({self._region.path}) cannot run compiled: {reason}")
        fallbacks.note(self.kind.name, reason)


def _copy_back(out: Any, written: torch.Tensor, given: torch.Tensor) -> Any:
    """The output with the given tensor in place of its copy, whose values the given one gets."""
    if written is given:
        return out
    if not is_expanded(given):  # else nobody has written to it, and which inputs change may not be known
        given.copy_(written)
    return _replace_in_output(out, written, given)


def _replace_in_output(out: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """The output with the new tensor wherever it has the old one."""
    if type(out) in (tuple, list):
        return type(out)(_replace_in_output(part, old, new) for part in out)
    return new if out is old else out
