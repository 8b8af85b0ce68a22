"""The calls of one model during one run, captured and replayed.

Each variant of the call (`capture_key`) is warmed up first. Its first call runs eagerly, that is with compiled blocks;
so does the second, and a dry run follows unless the device was at work all the time, when a replay would save nothing;
the third is captured too, and the capture compared with it. From then on calls of the variant are replays, in this run
and in later ones. Whatever fails, the call runs eagerly.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.entry import Lease
from ..cache.graph_cache import GraphCache, NoGraph
from ..core.errors import one_line
from ..core.events import emit
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason, RunEagerly
from ..dispatch.block_observer import BlockObserver
from ..dispatch.block_runner import NotReady
from ..dispatch.whole_calls import WholeCalls
from ..modules.snapshot import are_same
from ..signature import switches, tree_spec
from ..signature.argument_guard import CallSignatures, InputGuard, Match
from .call_capture import Call, CallCapture, tensors_of
from .capture_key import CallVariant, CaptureKey
from .conditions import CaptureFailed, check_arguments, check_warm_call, check_weights
from .host_constants import HostConstants
from .model_guard import CaptureHost, ModelGuard
from .pool import CapturedCall, CapturePool

_HOW = "block by block"


@dataclass
class _Progress:
    """How far the calls of one key are.

    resident_before: streamed weights that were on the device before the last call; None if a block was compiled in it.
        A call is captured only after one that found the same ones there, so that none of them is brought in its course.
    constants: from its dry run; None before.
    refused: there is no captured call of it in this run.
    """

    resident_before: frozenset | None = None
    constants: HostConstants | None = None
    refused: bool = False


class ModelCapture:
    """Makes the calls of one model during one run, on one thread at a time. blocks: the stand-ins of its blocks, in
    place while it runs. Both are made at the run's first call, for that run alone."""

    def __init__(
        self,
        model: torch.nn.Module,
        cache: GraphCache,
        pool: CapturePool,
        lease: Lease,
        blocks: WholeCalls,
        host: CaptureHost,
    ):
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._cache, self._pool, self._lease, self._host = cache, pool, lease, host
        self._facts = host.facts, switches.read_switches()
        self._observer = BlockObserver()
        self.blocks = blocks
        for runner in blocks.runners.values():
            runner.observer = self._observer
        self._progress: defaultdict[CaptureKey, _Progress] = defaultdict(_Progress)
        self._confirmed: weakref.WeakSet[CapturedCall] = weakref.WeakSet()
        self._guard = ModelGuard(model, host)
        self._calls = CallSignatures(host.simplify)
        self._off: Reason | None = None
        self._held: frozenset = frozenset()
        self.eager_calls = 0
        """Block calls inside replays that ran without a compiled graph."""

    def call(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `inner` returns for these arguments, by a replay where there is a captured call."""
        try:
            return self._call(functools.partial(self.call_uncaptured, inner), args, kwargs)
        finally:
            self._host.release()  # the device may still be at work: what takes memory away waits for it

    def _call(self, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        self._observer.may_capture = False
        call, reason = None, None
        try:
            call = self._capturable(args, kwargs)
        except self._host.interrupts:
            raise
        except RunEagerly as why:
            reason = why.reason
        except tree_spec.UnsupportedArgument as why:
            reason = Reason("unsupported_argument", what=str(why))
        except Exception as error:
            reason = Reason("capture_failed", error=one_line(error))
        if call is None:
            if reason is not None and reason != self._off:  # else told before
                self._note(reason)
                if reason.code == "cuda_malloc_async":  # for as long as the process lives
                    self._off = self.blocks.unspared = reason
            return self._run_eagerly(inner, args, kwargs)
        self._observer.may_capture = True
        captured = self._current(call.key)
        if captured is None or not captured.held <= self._held:
            del captured  # an eager call may need its memory
            return self._warm_up(call, inner, args, kwargs)
        done, out = self._replay(captured, call.tensors)
        del captured
        return out if done else self._run_eagerly(inner, args, kwargs)

    def _run_eagerly(self, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The call made, with streamed weights free to give way to what it computes."""
        self._host.release()
        return inner(*args, **kwargs)

    def call_uncaptured(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `inner` returns for these arguments."""
        with self.blocks.put_in_place((*args, *kwargs.values()), not self._observer.may_capture):
            return inner(*args, **kwargs)

    # Conditions, in the order that `conditions` has

    def _capturable(self, args: tuple, kwargs: dict[str, Any]) -> Call | None:
        """The call with all weights held, if it may be captured or replayed; None where no call of its key is in this
        run. Raises RunEagerly and UnsupportedArgument: why it may not."""
        _require(self._off or self._host.why_not())
        found = None if torch.is_grad_enabled() else self._calls.match(args, kwargs)
        variant, _, inputs = found or self._describe(args, kwargs)
        _require(self._pool.capturer.why_not(variant.device))
        key = variant.key(self._model, self._facts)
        entry = self._cache.get(key, self._lease)
        if entry is None or not entry.graphs:
            progress = self._progress[key]
            if entry is not None and entry.failure is not None and not progress.refused:
                self._note(entry.failure)
                progress.refused = True
            if progress.refused:  # without a look at the weights, one by one
                return None
        reason = self._hold()
        if reason is None and not self._guard.seems_current():
            self._confirmed.clear()
            reason = self._guard.snapshot()
        if reason is not None:
            self._stop(reason)  # to ask at every call would cost more than it may give
            return None
        _require(check_weights(self._guard.weights, variant.device))  # type: ignore[arg-type]  # there where nothing refuses
        return Call(key, inputs, variant.device)

    def _describe(self, args: tuple, kwargs: dict) -> Match:
        """The variant of a call that is like no other."""
        inputs: list[torch.Tensor] = []
        spec = tree_spec.flatten((args, kwargs), inputs, self._host.simplify)
        _require(check_arguments(inputs))
        variant, guard = CallVariant(spec, inputs), InputGuard(spec, inputs)
        self._calls.signature_of(args, kwargs, spec, inputs, {}).add(variant, guard, inputs)
        return variant, guard, inputs

    def _hold(self) -> Reason | None:
        """Why the model's weights cannot be held where they are streamed; None once they are held."""
        try:
            held = self._host.hold()
        except self._host.interrupts:
            raise
        except Exception as error:
            return Reason("weights_not_taken", error=one_line(error))
        if held is None:
            return Reason("weights_streamed")
        self._held = held
        return None

    # Replays

    def _current(self, key: CaptureKey) -> CapturedCall | None:
        """The captured call of the key, if it is right for the model as it is; an outdated one is evicted."""
        entry = self._cache.get(key)
        captured = None if entry is None else next(iter(entry.graphs), None)
        if captured is None:
            return None
        if captured not in self._confirmed:
            if captured.digest != self._guard.weights.digest or not captured.has_kernels():
                # It had its dry run before it was captured, and the code is part of the key.
                progress = self._progress[key]
                progress.resident_before, progress.constants = self._held, captured.constants
                self._cache.evict(key)
                return None
            captured.lease_kernels(self._cache, self._lease)
            with self._pool.capturer.lock:
                captured.refresh(self._guard.weights)
            self._confirmed.add(captured)
        entry.hits += 1
        return captured

    def _replay(self, captured: CapturedCall, tensors: Sequence[torch.Tensor]) -> tuple[bool, Any]:
        """Whether the replay may be used, and its output. After one that fails there are no more of this key, or of
        any in this run where memory is short."""
        try:
            with self._pool.capturer.lock:
                out = captured.run(tensors)
                # The device is at work meanwhile. The captured addresses were mapped when the call began; only now
                # is it known that all of them are the weights'.
                if not self._guard.is_current(captured.outline):
                    self._cache.evict(captured.key)
                    return False, None
                self.eager_calls += captured.count()
            return True, out
        except self._host.interrupts:
            raise
        except Exception as error:
            is_shortage = isinstance(error, torch.OutOfMemoryError)
            reason = Reason("capture_failed", error=one_line(error))
        # Outside the handler, whose exception would keep what was computed.
        if is_shortage:
            self._stop(Reason("memory_short", error=reason))
            self._pool.drop(self._cache)
            return False, None
        entry = self._cache.get(captured.key)
        if entry is not None:
            entry.mark_failed(reason)
        self._progress[captured.key].refused = True
        self._note(reason)
        return False, None

    # From the first call of a key to its capture

    def _warm_up(self, call: Call, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of the eager call, after the next step towards its capture."""
        key, device = call.key, call.device
        progress, entry = self._progress[key], self._cache.get(key)
        held = self._held
        is_due = progress.resident_before == held
        # The dry run calls the model once more, which must leave no trace; on the device it ends before there is one.
        state = self._guard.weights.state() if is_due and progress.constants is None else None
        self._observer.reset()
        alone = functools.partial(self._run_eagerly, inner, args, kwargs)
        out, device_waited = self._pool.capturer.time_call(device, alone) if is_due else (alone(), None)
        progress.resident_before = held if self._observer.is_stable and self._host.unchanged() else None
        if not is_due or progress.resident_before is None or self._hold() is not None or self._held != held:
            return out
        has_room = not held or self._pool.capturer.has_room(device)
        changes = state is not None and not are_same(state, self._guard.weights.state())
        unfit = check_warm_call(device_waited if progress.constants is None else None, has_room, changes)
        if unfit is not None:
            progress.refused = True
            self._note(unfit)
            return out
        if entry is not None and entry.graphs:  # captured with weights that this run does without
            progress.constants = next(iter(entry.graphs)).constants
            self._cache.evict(key)
        capture = CallCapture(
            call=call,
            inner=inner,
            pool=self._pool,
            observer=self._observer,
            weights=self._guard.weights,  # type: ignore[arg-type]  # there in a call
            held=held,
            constants=progress.constants or HostConstants(device),
        )
        refusal = self._advance(progress, capture, tensors_of(out))
        if refusal is not None:
            self._note(refusal)
        return out

    def _advance(self, progress: _Progress, capture: CallCapture, expected: Sequence[torch.Tensor]) -> Reason | None:
        """Why the call will not be captured, after its dry run or capture, whichever is next; None where it may be."""
        key, known = capture.call.key, (*self._host.interrupts, torch.OutOfMemoryError, NotReady, CaptureFailed)

        def make() -> CapturedCall:
            if refusal is not None:
                raise CaptureFailed(refusal)
            with self._pool.capturer.lock:  # until it is admitted, a capture on another thread would not count it
                try:
                    captured = capture.capture(expected)
                except known:
                    raise
                except Exception as error:
                    raise CaptureFailed(Reason("capture_failed", error=one_line(error))) from error
                if self._hold() is not None or self._held != capture.held:
                    raise NoGraph(key, Reason("weights_streamed"))  # in this run
                self._pool.admit(captured, self._cache, self._lease)
            self._confirmed.add(captured)
            return captured

        refusal = None
        try:
            if progress.constants is None:
                refusal = self._dry_run(capture, known)
                emit("dry_run_end", name=self._name)
                if refusal is None:
                    progress.constants = capture.constants
                    return None
                self._pool.capturer.give_back()
            self._cache.find(key, f"{self._name} call", lambda _: True, make, self._lease, action="capture")
            return None
        except NotReady:  # later: another thread has dropped a block's graph, or the pool has only now dropped others
            return None
        except NoGraph as error:
            progress.refused = True
            return error.reason
        except torch.OutOfMemoryError as error:
            reason = Reason("memory_short", error=one_line(error))
        # Outside the handler, whose exception would keep what was captured.
        self._stop(reason)
        self._pool.drop(self._cache)
        return None

    def _dry_run(self, capture: CallCapture, known: tuple[type[BaseException], ...]) -> Reason | None:
        try:
            return capture.dry_run()
        except known:
            raise
        except KeyError as error:  # the call itself had it: the host keeps from captured calls what differs each time
            return Reason("reads_option", option=error.args[0])
        except Exception as error:
            return Reason("capture_failed", error=one_line(error))

    def _stop(self, reason: Reason) -> None:
        """Capture and replay nothing for the rest of the run."""
        self._off = reason
        self._note(reason)

    def _note(self, reason: Reason) -> None:
        fallbacks.note(self._name, Reason("not_captured", why=reason), _HOW)


def _require(reason: Reason | None) -> None:
    """Raise RunEagerly with the reason, if there is one."""
    if reason is not None:
        raise RunEagerly(reason)
