"""Parts of blocks that graphs call as they are: layers of weights that nothing explains, and others' code.

In the copy of a block that is compiled, another module stands for such a part. Its operator calls the part that is at
its place in the block when the graph runs, wrappers such as a LoRA included. So a graph depends neither on how the
layer's weight is stored nor on what is around it. Where another program has put its own forward or hooks on a part,
these run once in each call, and what they keep from call to call is theirs.
"""

from __future__ import annotations

import ast
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.operators import define
from ..signature.tensors import PLAIN_TENSORS
from .code_owner import home_of, package_of
from .stored_form import Opaque, form_of
from .substitution import foreign_forward, has_foreign_forward

_called = threading.local()
"""block: a weak reference to the block that this thread calls."""


class Options(NamedTuple):
    """A dict among a part's arguments that a host looks up in each call, as far as the block has not changed it.

    left_out: what is the call's alone. text: plain values for what the block has there. of_call: the dict, given these.
    """

    left_out: Sequence[str]
    text: Callable[[dict], Any]
    of_call: Callable[[dict], dict]


OPTIONS: dict[str, Options] = {}
"""By the name of the argument; hosts add to it."""


class OpaqueLayer(torch.nn.Module):
    """Stands for a part that gives a tensor of its first input's type and size, in code that does no more than call it.

    features: of the result, where its last size is another than the input's. path_in_block: of the part.
    is_others: another program's code runs in it. like: where it gives several, the argument that each is like; those
        without theirs are not there.
    """

    def __init__(self, features: int | None = None, is_others: bool = False, like: tuple[str, ...] = ()):
        torch.nn.Module.__init__(self)
        signature = "(Tensor[] given, Tensor[] like, str path, str how, SymInt? features) -> Tensor[]"
        define("opaque_layer", signature, others_code(_run), _fake)
        self.path_in_block, self.width_of_result, self.is_others, self.like = "", features, is_others, like
        self.training = False

    __call__ = torch.nn.Module.__call__

    def __getattr__(self, name: str) -> Any:
        if torch.compiler.is_dynamo_compiling():  # asked by hasattr or getattr too, which would go the other way
            raise TypeError(f"the block's code reads {name} of a part that it should call")
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given: list[torch.Tensor] = []
        for name, options in OPTIONS.items():
            if name in kwargs:
                own = {key: item for key, item in kwargs[name].items() if key not in options.left_out}
                kwargs[name] = _text_of(name, own)
        like = [kwargs[name] for name in self.like if kwargs.get(name) is not None]
        how = _written(_without((args, kwargs), given))
        out = torch.ops.accel.opaque_layer(given, like or given[:1], self.path_in_block, how, self.width_of_result)
        return tuple(out) if len(like) > 1 else out[0]


def runs_others_code(part: torch.nn.Module) -> bool:
    """Whether another program has put its own forward on the part, or hooks."""
    return bool(part._forward_hooks or part._forward_pre_hooks) or has_foreign_forward(part)


def begin(block: torch.nn.Module) -> None:
    """This block is called in this thread."""
    _called.block = weakref.ref(block)


def _is_of_package(part: torch.nn.Module, block: torch.nn.Module) -> bool:
    """Whether the forward and the hooks on the part are from the package that its block's class is from."""
    forward = foreign_forward(part)
    found = [*part._forward_hooks.values(), *part._forward_pre_hooks.values(), *([] if forward is None else [forward])]
    package = package_of(type(block).__module__)
    return all(package_of(home_of(function)) == package for function in found)


