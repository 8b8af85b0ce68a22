"""What the graph cache knows under one key."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .probe import Probe, Probes

if TYPE_CHECKING:
    import torch

    from .compiled_graph import CompiledGraph


@dataclass
class Entry:
    """What the cache knows under one key: its graphs, or why there is none.

    graphs: usually one; a second where a call did not fit the first one's guards.
    """

    key: Hashable
    name: str
    graphs: list[CompiledGraph] = field(default_factory=list)
    failure: str | None = None
    seconds: float = 0.0
    hits: int = 0
    last_used: float = 0.0
    _probes: dict[int, Probes] = field(default_factory=dict, repr=False)
    _busy: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def probe(self, graph: CompiledGraph, inputs: Sequence[torch.Tensor]) -> Probe:
        """What is known of one of the graphs' gain in calls of about the size of these inputs."""
        return self._probes.setdefault(id(graph), Probes()).of(inputs)

    def drop(self, graph: CompiledGraph) -> None:
        """Let go of one graph, with what is known of it."""
        self.graphs[:] = [kept for kept in self.graphs if kept is not graph]
        self._probes.pop(id(graph), None)

    def give_up(self, reason: str) -> None:
        """Drop the graphs for good: calls of this key run eagerly from now on."""
        self.failure = reason
        self.graphs.clear()
        self._probes.clear()

    @property
    def nbytes(self) -> int:
        return sum(graph.nbytes for graph in self.graphs)

    @property
    def probe_seconds(self) -> float:
        return sum(probes.seconds for probes in list(self._probes.values()))
