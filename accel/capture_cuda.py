"""CUDA graphs as torch offers them: `torch.cuda.graph`, on a stream of its own, in one memory pool a device.

Rules followed here: torch's notes on CUDA semantics ("CUDA Graphs", "Graph memory management") and its
`make_graphed_callables`. Tested without a GPU is what surrounds this class, not the class itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

LEAST_FREE = 512 << 20
"""Bytes that must be free on the device before anything is recorded; graphs are not worth an image that fails."""


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, nbytes: int):
        self._graph = graph
        self.nbytes = nbytes

    def replay(self) -> None:
        self._graph.replay()


class CudaRecorder:
    """A `capture.Recorder` for NVIDIA cards and torch's own allocator."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pools: dict[torch.device, Any] = {}
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
        if torch.cuda.current_stream(device) != self._homes.get(device, torch.cuda.current_stream(device)):
            return "it runs on another CUDA stream than the calls before it"
        return None

    def rehearse(self, device: torch.device, call: Callable[[], Any]) -> Any:
        # Libraries keep workspaces for each stream; made during a capture they would lie in its pool.
        _require_memory(device)
        here, aside = torch.cuda.current_stream(device), self._stream(device)
        aside.wait_stream(here)
        try:
            with torch.cuda.device(device), torch.cuda.stream(aside):
                return call()
        finally:
            here.wait_stream(aside)

    def record(self, device: torch.device, call: Callable[[], Any]) -> tuple[_CudaRecording, Any]:
        _require_memory(device)
        here, aside = torch.cuda.current_stream(device), self._stream(device)
        if device not in self._pools:
            self._pools[device] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            # As `torch.cuda.graph` does at its start, so that the difference is the graph's.
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(device)
            try:
                with torch.cuda.graph(graph, pool=self._pools[device], stream=aside, capture_error_mode="thread_local"):
                    out = call()
            except BaseException:
                # Whatever it has left in its pool, no later one meets it there.
                self._pools.pop(device, None)
                raise
            finally:
                # It leaves its stream current when ending the capture fails.
                torch.cuda.set_stream(here)
            nbytes = max(torch.cuda.memory_reserved(device) - before, 0)
        self._homes[device] = here
        return _CudaRecording(graph, nbytes), out

    def begin_anew(self) -> None:
        self._pools.clear()
        self._homes.clear()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _require_memory(device: torch.device) -> None:
    """Raise OutOfMemoryError before the device itself does, where little is free."""
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free < LEAST_FREE:
        raise torch.OutOfMemoryError(f"{free >> 20} MB are free on {device}, for a graph {LEAST_FREE >> 20} should be")
