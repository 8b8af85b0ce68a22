"""A recorded model call: buffers that its inputs are copied into, and outputs that are copied out."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..signature import tree_spec
from ..signature.tensors import empty_dense_like
from .recorder import CaptureFailed

if TYPE_CHECKING:
    from ..cache.graph_cache import GraphCache
    from ..cache.lease import Lease
    from ..dispatch.block_observer import BlockObserver
    from ..step_cache.capture_io import Tape
    from .capture_key import CaptureKey
    from .recorder import Recording


class Buffers:
    """Tensors at addresses of their own, one for each input; empty ones are only shapes and stay as they are."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._filled = [index for index, tensor in enumerate(tensors) if tensor.numel()]
        # Not made for inference alone: they are written to in any mode.
        with torch.inference_mode(False):
            self.tensors = [empty_dense_like(tensor) if tensor.numel() else tensor for tensor in tensors]
        self._targets = [self.tensors[index] for index in self._filled]
        self.device = self._targets[0].device if self._targets else None
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self._targets)

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the inputs in."""
        torch._foreach_copy_(self._targets, [tensors[index] for index in self._filled], non_blocking=True)


class SharedMemory(Protocol):
    """Memory that captured calls of a device share."""

    def share(self, device: torch.device) -> int:
        """Bytes of it that each captured call of the device counts as its own."""

    def leave(self, member: CapturedCall) -> None:
        """`member` has released its memory."""


class CapturedCall:
    """One recorded call of a model, kept in the graph cache as a compiled graph is.

    buffers: its inputs, with the features that a skipped call takes. out: what it returned. tape: what it handed to
        DeepCache, None where that has no part in it. digest, outline: of the model when it was recorded
        (`WeightSnapshot`). observer: tells the compiled blocks inside; they live as long as the recording.
    """

    saved_as: str | None = None

    def __init__(
        self,
        key: CaptureKey,
        pool: SharedMemory,
        recording: Recording,
        buffers: Buffers,
        out: Any,
        tape: Tape | None,
        digest: str,
        outline: int,
        observer: BlockObserver,
    ):
        self.key, self._pool, self._recording, self._buffers = key, pool, recording, buffers
        self._returned: list[torch.Tensor] = []
        self._spec = tree_spec.flatten(out, self._returned)
        self.tape = tape
        self.digest, self.outline = digest, outline
        self.device = buffers.device
        self._kernels = {id(graph): (entry, graph) for entry, graph, _ in observer.used}
        self._counters = Counter(counter for *_, counter in observer.used)
        self._eager_calls = observer.eager_calls

        # Its model may go with nobody saying so, and garbage is no place to take the cache's lock.
        weakref.finalize(key.model(), _release, weakref.ref(self)).atexit = False

    @property
    def buffer_bytes(self) -> int:
        """Bytes outside of the shared memory."""
        return self._buffers.nbytes

    @property
    def nbytes(self) -> int:
        """Its buffers, and its part of the memory that recordings share."""
        return self._buffers.nbytes + self._pool.share(self.device) if self._recording is not None else 0

    def release(self) -> None:
        """Let go of all memory; it is of no use any more."""
        self._recording = self.tape = None
        self._buffers, self._returned = Buffers(()), []
        self._pool.leave(self)

    def has_kernels(self) -> bool:
        """Whether the compiled blocks inside are still what calls of the blocks would use."""
        return all(any(graph is kept for kept in entry.graphs) for entry, graph in self._kernels.values())

    def lease_kernels(self, cache: GraphCache, lease: Lease) -> None:
        """A run replays the call: the compiled blocks inside count as found by it, and stay while it lasts."""
        for entry, _ in self._kernels.values():
            cache.get(entry.key, lease)

    def count(self) -> int:
        """A replay ran its compiled blocks once more; the number of those inside that ran uncompiled."""
        for counter, calls in self._counters.items():
            counter.hits += calls
        return self._eager_calls

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Sequence[Hashable | None], list[torch.Tensor]]:
        """Replay for these inputs: what the call returns, in tensors of its own, and what it hands to DeepCache,
        in tensors that are good until the next replay. To be called with the recorder's lock held."""
        if self._recording is None:
            raise CaptureFailed("its model is gone")
        self._buffers.fill(tensors)
        self._recording.replay()
        out = tree_spec.rebuild(self._spec, [tensor.clone() for tensor in self._returned])
        return out, self.tape.parts if self.tape else (), self.tape.tensors if self.tape else []


def _release(call: weakref.ref[CapturedCall]) -> None:
    released = call()
    if released is not None:
        released.release()
