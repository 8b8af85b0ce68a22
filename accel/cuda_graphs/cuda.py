"""Capturing with `torch.cuda.graph`, on a stream of its own and in one memory pool per device.

A captured graph reads and writes fixed addresses. Whoever replays it copies the inputs to where they were during the
capture, takes the outputs away before anything else is replayed, and answers for the addresses of the weights.

Follows torch's notes on CUDA semantics ("CUDA Graphs", "Graph memory management"), its `make_graphed_callables`, and
`torch/_inductor/cudagraph_trees.py`, `CUDAGraphNode._record`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..core import torch_internals
from ..core.events import log
from ..core.reasons import Reason
from ..dispatch.call_times import CallTime
from .conditions import check_device

LEAST_FREE = 512 << 20
"""Bytes that must be free on the device for a capture: a graph is not worth an image that fails."""

_SMALL = 1 << 20
"""Bytes; torch serves requests up to this size from segments of their own."""


class BallastedPool:
    """Memory of one device that captured graphs share; each graph references it, so it goes with the last.

    Between replays torch's allocator counts most of a graph's private pool as free, since no tensor is in it, yet
    nobody else can have it. Programs that reckon with `reserved - active` would load more than fits. So storages that
    nobody touches hold the idle blocks; they are released for a capture, which may use the blocks.

    stream: on which all of them are captured, since idle blocks belong to a stream.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream):
        self.handle = torch.cuda.graph_pool_handle()
        self._device, self._stream = device, stream
        self._ballast: list[torch.UntypedStorage] = []

    def release(self) -> None:
        """Release the idle blocks, before a capture."""
        self._ballast.clear()

    def hold(self) -> None:
        """Hold the idle blocks, after a capture or a failed one. Where torch refuses, they count as free."""
        try:
            self._fill(idle_blocks(torch.cuda.memory_snapshot(self.handle, include_traces=False), self._device.index))
        except (AttributeError, ImportError, LookupError, TypeError, RuntimeError) as error:
            self._ballast.clear()
            log.debug("idle memory of CUDA graphs counts as free: %s", error)

    def _fill(self, sizes: list[int]) -> None:
        if not sizes:
            return
        index, before = self._device.index, torch.cuda.memory_reserved(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            torch_internals.POOL_BEGIN.get()(index, self.handle)
            try:
                # Storages, since torch may be set to fill new tensors.
                self._ballast = [torch.UntypedStorage(size, device=self._device) for size in sizes]
            finally:
                torch_internals.POOL_END.get()(index, self.handle)
                torch_internals.POOL_RELEASE.get()(index, self.handle)
        if torch.cuda.memory_reserved(self._device) > before:
            self._ballast.clear()  # it took new memory rather than the idle blocks


def idle_blocks(segments: Iterable[Mapping[str, Any]], device: int) -> list[int]:
    """Bytes of each idle block that a request of its size would get, the largest first. segments: of one pool, as
    `torch.cuda.memory_snapshot` gives them."""
    sizes = [
        block["size"]
        for segment in segments
        if segment["device"] == device and segment["segment_type"] == "large"
        for block in segment["blocks"]
        if block["state"] == "inactive" and block["size"] > _SMALL
    ]
    return sorted(sizes, reverse=True)


class CudaGraph:
    """The work of one call. Its memory is free once nobody holds the graph or what the call returned. pool: kept alive
    by its graphs. nbytes: by how much the capture has grown it."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: BallastedPool, nbytes: int):
        self._graph, self._pool, self.nbytes = graph, pool, nbytes

    def replay(self) -> None:
        """Do the work again, on the same addresses, after everything queued on the current stream."""
        self._graph.replay()


class CudaCapturer:
    """Captures for NVIDIA cards and torch's own allocator. Outputs of a graph are valid until the next is captured or
    replayed, since graphs share memory.

    lock: held during a warm-up, a capture or a replay, until the outputs are taken away.

    Memory of released graphs is free for others once torch's cache is emptied; torch does so before it raises
    OutOfMemoryError, and hosts after they unload a model.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pools: weakref.WeakValueDictionary[torch.device, BallastedPool] = weakref.WeakValueDictionary()
        self._homes: dict[torch.device, torch.cuda.Stream] = {}
        """The stream that the calls are made on: graphs of one pool must not run concurrently."""

    def why_not(self, device: torch.device) -> Reason | None:
        """Why no call on the device can be captured or replayed here and now; None where it can. Quick."""
        return check_device(device, self._homes.get(device))

    def time_call(self, device: torch.device, call: Callable[[], Any]) -> tuple[Any, Callable[[], bool]]:
        """The result of the call, and a question that waits for it: whether the device waited for Python in it, which
        a replay would spare."""
        timed = CallTime(device)
        out = call()
        timed.stop()
        return out, lambda: timed.device_waited

    def has_room(self, device: torch.device) -> bool:
        """Whether the call that was just made could be made aside without taking memory from anybody."""
        # What torch holds idle is about what the call took at its height. Aside, none of it can be used.
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] >= idle + LEAST_FREE

    def warm_up(self, device: torch.device, call: Callable[[], Any]) -> Any:
        """The result of the call, made on the stream of captures: it loads kernels and makes handles, which no capture
        may."""
        _require_memory(device)
        here, aside = torch.cuda.current_stream(device), self._stream(device)
        aside.wait_stream(here)
        try:
            with torch.cuda.device(device), torch.cuda.stream(aside):
                return call()
        finally:
            here.wait_stream(aside)

    def capture(self, device: torch.device, call: Callable[[], Any]) -> tuple[CudaGraph, Any]:
        """The captured graph, and what the call returned, whose values are not computed yet. Whatever it raises, the
        device is as before, and nothing is kept."""
        here, aside = torch.cuda.current_stream(device), self._stream(device)
        pool = self._pools.get(device)
        if pool is None:
            pool = self._pools[device] = BallastedPool(device, aside)
        graph = torch.cuda.CUDAGraph()
        pool.release()
        try:
            _require_memory(device)
            with torch.cuda.device(device), _split_from_others(device):
                # `torch.cuda.graph` does this at its start; done before, the difference in memory is the graph's.
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
                # The capture begins with a few bytes for a random seed. Were there none, it could not be undone: the
                # graph's destructor would end the process (`CUDAGraph::~CUDAGraph`, torch 2.11). Here it can.
                with torch.cuda.stream(aside):
                    spare = torch.empty(1, device=device)
                before = torch.cuda.memory_reserved(device)
                try:
                    how = {"pool": pool.handle, "stream": aside, "capture_error_mode": "thread_local"}
                    out = _first_cause(torch.cuda.graph(graph, **how), call)
                except BaseException:
                    self._abandon(device, pool)
                    raise
                finally:
                    # `torch.cuda.graph` leaves its stream current when ending the capture fails.
                    torch.cuda.set_stream(here)
                nbytes = max(torch.cuda.memory_reserved(device) - before, 0)
                del spare
        finally:
            pool.hold()
        self._homes[device] = here
        return CudaGraph(graph, pool, nbytes), out

    def give_back(self) -> None:
        """Free the memory of the stream of warm-ups, which nothing else uses."""
        torch_internals.CLEAR_WORKSPACES.get()()
        torch.cuda.empty_cache()

    def reset(self) -> None:
        """Have later captures share no memory with earlier ones."""
        self._pools.clear()
        self._homes.clear()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _abandon(self, device: torch.device, pool: BallastedPool) -> None:
        """Give the pool and the stream of a failed capture up, so that no later one meets what is left there.

        Where ending the capture failed, torch has not told its allocator (`CUDAGraph::capture_end`), which would go on
        as if the capture lasted, and keep the pool for ever.
        """
        self._pools.pop(device, None)
        self._streams.pop(device, None)
        with suppress(RuntimeError, torch_internals.Lacking):  # the allocator has been told
            torch_internals.POOL_END.get()(device.index, pool.handle)
            torch_internals.POOL_RELEASE.get()(device.index, pool.handle)


