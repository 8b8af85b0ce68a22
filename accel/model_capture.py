"""One run's model calls as recordings: found, made when a call comes again, and left alone where they are not right.

The first call of its sort is made as ever, with compiled blocks; the second too, and is watched once besides; the
third is recorded, and the recording compared with it. From then on calls of the sort are replays, in this run and
in later ones. Whatever goes wrong ends in the call made as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from . import call_spec, compilers
from .block_observer import BlockObserver
from .block_runner import BlockRunner, RunEagerly
from .call_recording import CallRecording, tensors_of
from .capture import CaptureFailed
from .capture_key import CaptureKey, buffer_specs
from .capture_pool import CapturePool, MadeRoom, NoRoom
from .captured_call import CapturedCall
from .eager_calls import not_in_this_mode
from .fallbacks import fallbacks
from .feature_taps import Tape, Taps
from .graph_cache import Claim, GraphCache, NoGraph
from .model_state import ModelState, Unrecordable, obstacle

_MAX_SORTS = 256
"""Sorts of calls of a run of which it is remembered how far they are."""

_MAX_SURPRISES = 8
"""Times in a run that the model may turn out to be another than before; then there are no recordings any more."""

_HOW = "without a graph of its own"


@dataclass(frozen=True)
class CaptureHost:
    """What the program around the model knows of it.

    facts: for the key, beside what the call says. simplify: what a dict among the arguments is replaced by; it
        raises `RunEagerly` where something in it must run in each call. token: changes whenever the host has moved
        or patched weights; cheap. why_not: what is against a recording just now, cheap. of_module: what is against
        one in a module. interrupts: exceptions that mean "stop the run".
    """

    facts: Hashable = None
    simplify: Callable[[dict], dict] | None = None
    token: Callable[[], Hashable] = lambda: None
    why_not: Callable[[], str | None] = lambda: None
    of_module: Callable[[torch.nn.Module], str | None] = lambda module: None
    interrupts: tuple[type[BaseException], ...] = ()


@dataclass
class _Sort:
    """How far calls of one key are: made, watched, or given up for this run."""

    made: bool = False
    watched: bool = False
    refused: bool = False


class ModelCapture:
    """Stands before the calls of one model during one run.

    runners: the stand-ins of its blocks; made at the run's first call, as this is.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: GraphCache,
        pool: CapturePool,
        claim: Claim,
        runners: Sequence[BlockRunner],
        host: CaptureHost,
    ):
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._cache, self._pool, self._claim, self._host = cache, pool, claim, host
        self._observer = BlockObserver()
        for runner in runners:
            runner.observer = self._observer
        self._sorts: dict[CaptureKey, _Sort] = {}
        self._confirmed: weakref.WeakSet[CapturedCall] = weakref.WeakSet()
        self._state: ModelState | None = None
        self._token: Hashable = None
        self._off: str | None = None
        self._surprises = 0
        self._taps: Taps | None = None

    @contextmanager
    def during(self, taps: Taps) -> Iterator[None]:
        """For one call that exchanges features with a DeepCache run."""
        self._taps = taps
        try:
            yield
        finally:
            self._taps = None

    def call(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `inner` returns for these arguments, by a replay where there is one."""
        taps, inputs = self._taps, []
        reason, spec = self._off or self._why_not(), None
        if reason is None:
            try:
                spec = call_spec.flatten((args, kwargs), inputs, self._host.simplify)
            except RunEagerly as why:
                reason = str(why)
            except call_spec.UnsupportedArgument as why:
                reason = f"it is called with {why}"
            else:
                reason = self._unfit(inputs)
        if reason is not None:
            if reason != self._off:
                self._note(reason)
            return inner(*args, **kwargs)
        if taps is not None and not taps.is_recordable:
            return inner(*args, **kwargs)
        features = taps.features() if taps else {}
        tensors = [*inputs, *features.values()]
        phase = taps.phase if taps else None
        key = CaptureKey(self._model, spec, buffer_specs(tensors), phase, self._host.facts)
        captured = self._find(key)
        if captured is not None:
            if taps is not None and captured.tape is not None:
                taps.require(captured.tape)
            done, out = self._replay(captured, tensors, taps)
            del captured  # its memory may be what the call needs
            return out if done else inner(*args, **kwargs)
        return self._come_closer(key, inner, args, kwargs, tensors, features)

    # Whether a call can be recorded or replayed at all

    def _why_not(self) -> str | None:
        reason = self._host.why_not()
        if reason is not None:
            return reason
        if self._state is None or self._host.token() != self._token or not self._state.seems_same():
            return self._look_at_model()
        return None

    def _look_at_model(self) -> str | None:
        """At the run's first call, and whenever the weights have moved."""
        self._confirmed.clear()
        self._surprises += self._state is not None
        self._state = None
        model = self._model()
        reason = obstacle(model, self._host.of_module)
        if self._surprises >= _MAX_SURPRISES:
            reason = "its weights or its code change from call to call"
        if reason is None:
            try:
                state = ModelState(model)
            except Unrecordable as why:
                reason = str(why)
        if reason is None:
            self._state, self._token = state, self._host.token()
        else:
            self._stop(reason)  # looking again at every call would cost more than it may give
        return reason

    def _unfit(self, inputs: Sequence[torch.Tensor]) -> str | None:
        filled = [tensor for tensor in inputs if tensor.numel()]
        if not filled:
            return "it is called without tensors"
        self._device = filled[0].device
        odd = next((type(t).__name__ for t in filled if type(t) not in (torch.Tensor, torch.nn.Parameter)), None)
        if odd is not None:
            return f"it is called with a {odd}"
        devices = {tensor.device for tensor in filled} | self._state.devices
        if len(devices) > 1:
            return f"its weights and inputs are on {' and '.join(sorted(map(str, devices)))}"
        reason = not_in_this_mode((), inputs)
        if reason is None and torch.is_grad_enabled() and any(t.requires_grad for t in self._state.tensors()):
            reason = "gradients are wanted"
        return reason or self._ask_recorder()

    def _ask_recorder(self) -> str | None:
        try:
            return self._pool.recorder.why_not(self._device)
        except self._host.interrupts:
            raise
        except Exception as error:
            return f"its device does not say whether it can: {compilers.one_line(error)}"

    # Replays

    def _find(self, key: CaptureKey) -> CapturedCall | None:
        """The recording for the key, if it is right for the model as it is; an outdated one is dropped."""
        entry = self._cache.get(key, self._claim)
        if entry is None:
            return None
        captured = next(iter(entry.graphs), None)
        if captured is None:
            return None
        if captured not in self._confirmed:
            if captured.digest != self._state.digest or not captured.has_kernels():
                self._cache.evict(key)
                self._sort(key).made = True  # it was watched when it was made, and code is in the key
                self._sort(key).watched = True
                return None
            self._confirmed.add(captured)
        entry.hits += 1
        return captured

    def _replay(self, captured: CapturedCall, tensors: Sequence[torch.Tensor], taps: Taps | None) -> tuple[bool, Any]:
        """Whether the replay may be used, and its output."""
        is_shortage = False
        try:
            with self._pool.recorder.lock:
                out, parts, handed = captured.run(tensors)
                # The device is at work meanwhile. Recorded addresses were mapped when the call began; that all of
                # them are the weights' is known only now.
                if not self._state.is_same() or self._state.outline() != captured.outline:
                    self._cache.evict(captured.key)
                    self._state = None
                    self._surprises += 1
                    return False, None
                if taps is not None:
                    taps.hand_over(parts, handed)
            return True, out
        except self._host.interrupts:
            raise
        except Exception as error:
            is_shortage = isinstance(error, torch.OutOfMemoryError)
            reason = compilers.one_line(error)
        self._give_up(captured.key, f"its replay failed: {reason}", is_shortage)
        return False, None

    # From the first call of a sort to its recording

    def _come_closer(self, key, inner, args, kwargs, tensors, features) -> Any:
        """Make the call as ever, and what is next for its sort besides."""
        sort = self._sort(key)
        entry = self._cache.get(key)
        if entry is not None and entry.failure is not None and not sort.refused:
            self._note(entry.failure)
            sort.refused = True
        if sort.refused or self._pool.is_refused(key, self._cache.max_bytes):
            return inner(*args, **kwargs)
        taps = self._taps
        self._observer.reset()
        with taps.copied() if taps is not None and sort.made else nullcontext(Tape()) as handed:
            out = inner(*args, **kwargs)
        if not sort.made or not self._observer.settled:
            sort.made = self._observer.settled
            return out
        call = CallRecording(key, inner, tensors, features, taps, self._pool, self._observer, self._state, self._device)
        refusal = self._attempt(sort, call, [*tensors_of(out), *handed.tensors])
        if refusal is not None:
            self._note(refusal)
        return out

    def _attempt(self, sort: _Sort, call: CallRecording, expected: Sequence[torch.Tensor]) -> str | None:
        """Watch the call or record it, whichever is next; the reason where there will be no recording."""
        known = (*self._host.interrupts, torch.OutOfMemoryError, MadeRoom, NoRoom, CaptureFailed)

        def make() -> CapturedCall:
            if refusal is not None:
                raise CaptureFailed(refusal)
            try:
                captured = call.record(expected)
            except known:
                raise
            except Exception as error:
                raise CaptureFailed(f"recording it failed: {compilers.one_line(error)}") from error
            self._pool.admit(captured, self._cache, self._claim)
            self._confirmed.add(captured)
            return captured

        refusal = None
        try:
            if not sort.watched:
                refusal = self._watch(call, known)
                if refusal is None:
                    sort.watched = True
                    return None
            self._cache.find(call.key, f"{self._name} call", lambda _: True, make, self._claim, action="capture")
            return None
        except MadeRoom:
            return None
        except (NoRoom, NoGraph) as error:
            sort.refused = True
            return str(error)
        except torch.OutOfMemoryError as error:
            reason = f"memory is short: {compilers.one_line(error)}"
        # Outside of the handler, whose exception would keep what was recorded.
        self._stop(reason)
        self._pool.drop_all(self._cache)
        return None

    def _watch(self, call: CallRecording, known: tuple[type[BaseException], ...]) -> str | None:
        try:
            return call.watch()
        except known:
            raise
        except Exception as error:
            return f"it fails on its own: {compilers.one_line(error)}"

    def _sort(self, key: CaptureKey) -> _Sort:
        if key not in self._sorts and len(self._sorts) >= _MAX_SORTS:
            self._sorts.clear()
        return self._sorts.setdefault(key, _Sort())

    def _give_up(self, key: CaptureKey, reason: str, is_shortage: bool) -> None:
        """A replay failed: there is none of this sort from now on; after a lack of memory none at all in this run."""
        if is_shortage:
            self._stop(f"memory is short: {reason}")
            self._pool.drop_all(self._cache)
            return
        entry = self._cache.get(key)
        if entry is not None:
            entry.give_up(reason)
        self._sort(key).refused = True
        self._note(reason)

    def _stop(self, reason: str) -> None:
        """No recordings for the rest of the run."""
        self._off = reason
        self._note(reason)

    def _note(self, reason: str) -> None:
        fallbacks.note(self._name, reason, _HOW)
