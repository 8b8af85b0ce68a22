"""Python functions that graphs call as they are: one operator finds what is there by its name, and calls it.

A graph then depends neither on which function it is nor on what is around it. The function runs once in each call of
the graph. That of another program may keep what it is given or gives, and a graph uses that memory again: so it has
copies.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.operators import define
from ..signature.tree_spec import RunsOthersCode

_SIGNATURE = "(Tensor[] given, Tensor[] like, str finder, str place, str how, SymInt[]? size) -> Tensor[]"


class Callee(NamedTuple):
    """What is called. is_others: it is another program's. odd: makes, of a message, the exception for a result that is
    not what the graph has a place for."""

    function: Callable[..., Any]
    is_others: bool
    odd: Callable[[str], Exception] = TypeError


FINDERS: dict[str, Callable[[str], Callee]] = {}
"""By name: gives what is called at a place, when the graph runs. Others add to it."""


class Options(NamedTuple):
    """A named argument's dict that a host looks up in each call, as far as the block has not changed it. left_out: keys
    that are the call's alone. of_call: gives the dict, for the plain values that the block has there."""

    left_out: Sequence[str]
    of_call: Callable[[dict], dict]


OPTIONS: dict[str, Options] = {}
"""By the name of the argument; hosts add to it."""


def define_operator() -> None:
    """Register the operator, before anything is traced that has it."""
    define("call_host", _SIGNATURE, _run, _fake)


def call_host(
    finder: str, place: str, args: tuple, kwargs: dict, like: Sequence[torch.Tensor], size: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """The tensors that the callee at the place gives for these arguments, when the graph runs; for code that is traced.
    like: a tensor of the same type for each of them. size: of them; None for those of `like`."""
    given: list[torch.Tensor] = []
    options = {
        name: {key: item for key, item in kwargs[name].items() if key not in of.left_out}
        for name, of in OPTIONS.items()
        if kwargs.get(name) is not None
    }
    rest = {name: item for name, item in kwargs.items() if name not in options}
    how = _write_call((*_take_tensors((args, rest), given), options))
    return torch.ops.accel.call_host(given, like or given[:1], finder, place, how, size)


def is_others(error: Exception) -> bool:
    """Whether what a graph has called raised the error."""
    return getattr(error, "is_of_others", False)


def _take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with ... in place of its tensors, which go to the list in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ...
    if isinstance(value, (tuple, list)):
        return type(value)([_take_tensors(item, tensors) for item in value])
    if isinstance(value, dict):
        return {name: _take_tensors(item, tensors) for name, item in value.items()}
    return value


@torch.compiler.assume_constant_result
def _write_call(how: Any) -> str:
    """A call without its tensors as text. Raises TypeError: it has other values than plain ones."""
    how = _write_value(how)
    text = repr(how).replace("Ellipsis", "...")
    if ast.literal_eval(text) != how:
        raise TypeError(f"what a graph would call is given {text}")
    return text


def _write_value(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_write_value, value))
    if type(value) is dict:
        return {name: _write_value(item) for name, item in value.items()}
    if isinstance(value, torch.dtype):
        return str(value)
    return True if isinstance(value, RunsOthersCode) else value


_read = functools.lru_cache(maxsize=1024)(ast.literal_eval)
"""The value of a text, which nobody may change."""


def _put_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The value that was written, with these tensors."""
    if value is ...:
        return next(tensors)
    if isinstance(value, (tuple, list)):
        return type(value)([_put_tensors(item, tensors) for item in value])
    if isinstance(value, dict):
        return {name: _put_tensors(item, tensors) for name, item in value.items()}
    return _DTYPES.get(value, value) if type(value) is str else value


_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def _run(given, like, finder, place, how, size):
    try:
        callee = FINDERS[finder](place)
        if callee.is_others:
            with torch.inference_mode(False):  # whose tensors count their changes
                copies = {tensor: tensor.clone() for tensor in given}
            given = [copies[tensor] for tensor in given]
        args, kwargs, options = _put_tensors(_read(how), iter(given))
        options = {name: OPTIONS[name].of_call(of_block) for name, of_block in options.items()}
        out = callee.function(*args, **kwargs, **options)
        outs = (out,) if len(like) == 1 else out
        if type(outs) is not tuple or len(outs) != len(like):
            raise callee.odd(f"{place} does not give {len(like)} tensors")
        storages, made = {tensor.untyped_storage().data_ptr() for tensor in given}, []
        for one, other in zip(outs, like, strict=True):
            shape = other.shape if size is None else torch.Size(size)
            if type(one) is not torch.Tensor or one.dtype is not other.dtype or one.shape != shape:
                got = f"{one.dtype} {tuple(one.shape)}" if isinstance(one, torch.Tensor) else type(one).__name__
                raise callee.odd(f"{place} gives {got} for {other.dtype} {tuple(shape)}")
            is_kept = callee.is_others or one.untyped_storage().data_ptr() in storages
            made.append(one.clone(memory_format=torch.contiguous_format) if is_kept else one.contiguous())
            storages.add(made[-1].untyped_storage().data_ptr())
        return made
    except Exception as error:
        error.is_of_others = True
        raise


def _fake(given, like, finder, place, how, size):
    return [tensor.new_empty(tensor.shape if size is None else size) for tensor in like]