def _first_cause(capture: Any, call: Callable[[], Any]) -> Any:
    """The result of the call, made inside `capture`. Where leaving `capture` raises too, the call's own exception is
    raised: it says what invalidated the capture, and may be the user's interrupt."""
    cause = None
    try:
        with capture:
            try:
                return call()
            except BaseException as error:
                cause = error
                raise
    except BaseException as error:
        if cause is None or error is cause:
            raise
    try:
        raise cause
    finally:
        del cause  # its traceback references this frame, and so what was computed


@contextmanager
def _split_from_others(device: torch.device) -> Iterator[None]:
    """A context that leaves the device's random numbers and cuBLAS's workspaces as others have them.

    A capture registers itself with the state of the default generator. One that cannot be ended leaves that state
    unusable outside captures for good (torch 2.11), with tensors of the mode that the capture began in.

    CuBLAS keeps a workspace for each stream, and a graph would have the address of one that anybody may free, as
    inductor's graphs do. So a graph's own are allocated in its pool during the capture, and returned to it at the end.
    """
    generator, clear_workspaces = torch.cuda.default_generators[device.index], torch_internals.CLEAR_WORKSPACES.get()
    kept = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        clear_workspaces()
        yield
    finally:
        generator.graphsafe_set_state(kept)
        clear_workspaces()


def _require_memory(device: torch.device) -> None:
    """Raise OutOfMemoryError where less than `LEAST_FREE` is free, before the device itself does."""
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free < LEAST_FREE:
        raise torch.OutOfMemoryError(f"{free >> 20} MB are free on {device}, for a graph {LEAST_FREE >> 20} should be")
