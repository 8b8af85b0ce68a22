"""The latent shapes that models have run at and whose every graph is still in the cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from .graph_cache import GraphCache

_MAX_RUNS = 256

_lock = threading.Lock()
_runs: WeakKeyDictionary[GraphCache, OrderedDict[tuple, tuple[frozenset, int]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Compiled:
    """What is compiled for one architecture.

    shapes: of latents, [B, C, H, W] or [B, C, T, H, W], whose every graph is in the cache; the latest run last.
    any_size: the last of these runs used graphs that serve every shape. scale: pixels per latent element and side.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    any_size: bool = False
    scale: int = 8


def architecture(network: torch.nn.Module) -> Hashable:
    """A value that is equal for networks of one class whose weights have equal shapes, which may share graphs."""
    network = getattr(network, "_orig_mod", network)
    return type(network).__qualname__, hash(tuple(weight.shape for weight in network.parameters()))


def remember(
    cache: GraphCache, network: Hashable, shape: Iterable[int], keys: Iterable[Hashable], scale: int = 8
) -> None:
    """Note a successful run over a latent of this shape, with the graphs of these keys.

    network: its `architecture`. scale: as in `Compiled`. The oldest of more than 256 runs is forgotten.
    """
    keys = frozenset(keys)
    if not keys:
        return
    run = (network, tuple(shape))
    with _lock:
        runs = _runs.setdefault(cache, OrderedDict())
        runs.pop(run, None)
        runs[run] = keys, scale
        if len(runs) > _MAX_RUNS:
            runs.popitem(last=False)


def compiled_for(cache: GraphCache, network: Hashable | None = None) -> Compiled:
    """What is compiled for an `architecture`; None takes that of the last run."""
    with _lock:
        runs = list(_runs.get(cache, {}).items())
    complete = [(run, keys, scale) for run, (keys, scale) in runs if cache.has_all(keys)]
    if network is None and complete:
        network = complete[-1][0][0]
    own = [(shape, keys, scale) for (of, shape), keys, scale in complete if of == network]
    if not own:
        return Compiled()
    _, last, scale = own[-1]
    any_size = all(getattr(key, "sizes", None) is None for key in last)
    exact = tuple(shape for shape, keys, _ in own if any(getattr(key, "sizes", None) is not None for key in keys))
    return Compiled(exact, any_size, scale)
