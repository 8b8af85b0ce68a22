"""What users of the cache need of a store that keeps its graphs from one process to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from ..compile.compiled_graph import CompiledGraph, Facts
    from ..fingerprint.graph_key import GraphKey


class SavedGraphs(Protocol):
    """A store of compiled graphs (`store.graph_store.GraphStore`). Raises nothing but the caller's `interrupts`."""

    def load(
        self,
        key: GraphKey,
        name: str,
        devices: Iterable[torch.device],
        build: Callable[[bytes, Facts], CompiledGraph],
        fits: Callable[[CompiledGraph], bool],
        values: tuple[str, ...] = (),
        interrupts: tuple[type[BaseException], ...] = (),
        could_fit: Callable[[Facts], bool] = lambda facts: True,
    ) -> CompiledGraph | None:
        """A saved graph of this key that fits the call; None where there is none."""

    def save(
        self,
        key: GraphKey,
        name: str,
        devices: Iterable[torch.device],
        graph: CompiledGraph,
        interrupts: tuple[type[BaseException], ...] = (),
    ) -> bool:
        """Save a graph that was just compiled; whether that was done."""

    def distrust(self, stem: str) -> bool:
        """Stop loading this graph in this process; whether compiling it anew may do better."""

    def statistics(self) -> dict[str, Any]:
        """The folder, the graphs loaded and saved, and why others were not, as JSON."""
