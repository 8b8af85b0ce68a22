"""One run's model calls as recordings: found, made when a call comes again, and left alone where they are not right.

The first call of its sort is made as ever, with compiled blocks; the second too, and is watched once besides; the
third is recorded, and the recording compared with it. From then on calls of the sort are replays, in this run and
in later ones. Whatever goes wrong ends in the call made as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.graph_cache import GraphCache, NoGraph
from ..cache.lease import Lease
from ..core.eager_calls import RunEagerly, not_in_this_mode
from ..core.errors import one_line
from ..core.events import emit
from ..core.fallbacks import NOT_CAPTURED, fallbacks
from ..dispatch.block_observer import BlockObserver
from ..dispatch.block_runner import BlockRunner
from ..signature import tree_spec
from ..signature.tensors import PLAIN_TENSORS
from ..step_cache.capture_io import Tape, Taps
from .call_cache import CallSort, CallSorts
from .call_recording import CallRecording, tensors_of
from .capture_key import CaptureKey
from .captured_call import CapturedCall
from .model_guard import CaptureHost, ModelGuard
from .pool import CapturePool, MadeRoom, NoRoom
from .recorder import CaptureFailed

_MAX_SORTS = 256
"""Sorts of calls of a run of which it is remembered how far they are."""

_HOW = "block by block"


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
        lease: Lease,
        runners: Sequence[BlockRunner],
        host: CaptureHost,
    ):
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._cache, self._pool, self._lease, self._host = cache, pool, lease, host
        self._observer = BlockObserver()
        for runner in runners:
            runner.observer = self._observer
        self._sorts: dict[CaptureKey, _Sort] = {}
        self._confirmed: weakref.WeakSet[CapturedCall] = weakref.WeakSet()
        self._guard = ModelGuard(model, host)
        self._calls = CallSorts(host.simplify)
        self._off: str | None = None
        self._taps: Taps | None = None
        self.eager_calls = 0
        """Calls of blocks, inside of replays, that ran without a graph."""

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
        taps = self._taps
        reason = self._off or self._why_not()
        if reason is None:
            reason, known, inputs = self._sort_of(args, kwargs)
        if reason is not None:
            if reason != self._off:
                self._note(reason)
            return inner(*args, **kwargs)
        if taps is not None and not taps.is_recordable:
            return inner(*args, **kwargs)
        features = taps.features() if taps else {}
        tensors = [*inputs, *features.values()]
        key = known.key(self._model, features, taps.phase if taps else None, self._host.facts)
        captured = self._find(key)
        if captured is not None:
            if taps is not None and captured.tape is not None:
                taps.require(captured.tape)
            done, out = self._replay(captured, tensors, taps)
            del captured  # its memory may be what the call needs
            return out if done else inner(*args, **kwargs)
        return self._come_closer(key, inner, args, kwargs, tensors, features, known.device)

    # Whether a call can be recorded or replayed at all

    def _why_not(self) -> str | None:
        reason = self._host.why_not()
        if reason is not None or self._guard.seems_current():
            return reason
        self._confirmed.clear()
        self._calls.forget()
        reason = self._guard.snapshot()
        if reason is not None:
            self._stop(reason)  # looking again at every call would cost more than it may give
        return reason

    def _sort_of(self, args: tuple, kwargs: dict) -> tuple[str | None, CallSort | None, Sequence[torch.Tensor]]:
        """What is against a replay of the call; its sort and its tensors, where nothing is."""
        inputs: list[torch.Tensor] = []
        try:
            found = None if torch.is_grad_enabled() else self._calls.recognise(args, kwargs)
            if found is not None:
                return self._ask_recorder(found[0].device), *found
            spec = tree_spec.flatten((args, kwargs), inputs, self._host.simplify)
        except RunEagerly as why:
            return str(why), None, ()
        except tree_spec.UnsupportedArgument as why:
            return f"it is called with {why}", None, ()
        reason = self._unfit(inputs)
        if reason is not None:
            return reason, None, ()
        known = self._calls.keep(args, kwargs, spec, inputs)
        return self._ask_recorder(known.device), known, inputs

    def _unfit(self, inputs: Sequence[torch.Tensor]) -> str | None:
        filled = [tensor for tensor in inputs if tensor.numel()]
        if not filled:
            return "it is called without tensors"
        odd = next((type(t).__name__ for t in filled if type(t) not in PLAIN_TENSORS), None)
        if odd is not None:
            return f"it is called with a {odd}"
        weights = self._guard.weights
        devices = {tensor.device for tensor in filled} | weights.devices
        if len(devices) > 1:
            return f"its weights and inputs are on {' and '.join(sorted(map(str, devices)))}"
        reason = not_in_this_mode((), inputs)
        if reason is None and torch.is_grad_enabled() and any(t.requires_grad for t in weights.tensors()):
            reason = "gradients are wanted"
        return reason

    def _ask_recorder(self, device: torch.device) -> str | None:
        try:
            return self._pool.recorder.why_not(device)
        except self._host.interrupts:
            raise
        except Exception as error:
            return f"its device does not say whether it can: {one_line(error)}"

    # Replays

    def _find(self, key: CaptureKey) -> CapturedCall | None:
        """The recording for the key, if it is right for the model as it is; an outdated one is dropped."""
        entry = self._cache.get(key, self._lease)
        if entry is None:
            return None
        captured = next(iter(entry.graphs), None)
        if captured is None:
            return None
        if captured not in self._confirmed:
            if captured.digest != self._guard.weights.digest or not captured.has_kernels():
                self._cache.evict(key)
                self._sort(key).made = True  # it was watched when it was made, and code is in the key
                self._sort(key).watched = True
                return None
            captured.lease_kernels(self._cache, self._lease)
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
                if not self._guard.is_current(captured.outline):
                    self._cache.evict(captured.key)
                    return False, None
                if taps is not None:
                    taps.hand_over(parts, handed)
                self.eager_calls += captured.count()
            return True, out
        except self._host.interrupts:
            raise
        except Exception as error:
            is_shortage = isinstance(error, torch.OutOfMemoryError)
            reason = one_line(error)
        self._mark_failed(captured.key, f"its replay failed: {reason}", is_shortage)
        return False, None

    # From the first call of a sort to its recording

    def _come_closer(self, key, inner, args, kwargs, tensors, features, device) -> Any:
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
        weights = self._guard.weights
        call = CallRecording(key, inner, tensors, features, taps, self._pool, self._observer, weights, device)
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
                raise CaptureFailed(f"recording it failed: {one_line(error)}") from error
            self._pool.admit(captured, self._cache, self._lease)
            self._confirmed.add(captured)
            return captured

        refusal = None
        try:
            if not sort.watched:
                refusal = self._watch(call, known)
                emit("call_watched", name=self._name)
                if refusal is None:
                    sort.watched = True
                    return None
            self._cache.find(call.key, f"{self._name} call", lambda _: True, make, self._lease, action="capture")
            return None
        except MadeRoom:
            return None
        except (NoRoom, NoGraph) as error:
            sort.refused = True
            return str(error)
        except torch.OutOfMemoryError as error:
            reason = f"memory is short: {one_line(error)}"
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
            return f"it fails on its own: {one_line(error)}"

    def _sort(self, key: CaptureKey) -> _Sort:
        if key not in self._sorts and len(self._sorts) >= _MAX_SORTS:
            self._sorts.clear()
        return self._sorts.setdefault(key, _Sort())

    def _mark_failed(self, key: CaptureKey, reason: str, is_shortage: bool) -> None:
        """A replay failed: there is none of this sort from now on; after a lack of memory none at all in this run."""
        if is_shortage:
            self._stop(f"memory is short: {reason}")
            self._pool.drop_all(self._cache)
            return
        entry = self._cache.get(key)
        if entry is not None:
            entry.mark_failed(reason)
        self._sort(key).refused = True
        self._note(reason)

    def _stop(self, reason: str) -> None:
        """No recordings for the rest of the run."""
        self._off = reason
        self._note(reason)

    def _note(self, reason: str) -> None:
        fallbacks.note(self._name, NOT_CAPTURED + reason, _HOW)
