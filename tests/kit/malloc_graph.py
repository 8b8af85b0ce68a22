"""A stand-in for comfy-aimdo's malloc graph and core's `comfy.model_prefetch` around it, without a GPU.

Core 0.34 and later record what a model allocates and frees, and hand out the same memory in the next call. The stand-in
only marks where scopes and pauses begin and end; torch's profiler tells every allocation of this thread, those of
generated code too, and `Record` holds them against the rules of comfy-aimdo's `src/malloc-graph.c`:

- memory taken in a scope is recorded, unless recording is paused;
- recorded memory may be freed in the same scope, as deep as it was taken, while recording is not paused: anything else
  ends the process;
- what is not freed when its scope ends is a rogue: its pages leak, and freeing it in a later scope ends the process.

Pauses do not nest: the first end of one ends all.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch._C._profiler import _EventType, _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "malloc graph: "


def _mark(what: str) -> None:
    with record_function(MARK + what):
        pass


class FakeMallocGraph:
    """comfy-aimdo's `MallocGraph`, of one thread."""

    _comfy_active = False

    def __init__(self):
        self._comfy_cuda_graph_modules: list = []
        self.rogue_count = 0
        self._names: list[str | None] = []

    def push(self, name: str | None = None) -> None:
        if name is None and self._names:
            raise RuntimeError("aimdo memory compile error")
        self._names.append(name)
        _mark("push")

    def pop(self) -> bool:
        self._names.pop()
        _mark("pop")
        return False

    def iterate(self, name: str | None = None) -> bool:
        if len(self._names) > 1:
            self.pop()
        if name is not None:
            self.push(name)
        return False

    def pause(self, sync: bool = False) -> None:
        assert not sync
        _mark("pause")

    def resume(self, sync: bool = False) -> None:
        _mark("resume")

    def abort(self) -> None:
        while self._names:
            self.pop()


@dataclass
class Record:
    """What of one run broke the rules. recorded: allocations. rogues: those that outlived their scopes."""

    violations: list[str] = field(default_factory=list)
    recorded: int = 0
    rogues: int = 0
    pauses: int = 0

    def read(self, profiler: profile) -> None:
        events = profiler.profiler.kineto_results.experimental_event_tree()
        events = sorted(_all(events), key=lambda event: event.start_time_ns)
        marks = [event for event in events if event.name.startswith(MARK)]
        thread = marks[0].start_tid if marks else None
        scopes: list[dict[int, int]] = []
        """Of each open scope, what is live in it: address → bytes."""
        lost: set[int] = set()
        is_paused = False
        for event in events:
            if event.start_tid != thread:
                continue
            if event.tag == _EventType.Allocation:
                address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
                if size > 0:
                    lost.discard(address)
                    if scopes and not is_paused:
                        scopes[-1][address] = size
                        self.recorded += 1
                    continue
                depth = next((depth for depth, scope in enumerate(scopes) if address in scope), None)
                if depth is None:
                    if address in lost and scopes:
                        self.violations.append(f"{-size} bytes freed in a scope after their own")
                    lost.discard(address)
                    continue
                del scopes[depth][address]
                if is_paused:
                    self.violations.append(f"{-size} recorded bytes freed during a pause")
                elif depth + 1 != len(scopes):
                    self.violations.append(f"{-size} bytes of depth {depth + 1} freed at depth {len(scopes)}")
            elif event.name.startswith(MARK):
                what = event.name[len(MARK) :]
                if what == "push":
                    scopes.append({})
                elif what == "pop":
                    left = scopes.pop()
                    lost |= left.keys()
                    self.rogues += len(left)
                else:
                    self.pauses += what == "pause"
                    if (what == "pause") == is_paused:
                        self.violations.append(f"{what} within a pause" if is_paused else "resumed twice")
                    is_paused = what == "pause"
        if scopes or is_paused:
            self.violations.append("a scope or a pause was left open")


def _all(events) -> Iterator:
    for event in events:
        yield event
        yield from _all(event.children)


class FakePrefetch(types.ModuleType):
    """`comfy.model_prefetch` as of 0.34 and later, as far as scopes go."""

    def __init__(self, real: types.ModuleType | None = None):
        super().__init__("comfy.model_prefetch")
        known = {} if real is None else vars(real)
        self.__dict__.update({name: value for name, value in known.items() if not hasattr(type(self), name)})
        self.MALLOC_GRAPHS: dict[int, FakeMallocGraph] = {}
        self.MALLOC_GRAPH_USED = False

    def _active(self) -> FakeMallocGraph | None:
        graph = self.MALLOC_GRAPHS.get(threading.get_ident())
        return graph if graph is not None and graph._comfy_active else None

    @contextmanager
    def pause_malloc_graph(self, sync: bool = False) -> Iterator[None]:
        graph = self._active()
        if graph is not None:
            graph.pause(sync)
        try:
            yield
        finally:
            if graph is not None:
                graph.resume(sync)

    def malloc_graph_begin(self, device: torch.device) -> None:
        graph = self.MALLOC_GRAPHS.setdefault(threading.get_ident(), FakeMallocGraph())
        graph.push()
        graph._comfy_active = self.MALLOC_GRAPH_USED = True

    def malloc_graph_end(self) -> None:
        graph = self._active()
        if graph is not None:
            graph.pop()
            graph._comfy_active = False

    @contextmanager
    def malloc_graph_scope(self, device: torch.device) -> Iterator[None]:
        self.malloc_graph_begin(device)
        try:
            yield
        except BaseException:
            self.cleanup_prefetch_queues()
            raise
        self.malloc_graph_end()

    def prefetch_queue_pop(self, queue, device, module, *args, malloc_scope: str | None = None, **kwargs) -> None:
        graph = self._active()
        if graph is not None and malloc_scope is not None:
            graph.iterate(malloc_scope if module is not None else None)

    def cleanup_prefetch_queues(self) -> None:
        graph = self.MALLOC_GRAPHS.pop(threading.get_ident(), None)
        if graph is not None:
            graph._comfy_active = False
            graph.abort()
        self.MALLOC_GRAPH_USED = False


def installed(monkeypatch) -> FakePrefetch:
    """The stand-in, in the place of core's module for one test."""
    import comfy

    fake = FakePrefetch(sys.modules.get("comfy.model_prefetch"))
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", fake)
    monkeypatch.setattr(comfy, "model_prefetch", fake, raising=False)
    return fake


@contextmanager
def recorded() -> Iterator[Record]:
    """Within the context allocations are watched; afterwards the Record says what was wrong."""
    record = Record()
    settings = _ExperimentalConfig(verbose=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, experimental_config=settings) as profiler:
        yield record
    record.read(profiler)
