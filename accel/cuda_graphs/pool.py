"""Captured model calls, and the memory that they share.

The rule: they have what compiled graphs leave of the cache's budget. Where that is too little, the least recently used
of other runs are evicted; where it still is, all are dropped. All are dropped, too, when the host asks for their
memory.

What one capture makes the pool grow by serves later ones too, and is freed only with the last captured call. So each
call counts an equal part of its device's pool, and the sum is right whichever of them are evicted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..cache.graph_cache import NoGraph
from ..core.reasons import Reason
from ..dispatch.block_runner import NotReady
from ..signature import tree_spec
from ..signature.tensors import empty_dense_like
from .conditions import CaptureFailed

if TYPE_CHECKING:
    from ..cache.entry import Lease
    from ..cache.graph_cache import GraphCache
    from ..modules.snapshot import WeightSnapshot
    from .cuda import CudaCapturer, CudaGraph
    from .host_constants import HostConstants


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
        if self._targets:
            torch._foreach_copy_(self._targets, [tensors[index] for index in self._filled], non_blocking=True)


class CapturedCall:
    """A captured call of a model, an entry of the graph cache like a compiled graph.

    capture: the `CallCapture`, whose observer has the compiled graphs inside, which live as long as this does. buffers:
    of the inputs. loaded: of weights that the host loads anew for each run. out: what the call returned. constants: are
    read by the graph. held: the streamed weights that must be held for a replay.
    """

    saved_as: str | None = None

    def __init__(self, capture: Any, graph: CudaGraph, buffers: Buffers, loaded: Buffers, out: Any):
        key, weights, observer = capture.call.key, capture.weights, capture.observer
        self.key, self._pool, self._buffers, self._loaded, self.held = key, capture.pool, buffers, loaded, capture.held
        self._graph: CudaGraph | None = graph
        self.constants: HostConstants | None = capture.constants
        self._returned: list[torch.Tensor] = []
        self._spec = tree_spec.flatten(out, self._returned)
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
        return self._buffers.nbytes + self._loaded.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers, and its part of the shared memory."""
        return self.buffer_bytes + self._pool.share(self.device) if self._graph is not None else 0

    def release(self) -> None:
        """Free all memory; the call cannot be replayed any more."""
        self._graph = self.constants = None
        self._buffers, self._loaded, self._returned = Buffers(()), Buffers(()), []
        self._pool.leave(self)

    def refresh(self, weights: WeightSnapshot) -> None:
        """Take the values of the same weights, loaded anew, with the capturer's lock held."""
        self._loaded.fill(weights.find_loaded_tensors())

    def has_kernels(self) -> bool:
        """Whether the compiled graphs inside are still those that the blocks use."""
        return all(entry.has(graph) and not entry.benchmarks(graph).wrong for entry, graph in self._kernels.values())

    def lease_kernels(self, cache: GraphCache, lease: Lease) -> None:
        """Put the compiled graphs inside under the lease of a run that replays the call."""
        for entry, _ in self._kernels.values():
            cache.get(entry.key, lease)

    def count(self) -> int:
        """Count a replay for the compiled graphs inside, and return how many block calls inside ran uncompiled."""
        for counter, calls in self._counters.items():
            counter.hits += calls
        return self._eager_calls

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result of the call for these inputs, replayed into new tensors. The capturer's lock must be held."""
        if self._graph is None:
            raise RuntimeError("its model was unloaded")
        self._buffers.fill(tensors)
        self._graph.replay()
        return tree_spec.rebuild(self._spec, [tensor.clone() for tensor in self._returned])


class CapturePool:
    """The living captured calls of the process' one capturer, and their memory. Threads may share it."""

    def __init__(self, capturer: CudaCapturer):
        self.capturer = capturer
        self._grown: dict[torch.device, int] = {}
        # Not a WeakSet: a garbage collection that releases a member while another thread iterates would raise there.
        self._members: dict[int, weakref.ref[CapturedCall]] = {}
        self.given_way = 0
        """How often the host has needed their memory."""
        self.on_admitted: Callable[[torch.device], None] | None = None
        """Called with the device of each captured call that was admitted. Must not raise."""

    @property
    def members(self) -> list[CapturedCall]:
        """The captured calls that are alive, the oldest first."""
        return [member for ref in list(self._members.values()) if (member := ref()) is not None]

    def share(self, device: torch.device) -> int:
        """Bytes of a device's shared memory that each captured call there counts."""
        return self._grown.get(device, 0) // max(len(self._members_on(device)), 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the shared memory and of all input buffers."""
        return sum(map(self.nbytes_on, {member.device for member in self.members}))

    def nbytes_on(self, device: torch.device) -> int:
        """`nbytes` of one device."""
        members = self._members_on(device)
        return (self._grown.get(device, 0) if members else 0) + sum(member.buffer_bytes for member in members)

    def begin(self) -> None:
        """Count from 0 again before a capture, on devices without captured calls."""
        left = {member.device for member in self.members}
        self._grown = {device: grown for device, grown in self._grown.items() if device in left}
        if not left:
            self.capturer.reset()

    def grow(self, graph: CudaGraph, device: torch.device) -> None:
        """Count what a capture has taken, whether or not the graph is kept."""
        self._grown[device] = self._grown.get(device, 0) + graph.nbytes

    def leave(self, member: CapturedCall) -> None:
        """Forget a captured call that has released its memory."""
        self._members.pop(id(member), None)

    def admit(self, member: CapturedCall, cache: GraphCache, lease: Lease) -> None:
        """Add a captured call, by the rule above. lease: of its run.

        To be called with the capturer's lock held since before the capture.

        Raises:
            CaptureFailed: it does not even fit alone.
            NoGraph: it does not fit beside others of this run.
            NotReady: those of other runs are gone now, and a later call may be captured.
        """
        members, place = self._members, id(member)
        members[place] = weakref.ref(member, lambda _: members.pop(place, None))
        captured = {known.key for known in self.members}
        room = cache.room_for(captured)
        for key in [key for key in cache.keys() if key in captured and key not in lease.keys]:  # oldest use first
            if self.nbytes > room:
                cache.evict(key)
        if self.nbytes <= room:
            if self.on_admitted is not None:
                self.on_admitted(member.device)
            return
        reason = Reason("captures_full", needed=self.nbytes >> 20, room=max(room, 0) >> 20)
        self.leave(member)
        self.drop(cache)  # what they share is freed with the last of them only
        if captured - lease.keys.keys():
            raise NotReady  # there is room only now
        raise CaptureFailed(reason) if captured == {member.key} else NoGraph(member.key, reason)

    def give_way(self, cache: GraphCache, device: torch.device) -> None:
        """Evict the captured calls on the device, whose memory the host needs; waits for a running replay."""
        self.given_way += 1
        with self.capturer.lock:
            self.drop(cache, lambda call: call.device == device)

    def drop(self, cache: GraphCache, matches: Callable[[CapturedCall], bool] = lambda call: True) -> None:
        """Evict the captured calls that match."""
        for member in filter(matches, self.members):
            cache.evict(member.key)

    def _members_on(self, device: torch.device) -> list[CapturedCall]:
        return [member for member in self.members if member.device == device]


def _release(call: weakref.ref[CapturedCall]) -> None:
    if (released := call()) is not None:
        released.release()
