"""A captured model call: buffers that its inputs are copied into, and outputs that are copied out."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..core.reasons import Reason
from ..signature import tree_spec
from ..signature.tensors import empty_dense_like
from .capturer import CaptureFailed

if TYPE_CHECKING:
    from ..cache.graph_cache import GraphCache
    from ..cache.lease import Lease
    from ..dispatch.block_observer import BlockObserver
    from ..modules.snapshot import WeightSnapshot
    from ..step_cache.capture_io import CaptureIO
    from .capture_key import CaptureKey
    from .capturer import CapturedGraph


class Buffers:
    """One tensor at a fixed address for each input. Empty inputs are shapes only and are kept as they are."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._filled = [index for index, tensor in enumerate(tensors) if tensor.numel()]
        # Inference tensors could not be written to in other modes.
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
    """A captured call of a model, an entry of the graph cache like a compiled graph.

    buffers: of its inputs, including the features that a skipped call takes. out: what it returned. io: what it
        handed to DeepCache, None without one. weights: of the model, as captured. observer: has the compiled graphs
        inside, which live as long as this does.
    """

    saved_as: str | None = None

    def __init__(
        self,
        key: CaptureKey,
        pool: SharedMemory,
        graph: CapturedGraph,
        buffers: Buffers,
        out: Any,
        io: CaptureIO | None,
        weights: WeightSnapshot,
        observer: BlockObserver,
    ):
        self.key, self._pool, self._buffers = key, pool, buffers
        self._graph: CapturedGraph | None = graph
        self._returned: list[torch.Tensor] = []
        self._spec = tree_spec.flatten(out, self._returned)
        self.io = io
        self.digest, self.outline = weights.digest, weights.outline()
        self.device = buffers.device
        self._kernels = {id(graph): (entry, graph) for entry, graph, _ in observer.used}
        self._counters = Counter(counter for *_, counter in observer.used)
        self._eager_calls = observer.eager_calls

        # The model may be collected at any time, and a finalizer must not take the cache's lock: it frees memory only.
        weakref.finalize(key.model(), _release, weakref.ref(self)).atexit = False

    @property
    def buffer_bytes(self) -> int:
        """Bytes outside the shared memory."""
        return self._buffers.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers, and its part of the shared memory."""
        return self._buffers.nbytes + self._pool.share(self.device) if self._graph is not None else 0

    def release(self) -> None:
        """Free all memory; the call cannot be replayed any more."""
        self._graph = self.io = None
        self._buffers, self._returned = Buffers(()), []
        self._pool.leave(self)

    def has_kernels(self) -> bool:
        """Whether the compiled graphs inside are still those that the blocks use."""
        return all(any(graph is kept for kept in entry.graphs) for entry, graph in self._kernels.values())

    def lease_kernels(self, cache: GraphCache, lease: Lease) -> None:
        """Put the compiled graphs inside under the lease of a run that replays the call."""
        for entry, _ in self._kernels.values():
            cache.get(entry.key, lease)

    def count(self) -> int:
        """Count one replay for the compiled graphs inside; the number of block calls inside that ran uncompiled."""
        for counter, calls in self._counters.items():
            counter.hits += calls
        return self._eager_calls

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Sequence[Hashable | None], list[torch.Tensor]]:
        """Replay for these inputs, with the capturer's lock held.

        What the call returns, in tensors of its own; then the parts and the tensors that it hands to DeepCache, which
        are valid until the next replay.
        """
        if self._graph is None:
            raise CaptureFailed(Reason("model_gone"))
        self._buffers.fill(tensors)
        self._graph.replay()
        out = tree_spec.rebuild(self._spec, [tensor.clone() for tensor in self._returned])
        return out, self.io.parts if self.io else (), self.io.tensors if self.io else []


def _release(call: weakref.ref[CapturedCall]) -> None:
    released = call()
    if released is not None:
        released.release()
