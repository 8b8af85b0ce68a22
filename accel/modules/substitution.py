"""Stand-ins for the forwards of modules, for the duration of one model call.

Compiling and DeepCache both change how a block behaves during a call. Each puts a *layer* in front of
the block's own forward. Layers stack in a fixed order, whatever the order in which they were entered, so
the two compose; leaving the context restores the module exactly.
"""

from __future__ import annotations

import functools
import operator
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


_Item = tuple[int, int | None, Layer]
"""(order, thread, layer). thread: the only one whose calls go to the layer; None for all threads."""


class StandIn(functools.partial):
    """A module's `forward` while at least one layer is in place. It does not change: more layers make another.

    A partial, so that a call goes straight to a single layer: one frame of Python's less in each call of each block.

    own: the forward that it stands for. is_foreign: somebody else has put that on the module.
    """

    __slots__ = ("_items", "is_foreign", "own")

    def __new__(cls, own: Forward, is_foreign: bool, items: tuple[_Item, ...]) -> StandIn:
        """items: its layers, the innermost first."""
        if len(items) == 1 and items[0][1] is None:
            made = super().__new__(cls, items[0][2], own)
        else:
            made = super().__new__(cls, _call, items, own)
        made.own, made.is_foreign, made._items = own, is_foreign, items
        return made

    def plus(self, item: _Item) -> StandIn:
        """With one layer more."""
        return StandIn(self.own, self.is_foreign, tuple(sorted((*self._items, item), key=operator.itemgetter(0))))

    def minus(self, layer: Layer) -> StandIn | None:
        """Without the latest occurrence of `layer`; None if no layer is left."""
        items = list(self._items)
        for index in reversed(range(len(items))):
            if items[index][2] is layer:
                del items[index]
                break
        return StandIn(self.own, self.is_foreign, tuple(items)) if items else None

    def __deepcopy__(self, memo: dict) -> StandIn:
        """Itself: whoever copies a module removes the copy's stand-in."""
        return self


def _call(items: tuple[_Item, ...], forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Call the layers that are for this thread, each around the ones further inwards."""
    here = threading.get_ident()
    for _, thread, layer in items:
        if thread is None or thread == here:
            forward = functools.partial(layer, forward)
    return forward(*args, **kwargs)


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

    thread: as of `_Item`.
    """

    def __init__(self, layers: Mapping[torch.nn.Module, Layer], order: Order, thread: int | None = None):
        self._items = {module: (order, thread, layer) for module, layer in layers.items()}
        self._forwards: dict[type, Any] = {}
        self._ready: list[tuple[dict[str, Any], _Item, StandIn]] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The context. It may be entered again before it ends, by other threads too."""
        placed, ready = 0, ()
        try:
            with _changing:
                ready = self._made_ready()
                # The memory that a module takes here is cold, so as little as possible of it is looked at.
                for placed, (attributes, item, stand_in) in enumerate(ready, 1):  # noqa: B007
                    there = attributes.get("forward")
                    if there is None:
                        attributes["forward"] = stand_in
                    elif type(there) is StandIn:
                        attributes["forward"] = there.plus(item)
                    else:
                        attributes["forward"] = StandIn(there, True, (item,))
            yield
        finally:
            with _changing:
                for attributes, item, stand_in in ready[:placed]:
                    there = attributes.get("forward")
                    if type(there) is not StandIn:  # somebody has put another forward in its place
                        continue
                    left = None if there is stand_in else there.minus(item[2])
                    if left is not None:
                        attributes["forward"] = left
                    elif there.is_foreign:
                        attributes["forward"] = there.own
                    else:
                        del attributes["forward"]

    def _made_ready(self) -> list[tuple[dict[str, Any], _Item, StandIn]]:
        """The stand-ins for the forwards of the modules' classes, made again where one has another forward now."""
        if any(_forward_of(cls) is not forward for cls, forward in self._forwards.items()):
            self._ready = []
        if not self._ready:
            self._forwards = {cls: _forward_of(cls) for cls in map(type, self._items)}
            self._ready = [
                (module.__dict__, item, StandIn(_bound(self._forwards[type(module)], module), False, (item,)))
                for module, item in self._items.items()
            ]
        return self._ready


def _forward_of(cls: type) -> Any:
    """The forward of a class, as it stands there."""
    return next(vars(base)["forward"] for base in cls.__mro__ if "forward" in vars(base))


def _bound(forward: Any, module: torch.nn.Module) -> Forward:
    return forward.__get__(module) if hasattr(forward, "__get__") else forward


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
