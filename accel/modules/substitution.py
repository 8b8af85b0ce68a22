"""Stand-ins for the forwards of modules, for the duration of one model call.

Compiling and DeepCache both change how a block behaves during a call. Each puts a *layer* in front of
the block's own forward. Layers stack in a fixed order, whatever the order in which they were entered, so
the two compose; leaving the context restores the module exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import Any

import torch

from ..core.reasons import RunEagerly

Forward = Callable[..., Any]
"""Takes and returns what the module's own forward does."""

Layer = Callable[..., Any]
"""A forward with the next forward inwards as an additional first argument."""

Apart = Callable[[], AbstractContextManager]
"""Makes the context in which a host wants a layer to do its own work, apart from the model's. Raises `RunEagerly` where
the layer must let the call pass by."""


class Order(IntEnum):
    """The position of a layer: a higher one sees the call before a lower one."""

    CAPTURED = -1
    COMPILED = 0
    CACHED = 1


class StandIn:
    """A module's `forward` while at least one layer is in place.

    Threads may call it while others add or remove layers: a call uses those that it found.
    """

    __slots__ = ("_first", "_first_only", "_layers", "_only", "is_foreign", "own")

    def __init__(self, order: int, layer: Layer, thread: int | None = None):
        """Its first layer. thread: the only one whose calls go to the layer; None for all threads."""
        self._first: tuple[tuple[int, int | None, Layer], ...] = ((order, thread, layer),)
        self._first_only = layer if thread is None else None
        self._layers: tuple[tuple[int, int | None, Layer], ...] = ()
        self._only: Layer | None = None
        """The layer, if there is exactly one and it is for all threads."""

    def begin(self, own: Forward, is_foreign: bool) -> bool:
        """Stand in for this forward, with the first layer alone; False if it stands for one already."""
        if self._layers:
            return False
        self.own, self.is_foreign = own, is_foreign
        self._layers, self._only = self._first, self._first_only
        return True

    def add(self, order: int, layer: Layer, thread: int | None = None) -> None:
        """Add a layer."""
        self._set(tuple(sorted((*self._layers, (order, thread, layer)), key=lambda item: item[0])))

    def remove(self, layer: Layer) -> bool:
        """Remove the latest occurrence of `layer`; True if no layer is left."""
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
        """Itself: whoever copies a module removes the copy's stand-in."""
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


def set_apart(layer: Layer, apart: Apart) -> Layer:
    """The layer with what it does itself in the context, and the forwards further inwards outside of it."""

    def call(inner: Forward, *args: Any, **kwargs: Any) -> Any:
        try:
            context = apart()
        except RunEagerly:
            return inner(*args, **kwargs)

        def outside(*args: Any, **kwargs: Any) -> Any:
            nonlocal context
            context.__exit__(None, None, None)
            context = nullcontext()  # there may be none to come back to
            try:
                return inner(*args, **kwargs)
            finally:
                context = apart()
                context.__enter__()

        context.__enter__()
        try:
            return layer(outside, *args, **kwargs)
        finally:
            context.__exit__(None, None, None)

    return call


def has_foreign_forward(module: torch.nn.Module) -> bool:
    """Whether somebody else has replaced the forward of this module instance."""
    forward = module.__dict__.get("forward")
    return forward.is_foreign if isinstance(forward, StandIn) else forward is not None


class Substitution:
    """`substituted` for the same layers at one call after another: what it needs is made once.

    thread: as for `StandIn`.
    """

    def __init__(self, layers: Mapping[torch.nn.Module, Layer], order: Order, thread: int | None = None):
        self._order, self._thread = order, thread
        self._ready = [(module, layer, StandIn(order, layer, thread)) for module, layer in layers.items()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The context. It may be entered again before it ends, by other threads too."""
        placed = 0
        try:
            with _changing:
                for placed, (module, layer, ready) in enumerate(self._ready, 1):  # noqa: B007
                    attributes = module.__dict__
                    stand_in = attributes.get("forward")
                    if type(stand_in) is StandIn:
                        stand_in.add(self._order, layer, self._thread)
                        continue
                    is_foreign = stand_in is not None
                    if not ready.begin(module.forward, is_foreign):  # somebody has put another forward in its place
                        ready = StandIn(self._order, layer, self._thread)
                        ready.begin(module.forward, is_foreign)
                    attributes["forward"] = ready
            yield
        finally:
            with _changing:
                for module, layer, _ in self._ready[:placed]:
                    attributes = module.__dict__
                    stand_in = attributes.get("forward")
                    if type(stand_in) is StandIn and stand_in.remove(layer):
                        if stand_in.is_foreign:
                            attributes["forward"] = stand_in.own
                        else:
                            del attributes["forward"]


def substituted(
    layers: Mapping[torch.nn.Module, Layer], order: Order, this_thread_only: bool = False
) -> AbstractContextManager[None]:
    """In this context, calling a module of `layers` calls its layer as `layer(inner, *args, **kwargs)`.

    `inner` is the next layer inwards and finally the module's own forward. However the context ends
    (return, exception, interrupt), every module's `__dict__` is restored.

    this_thread_only: calls of the same modules by other threads bypass the layers.
    """
    return Substitution(layers, order, threading.get_ident() if this_thread_only else None).in_place()


_changing = threading.RLock()
"""Guards adding and removing stand-ins; reentrant, since an interrupt may come in between."""
