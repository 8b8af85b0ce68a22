"""Stand-ins for blocks' forwards, for the length of one model call.

Compiling and DeepCache both need a block to behave differently during one call. Each puts a
*layer* in front of the block's own forward; layers stack in a fixed order whatever the order in
which they were entered, so the two compose, and leaving the context restores the module exactly.
"""

from __future__ import annotations

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

    COMPILED = 0
    CACHED = 1


class StandIn:
    """What a module's `forward` is while at least one layer is in place."""

    __slots__ = ("_layers", "is_foreign", "own")

    def __init__(self, module: torch.nn.Module):
        self.own: Forward = module.forward
        self.is_foreign = "forward" in module.__dict__
        self._layers: list[tuple[int, Layer]] = []

    def add(self, order: int, layer: Layer) -> None:
        self._layers.append((order, layer))
        self._layers.sort(key=lambda item: item[0])

    def remove(self, layer: Layer) -> bool:
        """Take `layer` away once, the place added last first; True when no layer is left."""
        for index in reversed(range(len(self._layers))):
            if self._layers[index][1] is layer:
                del self._layers[index]
                break
        return not self._layers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(len(self._layers) - 1, args, kwargs)

    def _call(self, index: int, args: tuple, kwargs: dict) -> Any:
        if index < 0:
            return self.own(*args, **kwargs)
        inner = self.own if index == 0 else lambda *a, **k: self._call(index - 1, a, k)
        return self._layers[index][1](inner, *args, **kwargs)


def has_foreign_forward(module: torch.nn.Module) -> bool:
    """Whether somebody else has put a forward of their own on this very module."""
    forward = module.__dict__.get("forward")
    return forward.is_foreign if isinstance(forward, StandIn) else forward is not None


@contextmanager
def substituted(layers: Mapping[torch.nn.Module, Layer], order: Order) -> Iterator[None]:
    """While it lasts, calling a module of `layers` calls its layer as `layer(inner, *args, **kwargs)`.

    `inner` is the next layer inwards and in the end the module's own forward. Whatever ends the
    block (return, exception, interrupt) puts every module's `__dict__` back as it was.
    """
    placed: list[tuple[torch.nn.Module, Layer]] = []
    try:
        for module, layer in layers.items():
            stand_in = module.__dict__.get("forward")
            if not isinstance(stand_in, StandIn):
                stand_in = StandIn(module)
                module.__dict__["forward"] = stand_in
            stand_in.add(order, layer)
            placed.append((module, layer))
        yield
    finally:
        for module, layer in reversed(placed):
            stand_in = module.__dict__.get("forward")
            if isinstance(stand_in, StandIn) and stand_in.remove(layer):
                _restore(module, stand_in)


def _restore(module: torch.nn.Module, stand_in: StandIn) -> None:
    if stand_in.is_foreign:
        module.__dict__["forward"] = stand_in.own
    else:
        del module.__dict__["forward"]
