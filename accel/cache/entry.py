"""An entry of the graph cache, and a run's lease on entries."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..compile.benchmark import Benchmarks, Calls
from ..core.reasons import Reason

if TYPE_CHECKING:
    from ..compile.compiled_graph import CompiledGraph

_MOST_USES = 8


@dataclass(frozen=True)
class Use:
    """What a run used graphs for.

    model: class of the network. latent: [H, W] or [T, H, W]. batch: images. context: tokens of the prompt, if any.
    """

    model: str
    latent: tuple[int, ...]
    batch: int
    context: int | None = None


def id_of(key: Hashable) -> str:
    """A short name for the key's entry, equal in every process."""
    return hashlib.blake2s(repr(key).encode(), digest_size=8).hexdigest()


@dataclass(eq=False)
class Entry:
    """The graphs of one key, or why there is none.

    graphs: usually one; a second where a call did not fit the first one's guards.
    hits: calls that no benchmark counts; `calls` has all. uses: by the latest runs, the newest last.
    was_loaded: the newest graph was loaded, not compiled. is_capture: the graphs are captured calls.
    busy: held while a graph is looked up or made.
    """

    key: Any
    name: str
    graphs: list[Any] = field(default_factory=list)
    failure: Reason | None = None
    seconds: float = 0.0
    hits: int = 0
    last_used: float = 0.0
    uses: tuple[Use, ...] = ()
    was_loaded: bool = False
    is_capture: bool = False
    _benchmarks: dict[int, Benchmarks] = field(default_factory=dict, repr=False)
    busy: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def benchmarks(self, graph: CompiledGraph) -> Benchmarks:
        """The record of one graph against its block."""
        return self._benchmarks.setdefault(id(graph), Benchmarks())

    def has(self, graph: CompiledGraph) -> bool:
        """Whether this is still one of the graphs."""
        return self.failure is None and graph in self.graphs

    def drop(self, graph: CompiledGraph) -> None:
        """Remove one graph and its benchmarks."""
        self.graphs[:] = [kept for kept in self.graphs if kept is not graph]
        benchmarks = self._benchmarks.pop(id(graph), None)
        self.hits += benchmarks.hits if benchmarks is not None else 0

    def mark_failed(self, reason: Reason) -> None:
        """Remove the graphs for good: calls with this key run eagerly from now on."""
        self.failure = reason
        self.hits = self.calls
        self.graphs.clear()
        self._benchmarks.clear()

    @functools.cached_property
    def id(self) -> str:
        return id_of(self.key)

    @property
    def calls(self) -> int:
        """Calls of its graphs."""
        return self.hits + sum(benchmarks.hits for benchmarks in list(self._benchmarks.values()))

    @property
    def calls_by_size(self) -> dict[Calls, int]:
        """Calls of its graphs that a benchmark counts, by their size."""
        return {
            calls: calls.hits
            for benchmarks in list(self._benchmarks.values())
            for benchmark in benchmarks.all()
            for calls in list(benchmark.calls.values())
        }

    def ask_again(self) -> bool:
        """As `Benchmark.ask_again`, for each of its graphs and sizes."""
        return any([one.ask_again() for benchmarks in list(self._benchmarks.values()) for one in benchmarks.all()])

    @property
    def nbytes(self) -> int:
        return sum(graph.nbytes for graph in self.graphs)

    @property
    def probe_seconds(self) -> float:
        return sum(benchmarks.seconds for benchmarks in list(self._benchmarks.values()))


@dataclass(eq=False)
class Lease:
    """The entries that one run uses: they are not evicted while it lasts, and its calls of them are counted.

    keys: each entry in use, with its calls when the run found it. full: a graph of this run did not fit.
    uses: a description of the run, for its entries to remember; the owner sets it before the end.
    calls: calls of compiled graphs in this run. measured: those that a benchmark counts, by their size.
    compare_seconds: what running calls both ways took.
    replays: calls that replayed a capture. All are counted when the run ends, or the entry is evicted.
    """

    keys: dict[Hashable, tuple[int, float, dict[Calls, int]]] = field(default_factory=dict)
    full: bool = False
    uses: tuple[Use, ...] = ()
    calls: int = 0
    replays: int = 0
    measured: dict[Calls, int] = field(default_factory=dict)
    compare_seconds: float = 0.0
    _entries: set[Entry] = field(default_factory=set, repr=False)

    def has(self, entry: Entry) -> bool:
        """Whether the run has found this entry, and it is there still; keys are long, and slow to compare."""
        return entry in self._entries

    def add(self, entry: Entry) -> None:
        """The run has found this entry; does nothing the second time."""
        if entry.key not in self.keys:
            self.keys[entry.key] = entry.calls, entry.probe_seconds, entry.calls_by_size
        self._entries.add(entry)

    def count(self, entry: Entry) -> None:
        """Count the entry's calls since `add`, at the end of the run or of the entry. The key stays leased."""
        self._entries.discard(entry)
        if entry.key not in self.keys:
            return
        calls, compared, by_size = self.keys[entry.key]
        if entry.is_capture:
            self.replays += entry.calls - calls
        else:
            self.calls += entry.calls - calls
        self.compare_seconds += entry.probe_seconds - compared
        for size, count in entry.calls_by_size.items():
            since = count - by_size.get(size, 0)
            if since:
                self.measured[size] = self.measured.get(size, 0) + since
        entry.uses = tuple(dict.fromkeys((*self.uses, *reversed(entry.uses))))[:_MOST_USES][::-1]
        self.keys[entry.key] = 0, 0.0, {}  # the same key may get a new entry
