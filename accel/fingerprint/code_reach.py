"""What the code of a block's classes means now: its functions, those they call, and the plain values they look at.

Extensions replace functions in modules and methods in classes, for a run or for good, so none of it
is remembered from one survey to the next; within one, a `CodeReader` looks at each thing once.
"""

from __future__ import annotations

import argparse
import enum
import hashlib
import inspect
import os
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .code_digest import CodeFacts, facts_of
from .functions_in import functions_in, held_by, methods_of
from .held_code import Held, is_library_module
from .plain_values import OPERATORS, PLAIN, Indescribable, describe_value

_CONTAINERS = (dict, list, set)
_RECORDS = (argparse.Namespace, types.SimpleNamespace)
_MOST_ITEMS = 512
"""A larger table in a module is no setting, and would be read at every survey."""

_NO_STATE = ("_thread", "ctypes", "logging", "threading", "typing")
"""Modules of types whose objects no result depends on: locks, libraries, loggers, the parts of annotations."""

_ENVIRONMENT = frozenset({"environ", "getenv"})


@dataclass(frozen=True)
class Meaning:
    """All that some functions run.

    digest: of the functions, those that they call and the plain values they look at.
    names, strings: attributes and globals that the code looks at, and its string constants.
    looked_at: attributes that it may read, by their name or by `getattr` with a constant.
    sources: the files and packages that it lies in or looks into (`module_files.source_of`), but for libraries.
    opaque: what it looks at and the digest tells the type of alone. It stays as it is while a program runs.
    """

    digest: str
    names: frozenset[str]
    strings: frozenset[str]
    looked_at: frozenset[str]
    sources: frozenset[str]
    opaque: frozenset[str]


@dataclass(frozen=True)
class _Function:
    """One function: its description with what its names call now, and the functions to look at next.

    values: the plain values it looks at, as (where, name, description). sets: those it sets, as (where, name).
    sources: as in `Meaning`. opaque: like `values`.
    """

    described: str
    facts: CodeFacts
    calls: tuple[types.FunctionType, ...]
    values: tuple[tuple[int, str, str], ...]
    sets: frozenset[tuple[int, str]]
    sources: frozenset[str]
    opaque: frozenset[tuple[int, str, str]]


