"""At which latent shapes models have run, and of which of these the graph cache still holds every graph."""

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

    shapes: the latents [B, C, H, W] (or [B, C, T, H, W]) whose every graph is there, most recently run last.
    any_size: the last of these runs used graphs that serve every shape. scale: pixels a side that one of the latents'
        elements covers.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    any_size: bool = False
    scale: int = 8


def architecture(network: torch.nn.Module) -> Hashable:
    """Equal for networks of one class whose weights have the same shapes: what shares graphs is alike in it."""
    network = getattr(network, "_orig_mod", network)
    return type(network).__qualname__, hash(tuple(weight.shape for weight in network.parameters()))


def remember(
    cache: GraphCache, network: Hashable, shape: Iterable[int], keys: Iterable[Hashable], scale: int = 8
) -> None:
    """Note that a run over a latent of this shape ended well, with the graphs under these keys.

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
    """What the cache holds for an `architecture`; None takes that of the last run."""
    with _lock:
        runs = list(_runs.get(cache, {}).items())
    held = [(run, keys, scale) for run, (keys, scale) in runs if cache.has_all(keys)]
    if network is None and held:
        network = held[-1][0][0]
    own = [(shape, keys, scale) for (of, shape), keys, scale in held if of == network]
    if not own:
        return Compiled()
    _, last, scale = own[-1]
    any_size = all(getattr(key, "sizes", None) is None for key in last)
    exact = tuple(shape for shape, keys, _ in own if any(getattr(key, "sizes", None) is not None for key in keys))
    return Compiled(exact, any_size, scale)
