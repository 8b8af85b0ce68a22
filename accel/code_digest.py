"""What the code of a class is: digests of its functions, and of those that they call, as they are now."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_NOT_RUN = {"__init__", "__setstate__", "__repr__", "extra_repr", "reset_parameters", "_reset_parameters"} | {
    *("state_dict", "load_state_dict", "_load_from_state_dict", "_save_to_state_dict")
}
"""Construction, printing, loading and saving: a call of a module runs none of these."""

_digests: weakref.WeakKeyDictionary[types.CodeType, str] = weakref.WeakKeyDictionary()


def code_digest(code: types.CodeType) -> str:
    known = _digests.get(code)
    if known is None:
        constants = tuple(
            code_digest(item) if isinstance(item, types.CodeType) else repr(item)
            for item in code.co_consts
            if not isinstance(item, frozenset)
        )
        known = hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).hexdigest()[:16]
        _digests[code] = known
    return known


def _functions(cls: type) -> Iterator[types.FunctionType]:
    """The functions that a call of an instance may run: all but `_NOT_RUN`."""
    for base in cls.__mro__:
        if base is torch.nn.Module or base is object:
            continue
        for name, value in vars(base).items():
            function = inspect.unwrap(value) if callable(value) else getattr(value, "__func__", None)
            if isinstance(function, types.FunctionType) and name not in _NOT_RUN:
                yield function


@dataclass(frozen=True)
class ClassCode:
    """Digests of a class's functions, the names and strings in them and in the module-level functions that
    they call, and these, as (module's globals, name)."""

    digests: tuple[str, ...]
    names: frozenset[str]
    strings: frozenset[str]
    called: tuple[tuple[dict, str], ...]


@functools.lru_cache(maxsize=4096)
def code_of(cls: type) -> ClassCode:
    digests, names, strings, called = [], set(), set(), {}
    own = list(_functions(cls))
    waiting = list(own)
    while waiting:
        function = waiting.pop()
        for code in _nested(function.__code__):
            names.update(code.co_names)
            strings.update(item for item in code.co_consts if isinstance(item, str))
            for name in code.co_names:
                callee = function.__globals__.get(name)
                key = id(function.__globals__), name
                if isinstance(callee, types.FunctionType) and key not in called:
                    called[key] = (function.__globals__, name)
                    if not callee.__module__.partition(".")[0] == "torch":
                        waiting.extend(_written(callee))
    digests = [code_digest(function.__code__) for function in own]
    return ClassCode(tuple(digests), frozenset(names), frozenset(strings), tuple(called.values()))


def _written(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """A function and those that it closes over: what a decorator made, and what it was made from."""
    yield function
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if isinstance(content, types.FunctionType) and content is not function:
            yield from _written(content)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from _nested(item)


def class_fingerprint(cls: type) -> tuple:
    """Code of the class, and which functions its module-level names mean now: packs replace attention there."""
    code_of_class = code_of(cls)
    current = []
    for scope, name in code_of_class.called:
        function = scope.get(name)
        if isinstance(function, types.FunctionType):
            parts = [(part.__module__, part.__qualname__, code_digest(part.__code__)) for part in _written(function)]
        else:
            parts = [repr(type(function))]
        current.append((name, *parts))
    return (cls.__module__, cls.__qualname__, code_of_class.digests, tuple(current))
