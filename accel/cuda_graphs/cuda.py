"""CUDA graphs as torch offers them: `torch.cuda.graph`, on a stream of its own, in one memory pool a device.

Rules followed here: torch's notes on CUDA semantics ("CUDA Graphs", "Graph memory management"), its
`make_graphed_callables`, and `torch/_inductor/cudagraph_trees.py`, `CUDAGraphNode._record`. Tested without a GPU is
what surrounds this class, not the class itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from .ballast import BallastedPool

LEAST_FREE = 512 << 20
"""Bytes that must be free on the device before anything is recorded; graphs are not worth an image that fails."""


class _CudaRecording:
    """pool: its memory, held so that the pool lasts as long as its last recording."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: BallastedPool, nbytes: int):
        self._graph, self._pool = graph, pool
        self.nbytes = nbytes

    def replay(self) -> None:
        self._graph.replay()


class CudaRecorder:
    """A `capture.Recorder` for NVIDIA cards and torch's own allocator.

    What recordings give back is free for others once somebody empties torch's cache: ComfyUI does after unloading,
    torch itself before it says that memory is short.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pools: weakref.WeakValueDictionary[torch.device, BallastedPool] = weakref.WeakValueDictionary()
        self._homes: dict[torch.device, torch.cuda.Stream] = {}
        """On which stream the calls come: recordings of one pool must not run beside each other."""

    def why_not(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"there are CUDA graphs for CUDA devices alone, and the model runs on {device}"
        if torch.version.hip is not None:
            return "CUDA graphs are not used on AMD's cards"
        if torch.cuda.get_allocator_backend() != "native":
            return "torch allocates with cudaMallocAsync: start ComfyUI with --disable-cuda-malloc for CUDA graphs"
        if torch.cuda.is_current_stream_capturing():
            return "somebody else's CUDA graph is being captured around it"
        home = self._homes.get(device)
        if home is not None and torch.cuda.current_stream(device) != home:
            return "it runs on another CUDA stream than the calls before it"
        return None

    def rehearse(self, device: torch.device, call: Callable[[], Any]) -> Any:
        # Kernels are loaded and chosen, handles made: none of it may happen during a capture.
        _require_memory(device)
        here, aside = torch.cuda.current_stream(device), self._stream(device)
        aside.wait_stream(here)
        try:
            with torch.cuda.device(device), torch.cuda.stream(aside):
                return call()
        finally:
            here.wait_stream(aside)

    def record(self, device: torch.device, call: Callable[[], Any]) -> tuple[_CudaRecording, Any]:
        here, aside = torch.cuda.current_stream(device), self._stream(device)
        pool = self._pools.get(device)
        if pool is None:
            pool = self._pools[device] = BallastedPool(device, aside)
        graph = torch.cuda.CUDAGraph()
        pool.lift()
        try:
            _require_memory(device)
            with torch.cuda.device(device), _own_random_state(device), _no_workspaces():
                # As `torch.cuda.graph` does at its start, so that the difference is the graph's.
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
                before = torch.cuda.memory_reserved(device)
                try:
                    how = {"pool": pool.handle, "stream": aside, "capture_error_mode": "thread_local"}
                    out = _first_cause(torch.cuda.graph(graph, **how), call)
                except BaseException:
                    self._leave(device, pool)
                    raise
                finally:
                    # It leaves its stream current when ending the capture fails.
                    torch.cuda.set_stream(here)
                nbytes = max(torch.cuda.memory_reserved(device) - before, 0)
        finally:
            pool.settle()
        self._homes[device] = here
        return _CudaRecording(graph, pool, nbytes), out

    def begin_anew(self) -> None:
        self._pools.clear()
        self._homes.clear()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _leave(self, device: torch.device, pool: BallastedPool) -> None:
        """After a capture that failed: no later one meets what it has left in its pool, nor its stream.

        Where ending it failed, torch has not told its allocator (`CUDAGraph::capture_end`), which would go on as if
        the capture lasted, and keep the pool for ever.
        """
        self._pools.pop(device, None)
        self._streams.pop(device, None)
        with suppress(RuntimeError):  # it has been told
            torch._C._cuda_endAllocateToPool(device.index, pool.handle)
            torch._C._cuda_releasePool(device.index, pool.handle)


def _first_cause(capture: Any, call: Callable[[], Any]) -> Any:
    """What the call returns, made inside of the context; what it raises, where leaving the context raises too.

    Ending a spoilt capture fails as well. What spoilt it says more, and may be the person who stopped the run.
    """
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
        del cause  # its traceback has this frame, and with it what was computed


@contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    """The device's random numbers go on afterwards as if nothing had been.

    A capture registers itself with the state of the default generator. One that cannot be ended leaves it unfit for
    random numbers outside of captures, for good (torch 2.11), and its tensors are of the mode it was begun in.
    """
    generator = torch.cuda.default_generators[device.index]
    kept = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(kept)


@contextmanager
def _no_workspaces() -> Iterator[None]:
    """Inside, cuBLAS gets its workspaces anew.

    It keeps one for each stream, and a recording would have the address of one that anybody may free (inductor's CUDA
    graphs do). So a recording's are made in its pool, during the capture, and are the pool's again at its end.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _require_memory(device: torch.device) -> None:
    """Raise OutOfMemoryError before the device itself does, where little is free."""
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free < LEAST_FREE:
        raise torch.OutOfMemoryError(f"{free >> 20} MB are free on {device}, for a graph {LEAST_FREE >> 20} should be")