class CodeReader:
    """Looks code up as it is now, for one survey. Raises Indescribable where a function holds tensors or modules.

    ignored: (module, global) pairs that no result depends on.
    """

    def __init__(self, ignored: frozenset[tuple[str, str]] = frozenset()):
        self._ignored = ignored
        self._functions: dict[int, tuple[types.FunctionType, _Function]] = {}
        self._meanings: dict[Any, Meaning] = {}
        self._known: dict[int, tuple[types.FunctionType, tuple]] = {}
        self._class_held: dict[tuple[type, str], str | None] = {}
        self._active: set[int] = set()

    def class_value(self, cls: type, name: str) -> str | None:
        key = cls, name
        if key not in self._class_held:
            try:
                self._class_held[key] = repr(describe_value(inspect.getattr_static(cls, name), Held(self)))
            except (AttributeError, Indescribable):
                self._class_held[key] = None
        return self._class_held[key]

    def meaning(self, classes: frozenset[type], functions: Iterable[types.FunctionType] = ()) -> Meaning:
        """Of what instances of the classes run when called, and of further functions that they hold."""
        key = classes, tuple(dict.fromkeys(functions))
        if key not in self._meanings:
            self._meanings[key] = self._look(*key)
        return self._meanings[key]

    def own(self, function: types.FunctionType) -> tuple:
        """A function by itself: its code, its defaults, and the cells that it closes over."""
        known = self._known.get(id(function))
        if known is not None:
            return known[1]
        if id(function) in self._active:
            return ("itself", function.__qualname__)
        outermost = not self._active
        self._active.add(id(function))
        try:
            values = tuple(self._held(value, function, Held(self)) for value in held_by(function))
        finally:
            self._active.discard(id(function))
        described = (function.__module__, function.__qualname__, facts_of(function.__code__).digest, values)
        if outermost:  # further in, it may hold an "itself"
            self._known[id(function)] = (function, described)
        return described

    def _look(self, classes: frozenset[type], functions: tuple[types.FunctionType, ...]) -> Meaning:
        told: list[Any] = []
        roots = list(functions)
        in_order = sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__))
        for cls in in_order:
            told.append((cls.__module__, cls.__qualname__, [base.__qualname__ for base in cls.__mro__]))
            for name, function in methods_of(cls):
                told.append((name, self.own(function)))
                roots.append(function)
        seen: dict[int, _Function] = {}
        while roots:
            function = roots.pop()
            if id(function) not in seen:
                found = seen[id(function)] = self._function(function)
                roots.extend(call for call in found.calls if id(call) not in seen)
        held = Held(self)
        names = frozenset().union(*(found.facts.names for found in seen.values()))
        strings = frozenset().union(*(found.facts.strings for found in seen.values()))
        for cls in classes:
            held.lies_where(cls)
        told.append(sorted({found.described for found in seen.values()}))
        # What the code sets itself is where it keeps things, and no setting.
        kept = frozenset().union(*(found.sets for found in seen.values()))
        values = {value for found in seen.values() for value in found.values if value[:2] not in kept}
        told.append(sorted({(name, described) for _, name, described in values}))
        looked_at = names | {string for string in strings if string.isidentifier()}
        told.extend(self._class_values(cls, looked_at, held) for cls in in_order)
        opaque = {item for found in seen.values() for item in found.opaque if item[:2] not in kept}
        held.opaque.update(what for _, _, what in opaque)
        held.sources.update(*(found.sources for found in seen.values()))
        digest = hashlib.sha256(repr(told).encode()).hexdigest()
        return Meaning(digest, names, strings, looked_at, frozenset(held.sources), frozenset(held.opaque))

    def _class_values(self, cls: type, names: frozenset[str], held: Held) -> list[tuple]:
        """The plain class attributes that the code may look at."""
        return [
            (base.__qualname__, name, self._value(vars(base)[name], held))
            for base in cls.__mro__[:-1]
            if base is not torch.nn.Module
            for name in sorted(names.intersection(vars(base)))
            if not name.startswith("__") and next(functions_in(vars(base)[name]), None) is None
        ]

    def _function(self, function: types.FunctionType) -> _Function:
        known = self._functions.get(id(function))
        if known is None:
            facts = facts_of(function.__code__)
            told: list[tuple] = []
            values: list[tuple[int, str, str]] = []
            opaque: set[tuple[int, str, str]] = set()
            held = Held(self)
            for value in held_by(function):
                self._held(value, function, held)
            scope = function.__globals__
            self._means("", scope, facts, told, values, opaque, held, set(), is_library_module(function.__module__))
            for cls in held.classes:
                held.lies_where(cls)
            opaque.update((0, "", what) for what in held.opaque)
            calls = tuple(call for call in held.all_functions() if not is_library_module(call.__module__))
            sets = frozenset((id(scope), name) for name in facts.globals_set)
            described, sources = repr((self.own(function), told)), frozenset(held.sources)
            found = _Function(described, facts, calls, tuple(values), sets, sources, frozenset(opaque))
            known = self._functions[id(function)] = (function, found)
        return known[1]

    def _means(self, path, scope, facts, told, values, opaque, held, seen, is_library):
        """What the names of a function with these facts stand for in a module or class, and in those they lead to.

        told: gets the functions. values: gets the plain values. opaque: gets what cannot be told of.
        held: gets what to look at next.
        """
        if not is_library and "__name__" in scope:
            held.lies_in(scope)
        told_of = Held(self) if is_library else held
        for name in sorted(facts.names.intersection(scope)):
            value, inner = scope[name], f"{path}{name}"
            called = list(functions_in(value))
            if isinstance(value, types.MethodType) and not isinstance(value.__self__, type) and not is_library:
                held.opaque.add(f"a method of a {type(value.__self__).__qualname__}")
            if called or isinstance(value, OPERATORS):
                told.append((inner, [held.function(function) for function in called] or self._value(value, told_of)))
            elif isinstance(value, (types.ModuleType, type)):
                if value not in seen and (isinstance(value, types.ModuleType) or self._is_namespace(value)):
                    seen.add(value)
                    library = is_library or isinstance(value, types.ModuleType) and is_library_module(value.__name__)
                    if isinstance(value, type):
                        held.lies_where(value)
                    elif value is os and not _ENVIRONMENT.isdisjoint(facts.names) and not is_library:
                        opaque.add((0, "", "the environment's variables"))
                    self._means(f"{inner}.", vars(value), facts, told, values, opaque, held, seen, library)
            elif (scope.get("__name__"), name) in self._ignored:
                continue
            elif not is_library and not name.startswith("__") and not (path and name in facts.assigned):
                found = Held(self)
                values.extend((id(scope), name, repr((inner, item))) for item in self._settings(value, facts, found))
                opaque.update((id(scope), name, what) for what in found.opaque)
                found.opaque.clear()
                held.add(found)

    def _settings(self, value: Any, facts: CodeFacts, held: Held) -> Iterator[Any]:
        """What a plain value, or an object with attributes that are looked at, tells."""
        if isinstance(value, _CONTAINERS):
            # An empty one is as good as one that nothing can be told of: such are filled while a program runs.
            if len(value) > _MOST_ITEMS:
                held.opaque.add(f"a table of {len(value)} items")
                return
            described = self._value(value, held) if value and not facts.changes else None
            if described is not None:
                yield described
        elif self._has_named_state(value):
            held.class_of(value)
            for name in sorted(facts.names.intersection(vars(value)) - facts.assigned):
                yield (name, self._value(vars(value)[name], held))
        else:
            yield self._value(value, held)

    @staticmethod
    def _is_namespace(cls: type) -> bool:
        return not issubclass(cls, torch.nn.Module) and not is_library_module(cls.__module__)

    @staticmethod
    def _has_named_state(value: Any) -> bool:
        cls = type(value)
        if cls in PLAIN or isinstance(value, (torch.nn.Module, torch.Tensor, enum.Enum)):
            return False
        return hasattr(value, "__dict__") and (not is_library_module(cls.__module__) or cls in _RECORDS)

    def _held(self, value: Any, function: types.FunctionType, held: Held) -> Any:
        """A default or the content of a cell."""
        if isinstance(value, (tuple, list)):
            return tuple(self._held(item, function, held) for item in value)
        if isinstance(value, torch.Tensor) and not value.numel():  # a mark that nothing was given
            return ("empty", tuple(value.shape), value.dtype, value.device)
        if isinstance(value, (torch.Tensor, torch.nn.Module)) and not is_library_module(function.__module__):
            raise Indescribable(f"{function.__qualname__}, a function around a {type(value).__qualname__}")
        return [held.function(inner) for inner in functions_in(value)] or self._value(value, held)

    def _value(self, value: Any, held: Held) -> Any:
        found = Held(self)
        try:
            described = describe_value(value, found)
        except Indescribable:
            if isinstance(value, _CONTAINERS):
                return None
            if not _has_no_state(value):
                held.opaque.add(f"a {type(value).__module__}.{type(value).__qualname__}")
            return ("a", type(value).__module__, type(value).__qualname__)
        held.add(found)
        return described


def _has_no_state(value: Any) -> bool:
    """Whether it is nothing that a result depends on, or stands for an attribute in a class with slots or fields."""
    is_slot = isinstance(value, (types.GetSetDescriptorType, types.MemberDescriptorType))
    return is_slot or type(value).__qualname__ == "_tuplegetter" or type(value).__module__ in _NO_STATE
