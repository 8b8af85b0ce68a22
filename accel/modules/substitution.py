"""Stand-ins for the forwards of modules, for the duration of one model call.

Compiling and capturing put *layers* in front of a module's own forward. These stack in a fixed order, whatever the
order in which they were entered; leaving the context restores the module exactly.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from ..core.torch_internals import allow_inlining

Forward = Callable[..., Any]
"""Takes and returns what the module's own forward does."""

Layer = Callable[..., Any]
"""A forward with the next forward inwards as an additional first argument."""

Outside = Callable[[], AbstractContextManager]
"""Makes the context in which a host wants a layer to do its own work, outside of its record of the model's memory.

Raises `RunEagerly` where the layer must let the call pass by."""


class Order(IntEnum):
    """The position of a layer: a higher one sees the call before a lower one."""

    CAPTURED = -1
    COMPILED = 0
    CACHED = 1


class _Item(NamedTuple):
    """One layer of a stand-in. thread: the only one whose calls go to it; None for all threads."""

    order: Order
    thread: int | None
    layer: Layer


def rebound(method: Any, memo: dict, otherwise: Any) -> Any:
    """The method bound to the copy of its object, within a deep copy that has made one; `otherwise` without."""
    copied = memo.get(id(getattr(method, "__self__", None)))
    return otherwise if copied is None else types.MethodType(method.__func__, copied)


class StandIn(functools.partial):
    """A module's `forward` while at least one layer is in place. It does not change: more layers make another.

    A partial, so that a call goes straight to a single layer: one frame of Python's less in each call of each block.

    own: the forward that it stands for. is_foreign: somebody else has put that on the module.
    items: its layers, the innermost first.
    """

    __slots__ = ("is_foreign", "items", "own")
    own: Forward
    is_foreign: bool
    items: tuple[_Item, ...]

    @classmethod
    def make(cls, own: Forward, is_foreign: bool, items: tuple[_Item, ...]) -> StandIn:
        is_single = len(items) == 1 and items[0].thread is None
        made = cls(items[0].layer, own) if is_single else cls(_call, items, own)
        made.own, made.is_foreign, made.items = own, is_foreign, items
        return made

    def add_item(self, item: _Item) -> StandIn:
        """This stand-in with one more layer."""
        items = (*self.items, item)
        if self.items[-1].order > item.order:
            items = tuple(sorted(items, key=operator.attrgetter("order")))
        return self.make(self.own, self.is_foreign, items)

    def remove_item(self, item: _Item) -> StandIn | None:
        """The stand-in without this very item; None if no layer is left."""
        items = tuple(kept for kept in self.items if kept is not item)
        return self.make(self.own, self.is_foreign, items) if items else None

    def end(self) -> None:
        """Have those who have kept it call nothing but the forward that it stands for."""
        self.__setstate__((_call, ((), self.own), {}, None))  # type: ignore[attr-defined]  # not in typeshed

    def __deepcopy__(self, memo: dict) -> StandIn:
        """What it stands for, bound to the copy of the module; itself where that is no method of a module that is
        being copied."""
        copied = rebound(self.own, memo, self)
        if getattr(copied, "__func__", None) is _own_forward:  # as on a module that nobody has touched
            return type(copied.__self__).forward.__get__(copied.__self__)
        return copied


