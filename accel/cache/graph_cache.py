"""The shared cache of compiled graphs: finds a graph or has it made, and counts. One per process."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ..compile.compiled_graph import CompiledGraph, CompileFailed
from ..core.events import emit
from ..core.reasons import Reason
from ..core.settings import DEFAULT_MAX_BYTES, DEFAULT_MAX_ENTRIES
from .bounded_entries import BoundedEntries, NoGraph
from .entry import Entry, Lease

MOST_GRAPHS = 4
"""Graphs of one key, after which calls that fit none run eagerly; a bound on surprises."""

_MAX_KNOWN_SIZES = 4096


class GraphCache(BoundedEntries):
    """A bounded table from a key to compiled graphs and captured calls.

    Where the graphs of one run do not all fit, the last ones are not compiled: to take turns would mean to compile at
    every step.

    max_entries: keys kept; 0 keeps nothing, and then nothing is compiled either.
    max_bytes: bound on the sum of the entries' `nbytes`.
    """

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES, max_bytes: int = DEFAULT_MAX_BYTES):
        super().__init__(max_entries, max_bytes)
        self._misses = 0
        self._compilations = 0
        self._captures = 0
        self._loaded = 0
        self._seconds = 0.0
        self.store: Any = None
        """The `GraphStore` that keeps graphs from one process to the next; None keeps none."""
        self.captures: Any = None
        """The `CapturePool` of the captured calls among the entries; None where nothing is captured. The cache itself
        does not use it."""

    def find(
        self,
        key: Hashable,
        name: str,
        fits: Callable[[CompiledGraph], bool],
        compile_graph: Callable[[], CompiledGraph],
        lease: Lease | None = None,
        load_graph: Callable[[], CompiledGraph | None] = lambda: None,
        action: str = "compile",
    ) -> tuple[Entry, CompiledGraph]:
        """The entry of the key and its graph that fits this call; where there is none, it is loaded or compiled now.

        Of threads that ask for one key, one compiles; the others wait and share the graph.

        action: "compile" or "capture": what making the graph counts as, and is called in events.

        Raises:
            NoGraph: with the reason. Whatever `load_graph` raises, and `compile_graph` other than CompileFailed,
                passes through, and nothing is kept.
        """
        entry = self._enter(key, name, lease, is_capture=action == "capture")
        with entry.busy:
            for graph in tuple(entry.graphs):
                if fits(graph):
                    emit("graph_hit", name=name, key=key)
                    return entry, graph
            reason = entry.failure  # read once: another thread may clear it
            if reason is not None:
                raise NoGraph(key, reason)
            if len(entry.graphs) >= MOST_GRAPHS:
                raise NoGraph(key, Reason("no_graph_fits", graphs=len(entry.graphs)))
            with self._lock:
                self._require_room(key, lease)
                self._misses += 1
            graph = self._load(entry, load_graph, lease)
            return entry, self._make(entry, compile_graph, lease, action) if graph is None else graph

    def statistics(self, rows: int | None = None, text: str = "") -> dict[str, Any]:
        """Totals, and a row per entry, the most recently used last. Seconds, bytes, counts.

        rows: at most so many of the latest; None gives all. text: only those with this text in their name or model.
        """
        with self._lock:
            entries = list(self._entries.values())
            totals = {
                "misses": self._misses,
                "compilations": self._compilations,
                "captures": self._captures,
                "loaded": self._loaded,
                "seconds": self._seconds,
                "evictions": self.evictions,
                "max_entries": self._max_entries,
                "max_bytes": self.max_bytes,
            }
            evicted_hits = self._evicted_hits
        counted = _totals(entries)
        counted["hits"] += evicted_hits
        return {**counted, **totals, **_table(entries, rows, text)}

    def _enter(self, key: Hashable, name: str, lease: Lease | None, is_capture: bool) -> Entry:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._require_room(key, lease)
                entry = self._entries[key] = Entry(key, name, is_capture=is_capture)
                self._shrink(self._in_use() | {key})
            self._touch(key)
            if lease is not None:
                lease.add(entry)
            return entry

    def _load(
        self, entry: Entry, load_graph: Callable[[], CompiledGraph | None], lease: Lease | None
    ) -> CompiledGraph | None:
        started = time.perf_counter()
        try:
            graph = load_graph()
        except BaseException:
            self._remove_if_empty(entry)
            raise
        if graph is not None:
            self._keep(entry, graph, None, lease)
            emit("graph_loaded", name=entry.name, key=entry.key, seconds=time.perf_counter() - started)
        return graph

    def _make(
        self, entry: Entry, compile_graph: Callable[[], CompiledGraph], lease: Lease | None, action: str
    ) -> CompiledGraph:
        what, started, reason = {"name": entry.name, "key": entry.key}, time.perf_counter(), None
        emit(f"{action}_start", **what, graphs=len(entry.graphs))
        try:
            graph = compile_graph()
        except CompileFailed as failed:
            reason = entry.failure = failed.reason
        except BaseException:
            # Interrupted, or out of memory: that says nothing about the block.
            self._remove_if_empty(entry)
            emit(f"{action}_failed", **what, reason=Reason("interrupted"), seconds=time.perf_counter() - started)
            raise
        seconds = time.perf_counter() - started
        if reason is not None:
            emit(f"{action}_failed", **what, reason=reason, seconds=seconds)
            raise NoGraph(entry.key, reason, tried=True)
        try:
            self._keep(entry, graph, seconds, lease, action)
        finally:
            emit(f"{action}_end", **what, seconds=seconds)
        return graph

    def _keep(
        self, entry: Entry, graph: CompiledGraph, seconds: float | None, lease: Lease | None, action: str = "compile"
    ) -> None:
        """Add a new graph, and evict others for it; NoGraph where those in use leave no room.

        seconds: to compile it; None for a graph that was loaded.
        """
        with self._lock:
            if seconds is None:
                self._loaded += 1
            elif action == "capture":
                self._captures += 1
            else:
                self._compilations += 1
                self._seconds += seconds
            self._sizes.pop(entry.key, None)
            self._sizes[entry.key] = graph.nbytes
            if len(self._sizes) > _MAX_KNOWN_SIZES:
                del self._sizes[next(iter(self._sizes))]
            try:
                self._require_room(entry.key, lease)
            except NoGraph:
                if lease is not None:
                    lease.full = True
                if not entry.graphs and self._entries.get(entry.key) is entry:
                    del self._entries[entry.key]
                raise
            if not entry.graphs:
                # It may have been removed meanwhile, by another thread whose compilation was interrupted.
                self._entries.setdefault(entry.key, entry)
            entry.graphs.append(graph)
            entry.was_loaded = seconds is None
            entry.seconds += seconds or 0.0
            self._shrink(self._in_use() | {entry.key})


def _totals(entries: Sequence[Entry]) -> dict[str, Any]:
    """Sums over the entries. Seconds, bytes, counts."""
    return {
        "entries": len(entries),
        "graphs": sum(len(entry.graphs) for entry in entries),
        "hits": sum(entry.calls for entry in entries),
        "probe_seconds": sum(entry.probe_seconds for entry in entries),
        "bytes": sum(entry.nbytes for entry in entries),
    }


def _table(entries: Sequence[Entry], rows: int | None, text: str) -> dict[str, Any]:
    """{"table", "rows_total"}: the last `rows` of the entries with this text in their name or model, ignoring case."""
    text = text.casefold()
    chosen = [entry for entry in entries if not text or text in _names(entry)]
    last = chosen if rows is None else chosen[max(len(chosen) - rows, 0) :]
    return {"rows_total": len(chosen), "table": [_row(entry) for entry in last]}


def _row(entry: Entry) -> dict[str, Any]:
    """One entry as JSON. last_used: Unix seconds. used_at: of the latest runs, the newest first.

    source: of its graphs: "compiled", "disk", or "captured" for calls of a whole model.
    """
    failure = entry.failure  # read once: another thread may clear it
    return {
        "id": entry.id,
        "name": entry.name,
        "model": entry.uses[-1].model if entry.uses else None,
        "graphs": len(entry.graphs),
        "hits": entry.calls,
        "seconds": entry.seconds,
        "probe_seconds": entry.probe_seconds,
        "bytes": entry.nbytes,
        "last_used": entry.last_used,
        "failure": None if failure is None else str(failure),
        "failure_reason": None if failure is None else failure.as_json(),
        "used_at": [
            {"latent": list(use.latent), "batch": use.batch, "context": use.context} for use in reversed(entry.uses)
        ],
        "source": "captured" if entry.is_capture else "disk" if entry.was_loaded else "compiled",
        **_of_key(entry.key),
    }


def _of_key(key: Hashable) -> dict[str, Any]:
    """The readable fields of a `GraphKey` or a `CaptureKey`."""
    sizes = getattr(key, "sizes", None)
    inputs = getattr(key, "inputs", ())
    return {
        "sizes": "any" if sizes is None else [list(shape) for shape in sizes],
        "dtype": str(inputs[0].dtype).removeprefix("torch.") if inputs else None,
        "device": str(inputs[0].device) if inputs else None,
        "backend": getattr(key, "backend", None),
    }


def _names(entry: Entry) -> str:
    return " ".join((entry.name, *(use.model for use in entry.uses))).casefold()


shared = GraphCache()
"""The one cache of this process: models, VAEs, ControlNets and pipelines all use it."""
