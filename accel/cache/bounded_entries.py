"""The entries of the graph cache in order of use, within bounds of bytes and number."""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Hashable, Iterator
from contextlib import contextmanager

from ..compile.compiled_graph import CompiledGraph
from ..core.reasons import Reason, Refusal
from .entry import Entry, Lease


class NoGraph(Refusal):
    """There is no graph for a call; the message says why.

    tried: compiling for this very call failed just now. The call itself may be to blame: see `clear_failure`.
    """

    def __init__(self, key: Hashable, reason: Reason, tried: bool = False):
        super().__init__(reason)
        self.key = key
        self.tried = tried


class BoundedEntries:
    """A table of entries by key. Evicts the least recently used first, captured calls before compiled graphs.

    What a run has found under its lease is not evicted for another graph while the run lasts. Threads may share it.

    max_entries: keys kept. max_bytes: bound on the sum of the entries' `nbytes`.
    """

    def __init__(self, max_entries: int, max_bytes: int):
        self._lock = threading.Lock()
        # Not an OrderedDict, whose iteration hashes every key again: those of graphs are long, and there are thousands.
        self._entries: dict[Hashable, Entry] = {}
        self._max_entries = max_entries
        self.max_bytes = max_bytes
        self._leases: list[Lease] = []
        self._sizes: dict[Hashable, int] = {}
        self._evicted_hits = 0
        self.evictions = 0
        """Entries evicted so far, for whatever reason."""
        self.generation = 0
        """Grows whenever a graph is dropped, so that whoever references graphs knows to look them up again."""

    # Look-up

    def get(self, key: Hashable, lease: Lease | None = None) -> Entry | None:
        """The entry of the key, which counts as used now; None where there is none."""
        with self._lock:
            if key not in self._entries:
                return None
            self._touch(key)
            if lease is not None:
                lease.add(self._entries[key])
            return self._entries[key]

    def keys(self) -> list[Hashable]:
        """Every key, the most recently used last."""
        with self._lock:
            return list(self._entries)

    def clear_failure(self, key: Hashable) -> None:
        """Allow to compile for the key again, since the call that it failed for is to blame itself."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.failure = None
            self._remove_if_empty(entry)

    # Budget

    def set_budget(self, max_entries: int | None = None, max_bytes: int | None = None) -> None:
        """Change the bounds; evicts at once what no longer fits."""
        with self._lock:
            self._max_entries = self._max_entries if max_entries is None else max_entries
            self.max_bytes = self.max_bytes if max_bytes is None else max_bytes
            self._shrink(())

    def room_for(self, keys: Container[Hashable]) -> int:
        """Bytes that the entries of these keys may have together, beside all other entries."""
        with self._lock:
            return self.max_bytes - sum(entry.nbytes for key, entry in self._entries.items() if key not in keys)

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """For one run: what it finds under the lease stays while it lasts, and counts as used until its end."""
        lease = Lease()
        with self._lock:
            self._leases.append(lease)
        try:
            yield lease
        finally:
            with self._lock:
                self._leases.remove(lease)
                for key in lease.keys:
                    self._touch(key)
                    if key in self._entries:
                        lease.count(self._entries[key])

    # Eviction

    def evict(self, key: Hashable) -> bool:
        """Drop one entry; whether it was there."""
        with self._lock:
            return self._drop(key)

    def evict_named(self, entry_id: str) -> int | None:
        """Drop the entry with this `Entry.id`: the bytes freed, None where there is no such entry."""
        with self._lock:
            entries = list(self._entries.values())
        found = next((entry for entry in entries if entry.id == entry_id), None)
        if found is None:
            return None
        freed = found.nbytes
        return freed if self.evict(found.key) else None

    def clear(self) -> int:
        """Drop every entry; the number dropped."""
        with self._lock:
            keys = list(self._entries)
            for key in keys:
                self._drop(key)
            return len(keys)

    def drop_graph(self, entry: Entry, graph: CompiledGraph) -> None:
        """Drop one graph of an entry: the next call that it would fit has another made."""
        with self._lock:
            entry.drop(graph)
            self.generation += 1

    # Called with the lock held, except the last

    def _require_room(self, key: Hashable, lease: Lease | None) -> None:
        """Raises NoGraph where one more graph of this key does not fit beside those in use.

        The size of a graph is known where it was compiled before. Where it is not, a run compiles no more once one
        did not fit.
        """
        others = [self._entries[other] for other in self._in_use() - {key} if other in self._entries]
        if len(others) >= self._max_entries:
            raise NoGraph(key, Reason("cache_entries_full", kinds=self._max_entries))
        own = self._entries.get(key)
        used = sum(entry.nbytes for entry in others) + (own.nbytes if own else 0)
        is_hopeless = lease is not None and lease.full and key not in self._sizes
        if is_hopeless or used + max(self._sizes.get(key, 1), 1) > self.max_bytes:
            raise NoGraph(key, Reason("cache_bytes_full", megabytes=f"{self.max_bytes / (1 << 20):.4g}"))

    def _in_use(self) -> set[Hashable]:
        return set().union(*(lease.keys for lease in self._leases))

    def _touch(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._entries[key] = entry
            entry.last_used = time.time()

    def _drop(self, key: Hashable) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        for lease in self._leases:
            lease.count(entry)
        self._evicted_hits += entry.calls
        self.evictions += 1
        self.generation += 1
        return True

    def _shrink(self, keep: set[Hashable] | tuple[()]) -> None:
        # Captured calls first: each costs a few steps to make again, compiling costs minutes. What they share is
        # freed only when all are gone, so the sum is taken anew each time.
        for key in sorted(self._entries, key=lambda key: not self._entries[key].is_capture):
            used = sum(entry.nbytes for entry in self._entries.values())
            if len(self._entries) <= self._max_entries and used <= self.max_bytes:
                return
            if key not in keep:
                self._drop(key)

    def _remove_if_empty(self, entry: Entry) -> None:
        with self._lock:
            if not entry.graphs and self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
