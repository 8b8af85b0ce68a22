"""Stand-ins for blocks' forwards, for the length of one model call.

Compiling and DeepCache both need a block to behave differently during one call. Each puts a
*layer* in front of the block's own forward; layers stack in a fixed order whatever the order in
which they were entered, so the two compose, and leaving the context restores the module exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch

Forward = Callable[..., Any]
"""A block's forward: takes and returns what the block's own forward does."""

Layer = Callable[..., Any]
"""Like a forward, with the next forward inwards as its first argument."""


class Order(IntEnum):
    """Who is asked first: a higher layer sees the call before a lower one."""

    CAPTURED = -1
    COMPILED = 0
    CACHED = 1


class StandIn:
    """What a module's `forward` is while at least one layer is in place.

    Threads may call it while others put layers in place or take them away: a call keeps to those it found.
    """

    __slots__ = ("_layers", "_only", "is_foreign", "own")

    def __init__(self, module: torch.nn.Module, order: int, layer: Layer, thread: int | None = None):
        """thread: whose calls alone go to the layer; None for all."""
        self.own: Forward = module.forward
        self.is_foreign = "forward" in module.__dict__
        self._layers: tuple[tuple[int, int | None, Layer], ...] = ((order, thread, layer),)
        self._only: Layer | None = layer if thread is None else None
        """The layer, where there is one and it is for all threads."""

    def add(self, order: int, layer: Layer, thread: int | None = None) -> None:
        """One more layer."""
        self._set(tuple(sorted((*self._layers, (order, thread, layer)), key=lambda item: item[0])))

    def remove(self, layer: Layer) -> bool:
        """Take `layer` away once, the place added last first; True when no layer is left."""
        if self._only is layer:
            self._layers, self._only = (), None
            return True
        layers = list(self._layers)
        for index in reversed(range(len(layers))):
            if layers[index][2] is layer:
                del layers[index]
                break
        self._set(tuple(layers))
        return not layers

    def _set(self, layers: tuple[tuple[int, int | None, Layer], ...]) -> None:
        self._layers = layers
        self._only = layers[0][2] if len(layers) == 1 and layers[0][1] is None else None

    def __deepcopy__(self, memo: dict) -> StandIn:
        """Itself: whoever copies a module puts away the copy's stand-in."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        only = self._only
        if only is not None:
            return only(self.own, *args, **kwargs)
        here = threading.get_ident()
        layers = [layer for _, thread, layer in self._layers if thread is None or thread == here]
        return self._call(layers, len(layers) - 1, args, kwargs)

    def _call(self, layers: list[Layer], index: int, args: tuple, kwargs: dict) -> Any:
        if index < 0:
            return self.own(*args, **kwargs)
        inner = self.own if index == 0 else lambda *a, **k: self._call(layers, index - 1, a, k)
        return layers[index](inner, *args, **kwargs)


def has_foreign_forward(module: torch.nn.Module) -> bool:
    """Whether somebody else has put a forward of their own on this very module."""
    forward = module.__dict__.get("forward")
    return forward.is_foreign if isinstance(forward, StandIn) else forward is not None


@contextmanager
def substituted(
    layers: Mapping[torch.nn.Module, Layer], order: Order, this_thread_only: bool = False
) -> Iterator[None]:
    """While it lasts, calling a module of `layers` calls its layer as `layer(inner, *args, **kwargs)`.

    `inner` is the next layer inwards and in the end the module's own forward. Whatever ends the
    block (return, exception, interrupt) puts every module's `__dict__` back as it was.

    this_thread_only: the calls that other threads make of the same modules meanwhile are none of the layers'.
    """
    thread = threading.get_ident() if this_thread_only else None
    placed: list[tuple[dict[str, Any], Layer]] = []
    try:
        with _changing:
            for module, layer in layers.items():
                attributes = module.__dict__
                stand_in = attributes.get("forward")
                if type(stand_in) is StandIn:
                    stand_in.add(order, layer, thread)
                else:
                    attributes["forward"] = StandIn(module, order, layer, thread)
                placed.append((attributes, layer))
        yield
    finally:
        with _changing:
            for attributes, layer in reversed(placed):
                stand_in = attributes.get("forward")
                if type(stand_in) is StandIn and stand_in.remove(layer):
                    if stand_in.is_foreign:
                        attributes["forward"] = stand_in.own
                    else:
                        del attributes["forward"]


_changing = threading.RLock()
"""Held while stand-ins are put in place or taken away; reentrant, since an interrupt may come in between."""
