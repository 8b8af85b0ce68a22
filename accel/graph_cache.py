"""The shared cache of compiled graphs: look-up, budget, eviction, statistics. One per process."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from .compilers import CompiledGraph, CompileFailed
from .events import emit
from .probe import Probe

DEFAULT_MAX_ENTRIES = 512
DEFAULT_MAX_BYTES = 2 << 30


@dataclass
class Entry:
    """What the cache knows under one key: its graphs, or why there is none.

    graphs: usually one; a second where a call did not fit the first one's guards.
    probe: compares the graphs with the block while they are new; None when that is settled or off.
    """

    key: Hashable
    name: str
    graphs: list[CompiledGraph] = field(default_factory=list)
    failure: str | None = None
    seconds: float = 0.0
    hits: int = 0
    last_used: float = 0.0
    probe: Probe | None = None
    _busy: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def give_up(self, reason: str) -> None:
        """Drop the graphs for good: calls of this key run eagerly from now on."""
        self.failure = reason
        self.graphs.clear()

    @property
    def nbytes(self) -> int:
        return sum(graph.nbytes for graph in self.graphs)


class GraphCache:
    """A bounded table from a key to compiled graphs; the least recently used go first.

    max_entries: keys kept; 0 keeps nothing, and then nothing is compiled either.
    max_bytes: bound on the sum of the entries' `nbytes`.
    max_graphs: graphs an entry may hold before further misfits run eagerly; a bound on surprises.
    """

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES, max_bytes: int = DEFAULT_MAX_BYTES, max_graphs: int = 4):
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_graphs = max_graphs
        self._evicted_hits = 0
        self._misses = 0
        self._compilations = 0
        self._seconds = 0.0
        self._evictions = 0
        self.generation = 0
        """Grows whenever an entry leaves, so that holders of graphs know to let go of theirs."""

    def set_budget(self, max_entries: int | None = None, max_bytes: int | None = None) -> None:
        """Change the bounds; what no longer fits leaves at once."""
        with self._lock:
            self._max_entries = self._max_entries if max_entries is None else max_entries
            self._max_bytes = self._max_bytes if max_bytes is None else max_bytes
            self._shrink()

    def find(
        self,
        key: Hashable,
        name: str,
        fits: Callable[[CompiledGraph], bool],
        compile_graph: Callable[[], CompiledGraph],
    ) -> tuple[Entry, CompiledGraph] | None:
        """The entry and the graph of it that fits this call, compiled now if there is none.

        One compilation per key at a time, however many threads ask; the others wait and share it.
        Returns None where there is no graph to be had; `failure(key)` tells why.
        Whatever `compile_graph` raises other than CompileFailed passes through, and nothing is kept.
        """
        if self._max_entries == 0 or self._max_bytes == 0:
            return None
        entry = self._enter(key, name)
        with entry._busy:
            for graph in entry.graphs:
                if fits(graph):
                    return entry, graph
            if entry.failure is not None or len(entry.graphs) >= self._max_graphs:
                return None
            with self._lock:
                self._misses += 1
            started = time.perf_counter()
            emit("compile_start", name=name, key=key)
            try:
                graph = compile_graph()
            except CompileFailed as failed:
                entry.failure = str(failed)
                emit("compile_failed", name=name, key=key, reason=entry.failure)
                return None
            except BaseException:
                # Interrupted, or out of memory: nothing was learnt about the block.
                if not entry.graphs:
                    self.evict(key)
                emit("compile_failed", name=name, key=key, reason="interrupted")
                raise
            seconds = time.perf_counter() - started
            with self._lock:
                entry.graphs.append(graph)
                entry.seconds += seconds
                self._compilations += 1
                self._seconds += seconds
                self._shrink(keep=key)
            emit("compile_end", name=name, key=key, seconds=seconds)
            return entry, graph

    def failure(self, key: Hashable) -> str | None:
        """Why there is no graph under this key; None when nothing failed."""
        entry = self._entries.get(key)
        return entry.failure if entry else None

    def evict(self, key: Hashable) -> bool:
        """Drop one entry; True when it was there."""
        with self._lock:
            return self._drop(key)

    def clear(self) -> int:
        """Drop every entry; the number dropped."""
        with self._lock:
            keys = list(self._entries)
            for key in keys:
                self._drop(key)
            return len(keys)

    def statistics(self) -> dict[str, Any]:
        """Totals, and a row per entry, most recently used last. Seconds, bytes, counts."""
        with self._lock:
            rows = [
                {
                    "name": entry.name,
                    "graphs": len(entry.graphs),
                    "hits": entry.hits,
                    "seconds": entry.seconds,
                    "bytes": entry.nbytes,
                    "last_used": entry.last_used,
                    "failure": entry.failure,
                }
                for entry in self._entries.values()
            ]
            return {
                "entries": len(rows),
                "graphs": sum(row["graphs"] for row in rows),
                "hits": self._evicted_hits + sum(row["hits"] for row in rows),
                "misses": self._misses,
                "compilations": self._compilations,
                "seconds": self._seconds,
                "evictions": self._evictions,
                "bytes": sum(row["bytes"] for row in rows),
                "max_entries": self._max_entries,
                "max_bytes": self._max_bytes,
                "table": rows,
            }

    def _enter(self, key: Hashable, name: str) -> Entry:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = Entry(key, name)
                self._shrink(keep=key)
            self._entries.move_to_end(key)
            entry.last_used = time.time()
            return entry

    def _drop(self, key: Hashable) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._evicted_hits += entry.hits
        self._evictions += 1
        self.generation += 1
        return True

    def _shrink(self, keep: Hashable = None) -> None:
        used = sum(entry.nbytes for entry in self._entries.values())
        for key in list(self._entries):
            if len(self._entries) <= self._max_entries and used <= self._max_bytes:
                return
            if key != keep:
                used -= self._entries[key].nbytes
                self._drop(key)


shared = GraphCache()
"""The one cache of this process: models, VAEs, ControlNets and pipelines all use it."""