def others_code(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an operator that calls others' code, whose errors are then not the graph's (`is_others`)."""

    def call(*args: Any) -> Any:
        try:
            return run(*args)
        except Exception as error:
            error.is_of_others = True
            raise

    return call


def is_others(error: Exception) -> bool:
    """Whether others' code that a graph ran has raised the error."""
    return getattr(error, "is_of_others", False)


class OpaqueLayers:
    """What stands for layers, the same module for a layer each time."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, bool, OpaqueLayer]]
        self._of = weakref.WeakKeyDictionary()

    def linear(self, layer: torch.nn.Module, is_wrapped: bool = False) -> OpaqueLayer | None:
        """What stands for the layer; None where it can be traced, or is no linear layer.

        is_wrapped: something around the layer adds to its result, which can be traced on plain weights alone.
        """
        weight = layer._parameters.get("weight")
        if weight is None or type(weight) in PLAIN_TENSORS or not isinstance(layer, torch.nn.Linear):
            return None
        known = self._of.get(layer)
        if known is None or known[0] is not type(weight):
            known = self._of[layer] = type(weight), _is_opaque(weight), OpaqueLayer(layer.out_features)
        _, is_opaque, stand_in = known
        return stand_in if is_opaque or is_wrapped else None

    def any(
        self,
        layer: torch.nn.Module,
        features: int | None = None,
        is_others: bool = False,
        like: tuple[str, ...] = (),
    ) -> OpaqueLayer:
        """What stands for a part. features, is_others, like: as of `OpaqueLayer`."""
        if layer not in self._of:
            cls = _standing_for(type(layer)) if is_others else OpaqueLayer
            self._of[layer] = None, True, cls(features, is_others, like)
        return self._of[layer][2]


@functools.lru_cache(maxsize=256)
def _standing_for(cls: type) -> type:
    """A class of stand-ins for parts of a class, which code finds to be of it."""
    if hasattr(cls, "__iter__") or type(cls) is not type:  # which would be empty, or be made in a way of its own
        return OpaqueLayer
    try:
        return type(cls.__name__, (OpaqueLayer, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    except Exception:  # of an extension's `__init_subclass__`, of any type
        return OpaqueLayer


def _is_opaque(weight: torch.Tensor) -> bool:
    try:
        form_of(weight)
    except Opaque:
        return True
    return False


def _without(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with ... in place of its tensors, which go to the list in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ...
    if isinstance(value, (tuple, list)):
        return type(value)([_without(item, tensors) for item in value])
    if isinstance(value, dict):
        return {name: _without(item, tensors) for name, item in value.items()}
    return value


def _with(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if value is ...:
        return next(tensors)
    if isinstance(value, (tuple, list)):
        return type(value)([_with(item, tensors) for item in value])
    if isinstance(value, dict):
        return {name: _with(item, tensors) for name, item in value.items()}
    return value


@torch.compiler.assume_constant_result
def _text_of(name: str, own: dict) -> str:
    return repr(OPTIONS[name].text(own))


@torch.compiler.assume_constant_result
def _written(how: Any) -> str:
    """A call without its tensors as text. Raises ValueError: it has other values than plain ones."""
    text = repr(how).replace("Ellipsis", "...")
    if ast.literal_eval(text) != how:
        raise ValueError(f"a part is called with {text}")
    return text


_read = functools.lru_cache(maxsize=1024)(ast.literal_eval)
"""The value of a text, which nobody may change."""


def _run(
    given: Sequence[torch.Tensor], like: Sequence[torch.Tensor], path: str, how: str, features: int | None
) -> list[torch.Tensor]:
    block = _called.block
    part = block().get_submodule(path)
    is_others = runs_others_code(part) and not _is_of_package(part, block())
    if is_others:  # which may keep what it is given, and a graph uses that memory again
        with torch.inference_mode(False):
            copies = {tensor: tensor.clone() for tensor in given}
        given = [copies[tensor] for tensor in given]
        versions = [tensor._version for tensor in given]
    args, kwargs = _with(_read(how), iter(given))
    kwargs |= {name: OPTIONS[name].of_call(_read(kwargs[name])) for name in OPTIONS if name in kwargs}
    out = part(*args, **kwargs)
    _called.block = block  # the part may have called another
    if is_others and [tensor._version for tensor in given] != versions:
        raise TypeError(f"{path} changes what it is given")
    outs = (out,) if len(like) == 1 else out
    if type(outs) is not tuple or len(outs) != len(like):
        raise TypeError(f"{path} does not give {len(like)} tensors")
    storages, made = {tensor.untyped_storage().data_ptr() for tensor in given}, []
    for one, other in zip(outs, like, strict=True):
        if type(one) is not torch.Tensor or one.dtype is not other.dtype or one.shape != _size(other, features):
            got = f"{one.dtype} {tuple(one.shape)}" if isinstance(one, torch.Tensor) else type(one).__name__
            raise TypeError(f"{path} gives {got} for {other.dtype} {tuple(other.shape)}")
        is_kept = is_others or one.untyped_storage().data_ptr() in storages
        made.append(one.clone(memory_format=torch.contiguous_format) if is_kept else one.contiguous())
        storages.add(made[-1].untyped_storage().data_ptr())
    return made


def _fake(
    given: Sequence[torch.Tensor], like: Sequence[torch.Tensor], path: str, how: str, features: int | None
) -> list[torch.Tensor]:
    return [tensor.new_empty(_size(tensor, features)) for tensor in like]


def _size(like: torch.Tensor, features: int | None) -> tuple[int, ...]:
    return like.shape if features is None else (*like.shape[:-1], features)
