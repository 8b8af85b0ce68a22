"""The shared cache of compiled graphs: finds a graph or has it made, counts, and evicts. One per process."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Container, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from ..compile.compiled_graph import CompiledGraph, CompileFailed
from ..core.events import emit
from ..core.reasons import Reason, Refusal
from ..core.settings import DEFAULT_MAX_BYTES, DEFAULT_MAX_ENTRIES
from .entry import Entry, Lease

MOST_GRAPHS = 4
"""Graphs kept for one key; calls that fit none of them run eagerly. A bound on surprises."""

_MAX_KNOWN_SIZES = 4096


class NoGraph(Refusal):
    """There is no graph for a call; the message says why.

    tried: compiling for this very call failed just now. The call itself may be to blame: see `clear_failure`.
    """

    def __init__(self, key: Hashable, reason: Reason, tried: bool = False):
        super().__init__(reason)
        self.key, self.tried = key, tried


class GraphCache:
    """A bounded table from a key to compiled graphs and captured calls. Threads may share it.

    Evicts the least recently used first, captured calls before compiled graphs. Leased entries stay while the run
    lasts: graphs that do not fit beside them are not compiled, since taking turns would mean compiling at every step.

    max_entries: keys kept; 0 keeps nothing, and then nothing is compiled either.
    max_bytes: bound on the sum of the entries' `nbytes`.
    """

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES, max_bytes: int = DEFAULT_MAX_BYTES):
        self._lock = threading.Lock()
        # Not an OrderedDict, whose iteration hashes every key again: those of graphs are long, and there are thousands.
        self._entries: dict[Hashable, Entry] = {}
        self._max_entries, self.max_bytes = max_entries, max_bytes
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()  # an abandoned one holds nothing
        self._sizes: dict[Hashable, int] = {}
        self._evicted_hits = 0
        self._counts: dict[str, Any] = dict.fromkeys(("misses", "compilations", "captures", "loaded"), 0)
        self._counts["seconds"] = 0.0
        self.evictions = 0
        """Entries evicted so far, for whatever reason."""
        self.generation = 0
        """Grows whenever a compiled graph is dropped or found wrong; graphs found before must be looked up again."""
        self.listeners: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        """What keeps graphs beyond a run; `clear` is called on each when a graph is dropped."""
        self.stateful_blocks: dict[Hashable, Reason] = {}
        """By class and code, why blocks that keep state are not compiled; their keys may change with that state."""
        self.store: Any = None
        """The `GraphStore` that keeps graphs from one process to the next; None keeps none."""
        self.captures: Any = None
        """The `CapturePool` of the captured calls among the entries, for others; None where nothing is captured."""

    def find(
        self,
        key: Hashable,
        name: str,
        fits: Callable[[CompiledGraph], bool],
        compile_graph: Callable[[], Any],
        lease: Lease | None = None,
        load_graph: Callable[[], CompiledGraph | None] = lambda: None,
        action: str = "compile",
    ) -> tuple[Entry, CompiledGraph]:
        """The key's entry, and its graph that fits this call; where there is none, it is loaded or compiled now.

        When several threads ask for one key, one compiles; the others wait and share the graph.

        action: "compile" or "capture", for counts and events.
        Raises NoGraph. Other errors of `load_graph` and `compile_graph` than CompileFailed pass through.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._require_room(key, lease)
                entry = self._entries[key] = Entry(key, name, is_capture=action == "capture")
                self._shrink(self._leased_keys() | {key})
            self._touch(key)
            if lease is not None:
                lease.add(entry)
        with entry.busy:
            for graph in tuple(entry.graphs):
                if fits(graph):
                    emit("graph_hit", name=name, key=key)
                    return entry, graph
            reason = entry.failure  # read once: another thread may clear it
            if reason is None and len(entry.graphs) >= MOST_GRAPHS:
                reason = Reason("no_graph_fits", graphs=len(entry.graphs))
            if reason is not None:
                raise NoGraph(key, reason)
            with self._lock:
                self._require_room(key, lease)
                self._counts["misses"] += 1
            started = time.perf_counter()
            try:
                graph = load_graph()
            except BaseException:
                self._remove_if_empty(entry)
                raise
            if graph is None:
                return entry, self._make(entry, compile_graph, lease, action)
            self._keep(entry, graph, None, lease)
            emit("graph_loaded", name=name, key=key, seconds=time.perf_counter() - started)
            return entry, graph

    def statistics(self) -> dict[str, Any]:
        """Totals. Seconds, bytes, counts. The entries themselves: `entries`."""
        with self._lock:
            entries = list(self._entries.values())
            totals = {**self._counts, "evictions": self.evictions}
            totals |= {"max_entries": self._max_entries, "max_bytes": self.max_bytes}
            evicted_hits = self._evicted_hits
        return {
            "entries": len(entries),
            "graphs": sum(len(entry.graphs) for entry in entries),
            "pending": sum(
                graph.pending is not None for entry in entries if not entry.is_capture for graph in [*entry.graphs]
            ),
            "hits": evicted_hits + sum(entry.calls for entry in entries),
            "probe_seconds": sum(entry.probe_seconds for entry in entries),
            "bytes": sum(entry.nbytes for entry in entries),
            **totals,
        }

    def entries(self) -> list[Entry]:
        """Every entry, the most recently used last."""
        with self._lock:
            return list(self._entries.values())

    def get(self, key: Hashable, lease: Lease | None = None) -> Entry | None:
        """The entry of the key, which counts as used now; None where there is none."""
        with self._lock:
            entry = self._entries.get(key)
            self._touch(key)
            if entry is not None and lease is not None:
                lease.add(entry)
            return entry

    def keys(self) -> list[Hashable]:
        """Every key, the most recently used last."""
        with self._lock:
            return list(self._entries)

    def forget(self) -> None:
        """Have all compiled graphs looked up again, since one was found wrong."""
        with self._lock:
            self._graphs_dropped()

    def clear_failure(self, key: Hashable) -> None:
        """Allow compiling for the key again: the call that failed was itself to blame."""
        if (entry := self._entries.get(key)) is not None:
            entry.failure = None
            self._remove_if_empty(entry)

    # Budget

    def set_budget(self, max_entries: int | None = None, max_bytes: int | None = None) -> None:
        """Change the bounds; evicts at once what no longer fits."""
        with self._lock:
            self._max_entries = self._max_entries if max_entries is None else max_entries
            self.max_bytes = self.max_bytes if max_bytes is None else max_bytes
            for entry in list(self._entries.values()):
                if entry.is_capture and entry.failure is not None:  # what did not fit may do now
                    self._drop(entry.key)
            self._shrink(())

    def room_for(self, keys: Container[Hashable]) -> int:
        """Bytes that the entries of these keys may take together, next to all other entries."""
        with self._lock:
            return self.max_bytes - sum(entry.nbytes for key, entry in self._entries.items() if key not in keys)

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """A run's lease: what it finds under it is not evicted before it ends, and counts as used until then."""
        lease = self.begin_lease()
        try:
            yield lease
        finally:
            self.end_lease(lease)

    def begin_lease(self) -> Lease:
        """A lease that ends with `end_lease`, or when nobody references it any more."""
        lease = Lease()
        with self._lock:
            self._leases.add(lease)
            if any([entry.ask_again() for entry in self._entries.values()]):
                self._graphs_dropped()
        return lease

    def end_lease(self, lease: Lease) -> None:
        with self._lock:
            self._leases.discard(lease)
            for key in lease.keys:
                self._touch(key)
                if key in self._entries:
                    lease.count(self._entries[key])

    # Eviction

    def evict(self, key: Hashable) -> bool:
        """Drop one entry; True if it was there."""
        with self._lock:
            return self._drop(key)

    def clear(self) -> int:
        """Drop every entry; the number dropped."""
        with self._lock:
            return sum([self._drop(key) for key in list(self._entries)])

    def drop_graph(self, entry: Entry, graph: CompiledGraph) -> None:
        """Drop one graph of an entry; the next call that it would fit gets a new one."""
        with self._lock:
            entry.drop(graph)
            self._graphs_dropped()

    def has_grown(self, entry: Entry, graph: CompiledGraph) -> None:
        """Count a graph whose code was made after its entry, and evict others for it."""
        with self._lock:
            self._counts["compilations"] += 1
            self._sizes[entry.key] = graph.nbytes
            self._shrink(self._leased_keys() | {entry.key})

    def _make(
        self, entry: Entry, compile_graph: Callable[[], CompiledGraph], lease: Lease | None, action: str
    ) -> CompiledGraph:
        fields, started, reason = {"name": entry.name, "key": entry.key}, time.perf_counter(), None
        emit(f"{action}_start", **fields, graphs=len(entry.graphs))
        try:
            graph = compile_graph()
        except CompileFailed as failed:
            reason = entry.failure = failed.reason
        except BaseException:
            # Interrupted, or out of memory: that says nothing about the block.
            self._remove_if_empty(entry)
            emit(f"{action}_failed", **fields, reason=Reason("interrupted"), seconds=time.perf_counter() - started)
            raise
        seconds = time.perf_counter() - started
        if reason is not None:
            emit(f"{action}_failed", **fields, reason=reason, seconds=seconds)
            raise NoGraph(entry.key, reason, tried=True)
        try:
            self._keep(entry, graph, seconds, lease, action)
        finally:
            emit(f"{action}_end", **fields, seconds=seconds, pending=action == "compile" and graph.pending is not None)
        return graph

    def _keep(
        self, entry: Entry, graph: CompiledGraph, seconds: float | None, lease: Lease | None, action: str = "compile"
    ) -> None:
        """Add a new graph and evict others for it. Raises NoGraph. seconds: to compile it; None if it was loaded."""
        with self._lock:
            if seconds is None:
                self._counts["loaded"] += 1
            elif action == "capture":
                self._counts["captures"] += 1
            else:
                self._counts["compilations"] += graph.pending is None
                self._counts["seconds"] += seconds
            self._sizes.pop(entry.key, None)
            self._sizes[entry.key] = graph.nbytes
            if len(self._sizes) > _MAX_KNOWN_SIZES:
                del self._sizes[next(iter(self._sizes))]
            try:
                self._require_room(entry.key, lease)
            except NoGraph:
                if lease is not None:
                    lease.full = True
                self._drop_empty(entry)
                raise
            if not entry.graphs:
                # It may have been removed meanwhile, by another thread whose compilation was interrupted.
                self._entries.setdefault(entry.key, entry)
            entry.graphs.append(graph)
            entry.was_loaded = seconds is None
            entry.seconds += seconds or 0.0
            self._shrink(self._leased_keys() | {entry.key})

    # From here on called with the lock held, except `_remove_if_empty`

    def _require_room(self, key: Hashable, lease: Lease | None) -> None:
        """Raise NoGraph where one more graph of this key does not fit beside those in use.

        Graphs that were compiled before have a known size. Once one did not fit, the run compiles no others.
        """
        others = [self._entries[other] for other in self._leased_keys() - {key} if other in self._entries]
        if len(others) >= self._max_entries:
            raise NoGraph(key, Reason("cache_entries_full", kinds=self._max_entries))
        entry = self._entries.get(key)
        used = sum(other.nbytes for other in others) + (entry.nbytes if entry else 0)
        is_hopeless = lease is not None and lease.full and key not in self._sizes
        if is_hopeless or used + max(self._sizes.get(key, 1), 1) > self.max_bytes:
            raise NoGraph(key, Reason("cache_bytes_full", megabytes=f"{self.max_bytes / (1 << 20):.4g}"))

    def _leased_keys(self) -> set[Hashable]:
        return set().union(*(lease.keys for lease in self._leases))

    def _touch(self, key: Hashable) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._entries[key] = entry
            entry.last_used = time.time()

    def _drop(self, key: Hashable) -> bool:
        if (entry := self._entries.pop(key, None)) is None:
            return False
        for lease in self._leases:
            lease.count(entry)
        self._evicted_hits += entry.calls
        self.evictions += 1
        if not entry.is_capture:
            self._graphs_dropped()
        return True

    def _graphs_dropped(self) -> None:
        self.generation += 1
        for listener in [known() for known in self.listeners.keyrefs()]:  # other threads add some meanwhile
            if listener is not None:
                listener.clear()

    def _shrink(self, keep: set[Hashable] | tuple[()]) -> None:
        # Captured calls first: remaking one costs a few steps, compiling costs minutes. What they share is freed only
        # when all are gone, so the sum is taken anew each time.
        for key in sorted(self._entries, key=lambda key: not self._entries[key].is_capture):
            used = sum(entry.nbytes for entry in self._entries.values())
            if len(self._entries) <= self._max_entries and used <= self.max_bytes:
                return
            if key not in keep:
                self._drop(key)

    def _remove_if_empty(self, entry: Entry) -> None:
        with self._lock:
            self._drop_empty(entry)

    def _drop_empty(self, entry: Entry) -> None:
        if not entry.graphs and self._entries.get(entry.key) is entry:
            del self._entries[entry.key]


shared = GraphCache()
"""The one cache of this process, shared by all models."""
