"""Making a recording of one model call: watched first, recorded at a later call, and compared with that."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..compile.benchmark import largest_difference
from ..signature import tree_spec
from .call_watch import CallWatch
from .captured_call import Buffers, CapturedCall
from .recorder import CaptureFailed

if TYPE_CHECKING:
    from ..dispatch.block_observer import BlockObserver
    from ..modules.snapshot import WeightSnapshot
    from ..step_cache.capture_io import Tape, Taps
    from .capture_key import CaptureKey
    from .pool import CapturePool


@dataclass(frozen=True)
class CallRecording:
    """One call, to be watched or recorded.

    key: of its sort. inner: makes it. tensors: of its arguments, then those of `features`, which a skipped call takes.
    taps: of a call under DeepCache. weights: of the model. device: where all of it is.
    """

    key: CaptureKey
    inner: Callable[..., Any]
    tensors: Sequence[torch.Tensor]
    features: Mapping[Hashable, torch.Tensor]
    taps: Taps | None
    pool: CapturePool
    observer: BlockObserver
    weights: WeightSnapshot
    device: torch.device

    def watch(self) -> str | None:
        """Why the call cannot be recorded; None where nothing speaks against it.

        Made where recordings are, so it is their rehearsal as well.
        """
        buffers = Buffers(self.tensors)
        self.observer.resting = True
        try:
            with self.pool.recorder.lock:
                buffers.fill(self.tensors)
                watch = CallWatch([*self.weights.tensors(), *buffers.tensors], self.device)

                def call() -> None:
                    with watch:
                        self._call_on(buffers.tensors)

                self.pool.recorder.rehearse(self.device, call)
        finally:
            self.observer.resting = False
        return watch.reason

    def record(self, expected: Sequence[torch.Tensor]) -> CapturedCall:
        """The recorded call, whose first replay gives what is expected.

        expected: what the call returned, and handed to DeepCache, when it was made as ever.
        Raises CaptureFailed where it does not, and what the recorder does.
        """
        recorder = self.pool.recorder
        with recorder.lock:
            self.pool.begin()
            buffers = Buffers(self.tensors)
            buffers.fill(self.tensors)
            self.observer.recording = True
            try:
                if self.observer.used:  # compiled blocks, which rested while the call was watched
                    recorder.rehearse(self.device, lambda: self._call_on(buffers.tensors))
                self.observer.reset()
                recording, (out, tape) = recorder.record(self.device, lambda: self._call_on(buffers.tensors))
            finally:
                self.observer.recording = False
            self.pool.grow(recording, self.device)
            if not self.weights.is_current():
                raise CaptureFailed("its weights were moved while it was recorded")
            captured = CapturedCall(
                self.key,
                self.pool,
                recording,
                buffers,
                out,
                tape,
                self.weights.digest,
                self.weights.outline(),
                self.observer,
            )
            out, _, handed = captured.run(self.tensors)
            difference = _difference([*tensors_of(out), *handed], expected)
        if difference is not None:
            raise CaptureFailed(f"its recording differs from the call itself by {difference:.1e} of the largest value")
        return captured

    def _call_on(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Tape | None]:
        """The call on these tensors; DeepCache's run hears nothing of it."""
        count = len(tensors) - len(self.features)
        args, kwargs = tree_spec.rebuild(self.key.call, tensors[:count])
        given = dict(zip(self.features, tensors[count:], strict=True))
        with self.taps.taped(given) if self.taps is not None else nullcontext() as tape:
            return self.inner(*args, **kwargs), tape


def tensors_of(out: Any) -> list[torch.Tensor]:
    """The tensors in what a call returned."""
    tensors: list[torch.Tensor] = []
    tree_spec.flatten(out, tensors)
    return tensors


def _difference(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float | None:
    if len(tensors) != len(expected):
        return float("inf")
    return largest_difference(list(tensors), list(expected))
