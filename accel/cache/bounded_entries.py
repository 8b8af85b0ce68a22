"""Entries in order of use, within bounds of bytes and number; what a run under way uses stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Hashable, Iterator
from contextlib import contextmanager

from .entry import Entry
from .lease import Lease


class NoGraph(Exception):
    """There is no graph for a call; the message says why.

    tried: compiling for this very call failed just now. The call itself may be to blame: see `clear_failure`.
    """

    def __init__(self, key: Hashable, reason: str, tried: bool = False):
        super().__init__(reason)
        self.key = key
        self.tried = tried


class BoundedEntries:
    """A table from a key to entries; the least recently used go first, recorded calls before anything compiled.

    max_entries: keys kept. max_bytes: bound on the sum of the entries' `nbytes`.
    """

    def __init__(self, max_entries: int, max_bytes: int):
        self._lock = threading.Lock()
        # Not an OrderedDict, whose iteration hashes every key again: those of graphs are long, and there are thousands.
        self._entries: dict[Hashable, Entry] = {}
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._leases: list[Lease] = []
        self._sizes: dict[Hashable, int] = {}
        self._evicted_hits = 0
        self._evictions = 0
        self.generation = 0
        """Grows whenever an entry leaves, so that holders of graphs know to let go of theirs."""

    def set_budget(self, max_entries: int | None = None, max_bytes: int | None = None) -> None:
        """Change the bounds; what no longer fits leaves at once."""
        with self._lock:
            self._max_entries = self._max_entries if max_entries is None else max_entries
            self._max_bytes = self._max_bytes if max_bytes is None else max_bytes
            self._shrink(())

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """For one run: while it lasts, what is found under the lease stays, and counts as used until its end."""
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
                        lease.leave(self._entries[key])

    @property
    def max_bytes(self) -> int:
        """Bound on the sum of the entries' bytes."""
        return self._max_bytes

    def room_for(self, keys: Container[Hashable]) -> int:
        """Bytes that the entries under these keys may have together, beside the others that there are."""
        with self._lock:
            return self._max_bytes - sum(entry.nbytes for key, entry in self._entries.items() if key not in keys)

    @property
    def evictions(self) -> int:
        """Entries that had to leave, for whatever reason."""
        return self._evictions

    def _require_room(self, key: Hashable, lease: Lease | None) -> None:
        """Raise NoGraph if one more graph under this key does not fit beside what is in use.

        Its size is known where it was compiled before; where not, none is tried after one did not fit.
        """
        others = [self._entries[other] for other in self._in_use() - {key} if other in self._entries]
        if len(others) >= self._max_entries:
            raise NoGraph(key, f"the graph cache may hold {self._max_entries} kinds, and as many are in use")
        own = self._entries.get(key)
        used = sum(entry.nbytes for entry in others) + (own.nbytes if own else 0)
        is_hopeless = lease is not None and lease.full and key not in self._sizes
        if is_hopeless or used + max(self._sizes.get(key, 1), 1) > self._max_bytes:
            budget = f"{self._max_bytes / (1 << 20):.4g} MB"
            raise NoGraph(key, f"the graphs of this run need more than the {budget} that they may keep (cache_mb)")

    def _in_use(self) -> set[Hashable]:
        return set().union(*(lease.keys for lease in self._leases))

    def _touch(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._entries[key] = entry
            entry.last_used = time.time()

    def _leave_if_empty(self, entry: Entry) -> None:
        with self._lock:
            if not entry.graphs and self._entries.get(entry.key) is entry:
                del self._entries[entry.key]

    def _drop(self, key: Hashable) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        for lease in self._leases:
            lease.leave(entry)
        self._evicted_hits += entry.calls
        self._evictions += 1
        self.generation += 1
        return True

    def _shrink(self, keep: set[Hashable] | tuple[()]) -> None:
        # Recorded calls first: each costs a few steps to make again, compiling costs minutes. What they share is
        # less by the share of one only when all are gone, so the sum is taken anew each time.
        for key in sorted(self._entries, key=lambda key: not self._entries[key].is_capture):
            used = sum(entry.nbytes for entry in self._entries.values())
            if len(self._entries) <= self._max_entries and used <= self._max_bytes:
                return
            if key not in keep:
                self._drop(key)
