"""What capturing a whole model call asks of the model's blocks, and learns from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..cache.entry import Entry
    from ..compile.benchmark import Calls
    from ..compile.compiled_graph import CompiledGraph


@dataclass(eq=False)
class BlockObserver:
    """Shared by the stand-ins of one model's blocks (`block_runner`), for one model call at a time.

    runs_eagerly: blocks run without their graphs.
    may_capture: the call is one of those that will be captured; what it takes on the host then counts for nothing.
    capturing: a block raises if it has no graph at hand or if its graph fails, and the graph is not marked failed: what
        cannot be captured may well run.
    is_stable: no block was compiled in this call, or timed beside its graph.
    used: the graphs that ran, with their cache entries and what counts their calls (`hits`).
    eager_calls: calls of blocks that ran without a graph.
    """

    runs_eagerly: bool = False
    may_capture: bool = True
    capturing: bool = False
    is_stable: bool = True
    used: list[tuple[Entry, CompiledGraph, Entry | Calls]] = field(default_factory=list)
    eager_calls: int = 0

    def reset(self) -> None:
        """Forget what the last call has shown."""
        self.is_stable = True
        self.used.clear()
        self.eager_calls = 0
