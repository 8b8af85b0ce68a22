"""What whoever records a whole model call wants to know of its blocks, and to ask of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .compiled_graph import CompiledGraph
    from .graph_entry import Entry


@dataclass(eq=False)
class BlockObserver:
    """Shared by the stand-ins of one model's blocks (`block_runner`).

    resting: the blocks run as they are. recording: a block that has no graph at hand raises, and so does one whose
        graph fails, and nothing is held against it: what cannot be recorded may well run.
    settled: no block was compiled, or compared with its graph. used: the graphs that ran, with their entries.
    """

    resting: bool = False
    recording: bool = False
    settled: bool = True
    used: list[tuple[Entry, CompiledGraph]] = field(default_factory=list)

    def reset(self) -> None:
        """Before a call."""
        self.settled = True
        self.used.clear()
