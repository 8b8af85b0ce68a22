"""Capturing one model call: a dry run first, then the capture, and a comparison of its first replay with the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..core.reasons import Reason
from ..signature import tree_spec
from ..signature.output_check import compare_to_rounding
from .conditions import CaptureFailed, CaptureStopped, DryRun
from .host_constants import HostConstants
from .pool import Buffers, CapturedCall, CapturePool

if TYPE_CHECKING:
    from ..dispatch.block_observer import BlockObserver
    from ..modules.snapshot import WeightSnapshot
    from .capture_key import CaptureKey


class Call(NamedTuple):
    """A call that may be captured or replayed. tensors: its inputs."""

    key: CaptureKey
    tensors: Sequence[torch.Tensor]
    device: torch.device


@dataclass(frozen=True)
class CallCapture:
    """The capture of one call, which `inner` makes. weights: the model's. held: as of `CaptureHost.hold`. constants:
    from the dry run of this call or of an earlier one of its key."""

    call: Call
    inner: Callable[..., Any]
    pool: CapturePool
    observer: BlockObserver
    weights: WeightSnapshot
    held: frozenset
    constants: HostConstants

    def dry_run(self) -> Reason | None:
        """Why the call cannot be captured; None where it can. Warms the capturer up as well."""
        buffers = Buffers(self.call.tensors)
        self.observer.runs_eagerly = True
        try:
            with self.pool.capturer.lock:
                buffers.fill(self.call.tensors)
                mode = DryRun([*self.weights.tensors(), *buffers.tensors], self.call.device)

                def call() -> None:
                    with self.constants, mode:
                        self._call_on(buffers.tensors)

                with suppress(CaptureStopped):
                    self.pool.capturer.warm_up(self.call.device, call)
                self.constants.is_complete = True
        finally:
            self.observer.runs_eagerly = False
        return mode.reason

    def capture(self, expected: Sequence[torch.Tensor]) -> CapturedCall:
        """The captured call. Raises CaptureFailed: its first replay is not what the uncaptured call returned
        (`expected`). What the capturer raises passes through."""
        capturer = self.pool.capturer
        with capturer.lock:
            self.pool.begin()
            buffers, loaded = Buffers(self.call.tensors), Buffers(self.weights.find_loaded_tensors())
            buffers.fill(self.call.tensors)
            loaded.fill(self.weights.find_loaded_tensors())

            def call() -> Any:
                with self.weights.replace_tensors(loaded.tensors), self.constants:
                    return self._call_on(buffers.tensors)

            self.observer.capturing = True
            try:
                if self.observer.used:  # compiled blocks, which were not part of the dry run
                    capturer.warm_up(self.call.device, call)
                self.observer.reset()
                graph, out = capturer.capture(self.call.device, call)
            finally:
                self.observer.capturing = False
            self.pool.grow(graph, self.call.device)
            if not self.weights.is_current():
                raise CaptureFailed(Reason("model_changes"))
            captured = CapturedCall(self, graph, buffers, loaded, out)
            made = tensors_of(captured.run(self.call.tensors))
            has_all = len(made) == len(expected)
            depth = max(1, len(self.observer.used) + self.observer.eager_calls)
            excess = compare_to_rounding(made, list(expected), depth=depth) if has_all else float("inf")
        if excess is not None:
            raise CaptureFailed(Reason("replay_differs", times=f"{excess:.1f}"))
        return captured

    def _call_on(self, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = tree_spec.rebuild(self.call.key.call, tensors)
        return self.inner(*args, **kwargs)


def tensors_of(out: Any) -> list[torch.Tensor]:
    """The tensors in what a call returned."""
    tensors: list[torch.Tensor] = []
    tree_spec.flatten(out, tensors)
    return tensors
