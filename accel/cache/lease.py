"""A run's lease on entries of the graph cache: they are not evicted while it lasts, and their calls are counted."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ..compile.benchmark import Benchmark
from .entry import Entry, Use


@dataclass(eq=False)
class Lease:
    """What one run uses of the cache.

    keys: of the entries in use, each with its calls when the run found it. full: a graph of this run did not fit.
    uses: what the run is, for its entries to remember; its owner sets it before the end.
    calls: of compiled graphs in this run. measured: those of them at a size where the gain of a call is known, by
        benchmark. replays: of captured calls. All are counted when the run ends, or the entry is evicted.
    """

    keys: dict[Hashable, tuple[int, dict[Benchmark, int]]] = field(default_factory=dict)
    full: bool = False
    uses: tuple[Use, ...] = ()
    calls: int = 0
    replays: int = 0
    measured: dict[Benchmark, int] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """The run has found this entry; does nothing the second time."""
        if entry.key not in self.keys:
            self.keys[entry.key] = entry.calls, entry.calls_by_benchmark

    def count(self, entry: Entry) -> None:
        """Count the entry's calls since `add`, at the end of the run or of the entry. The key stays leased."""
        if entry.key not in self.keys:
            return
        calls, by_benchmark = self.keys[entry.key]
        if entry.is_capture:
            self.replays += entry.calls - calls
        else:
            self.calls += entry.calls - calls
        for benchmark, count in entry.calls_by_benchmark.items():
            since = count - by_benchmark.get(benchmark, 0)
            if since:
                self.measured[benchmark] = self.measured.get(benchmark, 0) + since
        entry.note_uses(self.uses)
        self.keys[entry.key] = 0, {}  # the same key may get a new entry
