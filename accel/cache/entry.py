"""An entry of the graph cache: the graphs of one key, or why there is none."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..compile.benchmark import Probe, Probes
from ..core.reasons import Reason

if TYPE_CHECKING:
    import torch

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
    """A short name of the entry of this key, the same in every process."""
    return hashlib.blake2s(repr(key).encode(), digest_size=8).hexdigest()


@dataclass(eq=False)
class Entry:
    """The graphs of one key, or why there is none.

    graphs: usually one; a second where a call did not fit the first one's guards.
    hits: calls that no probe counts; `calls` has all. uses: by the latest runs, the newest last.
    was_loaded: the newest graph was loaded, not compiled. is_capture: the graphs are captured calls.
    busy: held while a graph is looked up or made.
    """

    key: Hashable
    name: str
    graphs: list[CompiledGraph] = field(default_factory=list)
    failure: Reason | None = None
    seconds: float = 0.0
    hits: int = 0
    last_used: float = 0.0
    uses: tuple[Use, ...] = ()
    was_loaded: bool = False
    is_capture: bool = False
    _probes: dict[int, Probes] = field(default_factory=dict, repr=False)
    busy: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def probe(self, graph: CompiledGraph, inputs: Sequence[torch.Tensor]) -> Probe:
        """The comparison of one of the graphs with its block, in calls of about the size of these inputs."""
        return self._probes.setdefault(id(graph), Probes()).of(inputs)

    def drop(self, graph: CompiledGraph) -> None:
        """Remove one graph and its probes."""
        self.graphs[:] = [kept for kept in self.graphs if kept is not graph]
        probes = self._probes.pop(id(graph), None)
        self.hits += probes.hits if probes is not None else 0

    def mark_failed(self, reason: Reason) -> None:
        """Remove the graphs for good: calls of this key run eagerly from now on."""
        self.failure = reason
        self.hits = self.calls
        self.graphs.clear()
        self._probes.clear()

    def note_uses(self, uses: Iterable[Use]) -> None:
        """Remember these uses as the latest; of equal ones only the last is kept."""
        self.uses = tuple(dict.fromkeys((*uses, *reversed(self.uses))))[:_MOST_USES][::-1]

    @functools.cached_property
    def id(self) -> str:
        return id_of(self.key)

    @property
    def calls(self) -> int:
        """Calls of its graphs."""
        return self.hits + sum(probes.hits for probes in list(self._probes.values()))

    @property
    def calls_by_probe(self) -> dict[Probe, int]:
        """Calls of its graphs at sizes at which they had been compared with their block."""
        return {probe: probe.hits for probes in list(self._probes.values()) for probe in probes.all()}

    @property
    def nbytes(self) -> int:
        return sum(graph.nbytes for graph in self.graphs)

    @property
    def probe_seconds(self) -> float:
        return sum(probes.seconds for probes in list(self._probes.values()))
