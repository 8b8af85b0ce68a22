"""The Python functions that values and classes hold."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

_NOT_RUN = {"__init__", "__setstate__", "__repr__", "extra_repr", "reset_parameters", "_reset_parameters"} | {
    *("state_dict", "load_state_dict", "_load_from_state_dict", "_save_to_state_dict")
}
"""Construction, printing, loading and saving: a call of a module runs none of these."""


def methods_of(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The functions that a call of an instance may run: all but `_NOT_RUN`."""
    for base in cls.__mro__:
        if base is not torch.nn.Module and base is not object:
            for name, value in vars(base).items():
                if name not in _NOT_RUN and not isinstance(value, type):
                    for function in functions_in(value):
                        yield f"{base.__qualname__}.{name}", function


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions that a value is, or is a thin shell of: a method, a property, a cached function."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield from functions_in(value.__func__)
    elif isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from functions_in(part)
    elif isinstance(value, functools.cached_property):
        yield from functions_in(value.func)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from functions_in(value.__wrapped__)


def held_by(function: types.FunctionType) -> Iterator[Any]:
    """Its defaults and the contents of its cells: what a decorator made holds what it was made from."""
    yield from function.__defaults__ or ()
    yield from sorted((function.__kwdefaults__ or {}).items())
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            yield None
