"""What a compiler has to offer to serve as a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..core.reasons import Reason


class NotSavable(RuntimeError):
    """The artifact cannot leave this process; the message says why."""


@dataclass(frozen=True)
class Artifact:
    """What a backend made of one function over tensors.

    run: computes what the function returns, writes to the inputs that it writes to, and never compiles.
    guards: whether `run` is right for tensors of these sizes. Inputs come on the meta device, since their dtypes,
        devices and layouts are in the graph's key already.
    nbytes: memory that the code takes, bytes; 0 where unknown.
    save: bytes for `Backend.load`, given the template, which must not be in them; it raises `NotSavable`. None where
        the artifact cannot leave the process.
    release: gives back what the backend keeps for `run` elsewhere. Called once nobody holds the graph, so it must not
        refer to `run`.
    pending: None where all of it is there.
    """

    run: Callable[[Sequence[torch.Tensor]], Any]
    guards: Callable[[Sequence[torch.Tensor]], bool]
    nbytes: int = 0
    save: Callable[[torch.nn.Module], bytes] | None = None
    release: Callable[[], None] = lambda: None
    pending: Pending | None = None


class Pending(Protocol):
    """Code that is being made beside; until it is taken, its artifact cannot run. is_done: `take` need not wait."""

    @property
    def is_done(self) -> bool: ...

    def take(self) -> tuple[str, int]:
        """Load the code: what it asks of sizes (`Facts.asked`), and its bytes. Raises Exception: there will be none."""


class Backend(Protocol):
    """Turns a function over tensors into an `Artifact`. To add one, write it and list it in `registry.BACKENDS`.

    One call of `compile` or `load` is under way at a time in the process. An exception of any type means that this
    block runs eagerly; an interrupt of the host's or `torch.OutOfMemoryError` that it wraps is found and raised.

    name: what people choose, and part of the key under which graphs are cached and saved.
    is_faster: its code may run faster than the block, so that measuring the gain makes sense.
    load: the artifact whose `save` gave these bytes, for the template, without compiling it. The bytes are code that
        has been checked; it raises an exception of any type where this system cannot run them. None where nothing is
        saved.
    """

    name: str | Callable
    is_faster: bool

    @property
    def load(self) -> Callable[[bytes, torch.nn.Module], Artifact] | None: ...

    def find_missing(self, device: str | None = None) -> Reason | None:
        """What this machine lacks to compile for this type of device, or what torch lacks where that is None; None
        where nothing is missing."""

    def compile(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Artifact:
        """Compile `function(*tensors)`: a block's weights, then the inputs of a call.

        The code must draw random numbers as the function does. The function has a code object and globals of its own.
        The tensors are examples, of which nothing may be kept. Weights may be the model's own and must not be written
        to; inputs have no defined values. Dimensions marked by `torch._dynamo.maybe_mark_dynamic` may have any size in
        later calls. `guards` must refuse the sizes for which the code is wrong; those that torch itself fixes while it
        traces the function are refused already (`specialization.Trace.find_fixed_sizes`).
        """
