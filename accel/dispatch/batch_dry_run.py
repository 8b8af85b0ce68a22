"""Which sizes of a block's inputs are 1 because the batch or the latent is small, and which are 1 whatever these are.

In one call the two look alike, and a graph traced then would take one for the other. So a copy of the model is run once
more, at a batch of 2 and with a larger latent, on tensors without values: it takes no memory, computes nothing and
leaves no state behind.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..core import torch_internals
from ..core.errors import pass_on
from ..core.events import log
from ..fingerprint.kept_state import without_others_state
from ..fingerprint.plain_values import is_plain_object
from ..modules import wrapped_layers
from ..modules.opaque_layers import OpaqueLayer
from ..modules.stored_form import standing_for
from ..modules.streamed_weights import Plain, in_place
from ..modules.wrapped_layers import Wraps
from ..signature.tensors import CHANNELS_LAST, PLAIN_TENSORS
from ..signature.tree_spec import UnsupportedArgument
from .current_code import CurrentCode
from .global_state_guard import DICTS, global_state_restored

SMALL = 16
"""Side of a latent, below which a deeper level may be a single pixel wide: models halve it up to four times."""


class BatchDryRun:
    """A layer (see `substitution`) around a model's forward that answers `larger` while the model is called.

    tensors_of: for each block, from (args, kwargs) of a call to its input tensors.
    without_hooks: what a dict among the model's arguments is replaced by, so that nobody's code runs twice.
    interrupts: exceptions that mean "stop the run" to the host, and are never swallowed.
    dry: the host's context for a call without values.
    plain: shows the model with its weights in place.
    code: told of each call of the model. between: whether others' code runs between the blocks in a call with these
        arguments. wraps: tells the layers that are called as they are, and have no values to be called with here.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tensors_of: Mapping[torch.nn.Module, Callable[[tuple], list[torch.Tensor]]],
        without_hooks: Callable[[dict], dict] = dict,
        interrupts: tuple[type[BaseException], ...] = (),
        dry: Callable[[], AbstractContextManager] = nullcontext,
        plain: Plain = in_place,
        code: CurrentCode | None = None,
        between: Callable[[tuple, dict[str, Any]], bool] = lambda args, kwargs: False,
        wraps: Wraps | None = None,
    ):
        self._model = model
        self.code, self._between = code, between
        self._plain, self._wraps = plain, wraps
        self._tensors_of = tensors_of
        self._without_hooks = without_hooks
        self._interrupts = interrupts
        self._dry = dry
        self._arguments: tuple[tuple, dict] | None = None
        self._shapes: dict[torch.nn.Module, list[list[torch.Size]]] | None = None

    def __call__(self, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        self._arguments, self._shapes = (args, kwargs), None
        if self.code is not None:
            self.code.begin(self._between(args, kwargs))
        try:
            return inner(*args, **kwargs)
        finally:
            self._arguments = self._shapes = None

    def larger(self, block: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Size] | None:
        """The sizes of these inputs of the block in a larger call of the model: 1 is left where it is always 1.

        None where that is unknown: neither the batch is 1 nor the latent small, or the model cannot run without values.
        """
        if self._arguments is None or torch_internals.lacking(torch_internals.DRY_RUN):
            return None
        if self._shapes is None:
            self._shapes = self._look()
        single = [tensor.shape for tensor in inputs]
        for larger in self._shapes.get(block, ()):
            if len(single) == len(larger) and all(map(_may_be_larger, single, larger)):
                return larger
        return None

    def _look(self) -> dict[torch.nn.Module, list[list[torch.Size]]]:
        """The input shapes of each call of each block, in a larger call of the model."""
        args, kwargs = self._arguments
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not given or given[0].ndim < 2:
            return {}
        latent = given[0]
        rows = 2 if latent.shape[0] == 1 else 1
        sides = latent.shape[2:][-2:] if latent.ndim in CHANNELS_LAST else ()
        factor = -(-SMALL // min(sides)) if sides and 0 < min(sides) < SMALL else 1
        tries = [_Larger(rows, factor, latent.ndim)] if factor > 1 else []
        if rows > 1:
            tries.append(_Larger(rows))
            # A mask, for one, may be the same for every image, and wrong with a row for each.
            tries += [_Larger(rows, left=one) for one in given[1:] if one.shape[:1] == (1,)]
        known: dict[torch.nn.Module, list[list[torch.Size]]] = {}
        for size in tries:
            shapes, failure = self._run(size)
            if failure is None:
                return shapes
            known = max(known, shapes, key=len)
            if failure not in (RuntimeError, ValueError):  # not of sizes that do not fit together
                break
        return known

    def _run(self, size: _Larger) -> tuple[dict[torch.nn.Module, list[list[torch.Size]]], type[Exception] | None]:
        """The input shapes of each call of each block, in a call of the model at this size; and what ended it early."""
        shapes: dict[torch.nn.Module, list[list[torch.Size]]] = {}
        unset_fake, fake_tensor = torch_internals.UNSET_FAKE.get(), torch_internals.FAKE_TENSOR.get()

        def recorder(block: torch.nn.Module, inner: Callable) -> Callable:
            def record(*args: Any, **kwargs: Any) -> Any:
                with unset_fake(), suppress(UnsupportedArgument):  # a call that no graph runs
                    tensors = self._tensors_of[block]((args, kwargs))
                    shapes.setdefault(block, []).append([tensor.shape for tensor in tensors])
                return inner(*args, **kwargs)

            return record

        torch_internals.keep_device_guard()
        copies, mode = ModelCopy(self._wraps), torch_internals.FAKE_MODE.get()(allow_non_fake_inputs=True)

        def foreign(value: Any) -> bool:
            return (type(value) is fake_tensor and value.fake_mode is mode) or copies.made(value)

        try:
            with (
                global_state_restored(self._model, foreign),
                silent(),
                self._dry(),
                torch.inference_mode(False),
                torch.no_grad(),
                mode,
            ):
                plain = self._plain(self._model, self._arguments_device())
                shown = dict(zip(self._model.modules(), plain.modules(), strict=True))
                model = copies.of(plain)
                for block in self._tensors_of:
                    copied = copies.of(shown[block])
                    copied.__dict__["forward"] = recorder(block, copied.forward)
                args, kwargs = self._grown(self._arguments, size)
                is_plain = all(type(weight) in PLAIN_TENSORS for weight in self._model.parameters())
                with without_others_state(self._model, is_plain):
                    model.forward(*args, **kwargs)
        except Exception as error:
            pass_on(error, self._interrupts)
            log.debug("the dry run at a larger size ended early: %s: %s", type(error).__name__, error)
            return shapes, type(error)  # the error itself would keep its frames
        return shapes, None

    def _arguments_device(self) -> torch.device:
        args, kwargs = self._arguments
        return next(value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))

    def _grown(self, value: Any, size: _Larger) -> Any:
        """The arguments at this size; none has values."""
        if isinstance(value, torch.Tensor):
            return torch.empty(size.of(value), dtype=value.dtype, device=value.device)
        if isinstance(value, dict):
            return {key: self._grown(item, size) for key, item in self._without_hooks(value).items()}
        if type(value) in (tuple, list):
            return type(value)(self._grown(item, size) for item in value)
        return value


@dataclass(frozen=True, eq=False)
class _Larger:
    """How much larger the tensors of a call are made.

    rows: in place of a first size of 1. factor: of the last two sizes, of tensors with `ndim` dimensions.
    left: the tensor whose rows stay as they are.
    """

    rows: int
    factor: int = 1
    ndim: int = 0
    left: torch.Tensor | None = None

    def of(self, tensor: torch.Tensor) -> list[int]:
        shape = list(tensor.shape)
        if shape[:1] == [1] and tensor is not self.left:
            shape[0] = self.rows
        if self.factor > 1 and len(shape) == self.ndim:
            shape[-2:] = [side * self.factor for side in shape[-2:]]
        return shape


def _may_be_larger(single: torch.Size, larger: torch.Size) -> bool:
    return len(single) == len(larger) and all(
        two == one or two >= 2 * one for one, two in zip(single, larger, strict=True)
    )


class ModelCopy:
    """Copies of modules, and of the containers and plain objects that they refer to; tensors are shared.

    State that the model's code keeps on itself stays on the copy. Hooks and forwards set on single modules are not
    copied: the copies run the code of their classes.
    """

    def __init__(self, wraps: Wraps | None = None):
        self._wraps = wraps
        self._copies: dict[int, Any] = {}
        self._originals: list[Any] = []  # alive for as long as their ids stand for them
        self._made: set[int] = set()

    def made(self, value: Any) -> bool:
        """Whether the value is one of the copies."""
        return id(value) in self._made

    def of(self, value: Any) -> Any:
        """The copy of a module or of what it refers to; the value itself where none is needed."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        cls = type(value)
        if isinstance(value, torch.nn.Module):
            stand_in = wrapped_layers.bare(value, self._wraps)
            if isinstance(stand_in, OpaqueLayer):
                return stand_in
            copied = self._enter(value, object.__new__(cls))
            copied.__dict__.update({name: self._part(name, item) for name, item in value.__dict__.items()})
            copied.__dict__.pop("forward", None)
        elif cls in DICTS:
            copied = self._enter(value, copy.copy(value))
            for key, item in value.items():
                copied[key] = self.of(item)
        elif cls is list:
            copied = self._enter(value, [])
            copied.extend(self.of(item) for item in value)
        elif cls is tuple:
            copied = tuple(self.of(item) for item in value)
        elif cls is set:
            copied = self._enter(value, {self.of(item) for item in value})
        elif cls is types.MethodType:
            copied = types.MethodType(value.__func__, self.of(value.__self__))
        elif cls is functools.partial:
            copied = functools.partial(self.of(value.func), *self.of(value.args), **self.of(value.keywords))
        elif is_plain_object(value) and not hasattr(cls, "__del__"):
            copied = self._enter(value, object.__new__(cls))
            copied.__dict__.update({name: self.of(item) for name, item in value.__dict__.items()})
        elif isinstance(value, torch.Tensor):
            copied = standing_for(value)
        else:
            copied = value
        return copied

    def _part(self, name: str, value: Any) -> Any:
        is_hooks = name.endswith("_hooks") or "_hooks_" in name
        return type(value)() if is_hooks and type(value) in DICTS else self.of(value)

    def _enter(self, value: Any, copied: Any) -> Any:
        self._copies[id(value)] = copied
        self._originals.append(value)
        self._made.add(id(copied))
        return copied


@contextmanager
def silent() -> Iterator[None]:
    """A context in which torch does not log errors of this thread: without values, some are expected."""
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    thread = threading.get_ident()

    def others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    torch_log.addFilter(others)
    try:
        yield
    finally:
        torch_log.removeFilter(others)
