"""The token streams of a transformer block: for each output, the argument of which it is the new value.

A block's signature does not say, so it is learned from calls: by identity with an argument of the next block, or with
its own where it works in place; otherwise by shape.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...modules.blocks import uncompiled

_signatures: dict[Callable[..., Any], inspect.Signature] = {}
"""Forward of a block's class → its signature."""


class NoStreams(Exception):
    """A block's outputs are not new values of its arguments; the message says why."""


@dataclass(frozen=True)
class Streams:
    """names: for each output the argument of which it is the new value, None where the output is None. container: tuple
    or list; None for a bare tensor. in_place: arguments that every block writes to and hands back."""

    names: tuple[str | None, ...]
    container: type | None
    in_place: frozenset[str] = frozenset()

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name is not None)

    def pack(self, values: Mapping[str, torch.Tensor]) -> Any:
        """`values`, by argument name, in the form in which the block returns them."""
        out = [None if name is None else values[name] for name in self.names]
        return out[0] if self.container is None else self.container(out)

    def unpack(self, out: Any) -> dict[str, torch.Tensor]:
        """The inverse of `pack`. Raises NoStreams where `out` has another form than before."""
        container, parts = _parts(out)
        if container is not self.container or [part is None for part in parts] != [n is None for n in self.names]:
            raise NoStreams("its output is built otherwise than before")
        return {name: part for name, part in zip(self.names, parts, strict=True) if name is not None}


def arguments(block: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by the parameter names of the block's class, whatever is substituted for its forward.

    Those that it takes as `*args` are named by their place, and so are the tensors of a tuple (LTX 2's picture and
    sound) or list, which blocks may write to, so it is there as well. Raises NoStreams when they do not fit.
    """
    block = uncompiled(block)
    signature = _signature(type(block).forward)
    try:
        bound = signature.bind(block, *args, **kwargs).arguments
    except TypeError as error:
        raise NoStreams(f"it is called otherwise than its class says ({error})") from error
    named: dict[str, Any] = {}
    for name, value in list(bound.items())[1:]:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL or _is_of_tensors(value):
            if type(value) is list:
                named[name] = value
            named.update({f"{name}[{index}]": part for index, part in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def _is_of_tensors(value: Any) -> bool:
    return type(value) in (tuple, list) and bool(value) and all(isinstance(part, torch.Tensor) for part in value)


def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    # Not by functools: torch warns of its caches where somebody compiles the whole model around this.
    found = _signatures.get(forward)
    if found is None:
        found = _signatures[forward] = inspect.signature(forward)
    return found


def possible_streams(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The arguments that may be token streams: floating point, two dimensions or more."""
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim >= 2
    }


class StreamFinder:
    """Learns the token streams of one list's blocks from their calls, in order, in one model call or several."""

    def __init__(self) -> None:
        self._exact: dict[int, str] = {}
        self._alike: list[list[str] | None] | None = None
        self._container: type | None = None
        self._last: list[weakref.ref | None] = []
        """Weak: the model decides when its tensors are freed."""
        self._in_place: list[bool] = []
        """For each output whether all blocks so far handed back an argument."""

    @property
    def saw_any(self) -> bool:
        """Whether any block was called."""
        return self._alike is not None

    def forget_tensors(self) -> None:
        """A model call begins, or its blocks are done: identities do not reach beyond it."""
        self._last = []

    def see_call(self, given: Mapping[str, torch.Tensor]) -> None:
        """Note that a block is about to be called with these `possible_streams`."""
        for index, part in enumerate(self._last):
            for name, value in given.items():
                if part is not None and value is part():
                    self._exact[index] = name

    def see_return(self, given: Mapping[str, torch.Tensor], out: Any) -> None:
        """Note what it returned. Raises NoStreams when no argument is like an output."""
        self._container, parts = _parts(out)
        if self._alike is not None and len(self._alike) != len(parts):
            raise NoStreams("its blocks return different numbers of tensors")
        alike = []
        for index, part in enumerate(parts):
            names = None
            if part is not None:
                names = [name for name, value in given.items() if _alike(value, part)]
                if self._alike is not None and self._alike[index] is not None:
                    names = [name for name in names if name in self._alike[index]]
                if not names:
                    raise NoStreams(f"it returns a tensor {list(part.shape)} that is like none of its arguments")
            alike.append(names)
        own = [any(value is part for value in given.values()) for part in parts]
        self._in_place = [all(both) for both in zip(own, self._in_place or own, strict=True)]
        self._alike, self._last = alike, [None if part is None else weakref.ref(part) for part in parts]
        self.see_call(given)  # a block that works in place returns its own

    def found(self) -> Streams:
        """The token streams, by the calls so far. Raises NoStreams when they leave it open."""
        if self._alike is None:
            raise NoStreams("none of its blocks was called")
        names: dict[int, str | None] = {index: None for index, options in enumerate(self._alike) if options is None}
        names |= {index: name for index, name in self._exact.items() if names.get(index, name) is not None}
        while len(names) < len(self._alike):
            left = {
                index: [name for name in options if name not in names.values()]
                for index, options in enumerate(self._alike)
                if index not in names
            }
            single = {index: options[0] for index, options in left.items() if len(options) == 1}
            if len(self._alike) == 1 and left[0]:
                single = {0: left[0][0]}  # x comes first
            if not single:
                raise NoStreams("which of its outputs is which of its arguments is unclear")
            index = min(single)
            names[index] = single[index]
        in_place = frozenset(names[index] for index, is_own in enumerate(self._in_place) if is_own)
        return Streams(tuple(names[index] for index in range(len(names))), self._container, in_place)


def _parts(out: Any) -> tuple[type | None, list[torch.Tensor | None]]:
    if isinstance(out, torch.Tensor):
        return None, [out]
    if type(out) in (tuple, list) and any(part is not None for part in out):
        if all(part is None or isinstance(part, torch.Tensor) for part in out):
            return type(out), list(out)
    raise NoStreams(f"it returns {type(out).__name__} that is not made of tensors")


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
