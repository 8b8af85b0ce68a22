"""What whoever records a whole model call wants to know of its blocks, and to ask of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..cache.entry import Entry
    from ..compile.benchmark import Probe
    from ..compile.compiled_graph import CompiledGraph


@dataclass(eq=False)
class BlockObserver:
    """Shared by the stand-ins of one model's blocks (`block_runner`).

    resting: the blocks run as they are. recording: a block that has no graph at hand raises, and so does one whose
        graph fails, and nothing is held against it: what cannot be recorded may well run.
    settled: no block was compiled, or compared with its graph. used: the graphs that ran, with their entries and with
        who counts their calls (`hits`). eager_calls: calls of blocks that ran without one.
    """

    resting: bool = False
    recording: bool = False
    settled: bool = True
    used: list[tuple[Entry, CompiledGraph, Entry | Probe]] = field(default_factory=list)
    eager_calls: int = 0

    def reset(self) -> None:
        """Before a call."""
        self.settled = True
        self.used.clear()
        self.eager_calls = 0