def _call(items: tuple[_Item, ...], forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Call the layers that are for this thread, each around the ones further inwards."""
    here = threading.get_ident()
    for _, thread, layer in items:
        if thread is None or thread == here:
            forward = functools.partial(layer, forward)
    return forward(*args, **kwargs)


def has_foreign_forward(module: torch.nn.Module) -> bool:
    """Whether somebody else has replaced the forward of this module instance."""
    return foreign_forward(module) is not None


def foreign_forward(module: torch.nn.Module) -> Forward | None:
    """The forward that somebody else has put on this module instance; None without one."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, StandIn):
        return forward.own if forward.is_foreign else None
    return forward


def drop_restored_forwards(modules: Iterable[torch.nn.Module]) -> None:
    """Take off what has no effect: forwards of the modules' classes that somebody has put back on the modules, as after
    a run with a LoRA beside the layers. With them a module looks like one whose forward was replaced."""
    with _changing:
        for module in [module for module in modules if "forward" in module.__dict__]:
            forward = module.__dict__["forward"]
            is_bound = type(forward) is types.MethodType and forward.__self__ is module
            if is_bound and forward.__func__ is forward_of(type(module))[1]:
                del module.__dict__["forward"]


class Substitution:
    """`substitute` for the same layers in one call after another, made once. thread: as of `_Item`."""

    def __init__(self, layers: Mapping[torch.nn.Module, Layer], order: Order, thread: int | None = None):
        self._layers, self._order, self._thread = list(layers.items()), order, thread
        self._places = [module.__dict__ for module in layers]
        self._ready: list[StandIn] = []
        """For each module the stand-in for the forward of its class; none while a context has them."""

    @contextmanager
    def put_in_place(self) -> Iterator[None]:
        """The context. It may be entered again before it ends, by other threads too."""
        ready: list[StandIn] = []
        made: dict[int, tuple[Any, Forward]] = {}
        try:
            with _changing:
                ready, self._ready = self._ready or [self._stand_in(*item) for item in self._layers], []
                # Between two calls of a model this memory gets cold, so each module's is read once, and by no loop of
                # Python's.
                there = list(map(dict.setdefault, self._places, _FORWARD, ready))
                if there != ready:
                    for at, (place, forward, stand_in) in enumerate(zip(self._places, there, ready, strict=True)):
                        over = stand_in if forward is stand_in else _add_layer(forward, stand_in.items[0])
                        if over is not stand_in and over is not forward:
                            made[at] = over, forward
                            place["forward"] = over
            yield
        finally:
            with _changing:
                there = list(map(dict.get, self._places, _FORWARD))
                if there == ready:
                    for place in self._places:
                        del place["forward"]
                else:
                    self._take_back(there, ready, made)
                self._ready = ready

    def _stand_in(self, module: torch.nn.Module, layer: Layer) -> StandIn:
        own = types.MethodType(_own_forward, module)
        return StandIn.make(own, False, (_Item(self._order, self._thread, layer),))

    def _take_back(
        self, there: Sequence[Forward | None], ready: list[StandIn], made: dict[int, tuple[Any, Forward]]
    ) -> None:
        """Leave the forwards that are there without our layers, where others came before, after or in their place.
        made: what was put over a forward that was there, and that forward, by the module's index."""
        for at, (place, forward, stand_in) in enumerate(zip(self._places, there, ready, strict=False)):
            put, under = made.get(at, (stand_in, None))
            if type(forward) is not StandIn:  # somebody has put another in its place, which may call it
                stand_in.end()
                put.end()
                ready[at] = StandIn.make(stand_in.own, False, stand_in.items)
                continue
            left = under if forward is put else forward.remove_item(stand_in.items[0])
            if left is None and forward.is_foreign:
                left = forward.own
            if left is not None:
                place["forward"] = left
            else:
                del place["forward"]


def _add_layer(forward: Forward, item: _Item) -> Forward:
    """What is put on a module that has this forward already: a stand-in for it with one more layer, or the forward
    itself, where the layer is right for that of the module's class alone and somebody else has put another there."""
    for_own_alone = getattr(item.layer, "for_own_alone", False)
    if type(forward) is not StandIn:
        return forward if for_own_alone else StandIn.make(forward, True, (item,))
    return forward if for_own_alone and forward.is_foreign else forward.add_item(item)


def forward_of(cls: type) -> tuple[type, Any]:
    """The class that has the forward of a class, and that forward as it stands there."""
    for base in cls.__mro__:
        if "forward" in base.__dict__:
            break
    return base, base.__dict__["forward"]


@allow_inlining
def _own_forward(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call the forward that the module's class has now, whatever stands on the module itself."""
    _, forward = forward_of(type(module))
    if type(forward) is types.FunctionType:  # which a compiler around it can trace
        return forward(module, *args, **kwargs)
    if hasattr(forward, "__get__"):
        forward = forward.__get__(module, type(module))
    return forward(*args, **kwargs)


_FORWARD = itertools.repeat("forward")


def substitute(
    layers: Mapping[torch.nn.Module, Layer], order: Order, this_thread_only: bool = False
) -> AbstractContextManager[None]:
    """A context in which calling a module of `layers` calls its layer as `layer(inner, *args, **kwargs)`.

    `inner` is the next layer inwards and finally the module's own forward. However the context ends
    (return, exception, interrupt), every module's `__dict__` is restored.

    this_thread_only: calls of the same modules by other threads bypass the layers.
    """
    return Substitution(layers, order, threading.get_ident() if this_thread_only else None).put_in_place()


_changing = threading.RLock()
"""Guards adding and removing stand-ins; reentrant, since an interrupt may come in between."""
