"""One run's hold on the graph cache: what stays for it, and what it used."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ..compile.benchmark import Probe
from .entry import Entry, Use


@dataclass(eq=False)
class Lease:
    """What one run uses of the cache.

    keys: in use, so that no other graph takes their place. full: a graph of this run found no room.
    uses: what the run is, for the entries to remember; its owner sets it before the end.
    calls, measured: of graphs in this run: all, and those at a size for which the gain of a call is known, by probe.
        They are counted at the run's end, from what entries count anyway. replays: of recorded model calls.
    """

    keys: dict[Hashable, tuple[int, dict[Probe, int]]] = field(default_factory=dict)
    full: bool = False
    uses: tuple[Use, ...] = ()
    calls: int = 0
    replays: int = 0
    measured: dict[Probe, int] = field(default_factory=dict)

    def enter(self, entry: Entry) -> None:
        """The run found this entry; only the first time counts."""
        if entry.key not in self.keys:
            self.keys[entry.key] = entry.calls, entry.calls_by_probe

    def leave(self, entry: Entry) -> None:
        """The run or the entry is over: count what came since `enter`. The key stays leased."""
        if entry.key not in self.keys:
            return
        calls, by_probe = self.keys[entry.key]
        if entry.is_capture:
            self.replays += entry.calls - calls
        else:
            self.calls += entry.calls - calls
        for probe, count in entry.calls_by_probe.items():
            since = count - by_probe.get(probe, 0)
            if since:
                self.measured[probe] = self.measured.get(probe, 0) + since
        entry.note_uses(self.uses)
        self.keys[entry.key] = 0, {}  # should the same key come again, its entry is a new one
