"""A hash of the code that a block's classes run: their functions, those they call, and the plain values they read.

Extensions replace functions in modules and methods in classes, for a run or for good, so no hash is
kept from one survey to the next; within a survey, a `CodeReader` reads each thing once.
"""

from __future__ import annotations

import argparse
import enum
import functools
import hashlib
import inspect
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .code_facts import facts_of
from .module_files import Unknown, source_of
from .plain_values import OPERATORS, PLAIN, Indescribable, References, describe_value

_CONTAINERS = (dict, list, set)
_RECORDS = (argparse.Namespace, types.SimpleNamespace)
_MAX_ITEMS = 512
"""A larger table in a module is not a setting, and would be read in every survey."""

_NO_STATE = ("_thread", "ctypes", "logging", "threading", "typing")
"""Modules of types whose objects no result depends on: locks, libraries, loggers, parts of annotations."""

_NOT_RUN = {"__init__", "__setstate__", "__repr__", "extra_repr", "reset_parameters", "_reset_parameters"} | {
    *("__annotate__", "__annotate_func__"),
}
"""Construction, printing, annotations (functions from Python 3.14): calling a module runs none, and no `state_dict`."""

_BASES = (torch.nn.Module, torch.Tensor, torch._C.TensorBase, object)
"""Bases whose own functions and attributes are torch's version's alone."""

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"psutil", "torch", "tqdm"}
"""Their functions are described by their own code alone, not by what they call in turn."""

_ENVIRONMENT = frozenset({"environ", "getenv"})


@dataclass(frozen=True)
class CodeHash:
    """All the code that some classes and functions run.

    digest: of the functions, of those that they call and of the plain values that they read.
    strings: the string constants.
    attributes: those that the code may read, by name or by `getattr` with a constant.
    unread: those that it sets and never reads, as a model does that keeps what a call came to for whoever asks.
    sources: the files and packages that it is in or reads from (`module_files.source_of`), without libraries.
    opaque: objects that it reads of which the digest covers only the type. They stay as they are while a
        program runs.
    """

    digest: str
    strings: frozenset[str]
    attributes: frozenset[str]
    unread: frozenset[str]
    sources: frozenset[str]
    opaque: frozenset[str]


class CodeReader:
    """Hashes code as it is now, for one survey. Raises Indescribable if a function refers to tensors or modules.

    ignored: (module, global) pairs that no result depends on.
    """

    def __init__(self, ignored: frozenset[tuple[str, str]] = frozenset()):
        self.ignored = ignored
        self._functions: dict[int, _Function] = {}
        self._hashes: dict[Any, CodeHash] = {}
        self._described: dict[int, tuple[types.FunctionType, tuple]] = {}
        self._class_attributes: dict[tuple[type, str], str | None] = {}
        self._active: set[int] = set()

    def read(self, classes: frozenset[type], functions: Iterable[types.FunctionType] = ()) -> CodeHash:
        """The hash of what instances of the classes run when called, and of further functions."""
        key = classes, tuple(dict.fromkeys(functions))
        if key not in self._hashes:
            self._hashes[key] = self._hash(*key)
        return self._hashes[key]

    def resting_on(self, code: CodeHash, classes: Iterable[type]) -> CodeHash:
        """The hash with the files of these classes among its sources, whose code decides what the code's operators do.

        Of that code only the names are described: it finds what to run in registries.
        """
        references = _References(self)
        for cls in classes:
            references.add_source_of(cls)
        return replace(code, sources=code.sources | references.sources, opaque=code.opaque | references.opaque)

    def describe_function(self, function: types.FunctionType) -> tuple:
        """The function by itself: its code, its defaults and the contents of its cells."""
        known = self._described.get(id(function))
        if known is not None:
            return known[1]
        if id(function) in self._active:
            return ("itself", function.__qualname__)
        is_outermost = not self._active
        self._active.add(id(function))
        try:
            references = _References(self)
            values = tuple(references.describe_default(value, function) for value in _defaults_and_cells(function))
        finally:
            self._active.discard(id(function))
        described = (function.__module__, function.__qualname__, facts_of(function.__code__).digest, values)
        if is_outermost:  # further in, it may contain an "itself"
            self._described[id(function)] = (function, described)
        return described

    def class_attribute(self, cls: type, name: str) -> str | None:
        """The description of the class's own attribute; None if there is none or it is indescribable."""
        key = cls, name
        if key not in self._class_attributes:
            try:
                self._class_attributes[key] = repr(describe_value(inspect.getattr_static(cls, name), References(self)))
            except (AttributeError, Indescribable):
                self._class_attributes[key] = None
        return self._class_attributes[key]

    def _hash(self, classes: frozenset[type], functions: tuple[types.FunctionType, ...]) -> CodeHash:
        described: list[Any] = []
        roots = list(functions)
        in_order = sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__))
        for cls in in_order:
            described.append((cls.__module__, cls.__qualname__, [base.__qualname__ for base in cls.__mro__]))
            for name, function in _methods_of(cls):
                described.append((name, self.describe_function(function)))
                roots.append(function)
        reached = self._reach(roots)
        strings = frozenset().union(*(function.facts.strings for function in reached))
        names = frozenset().union(*(function.facts.names for function in reached))
        attributes = names | {string for string in strings if string.isidentifier()}
        read = frozenset().union(*(function.facts.read for function in reached))
        unread = _never_read(frozenset().union(*(function.facts.assigned for function in reached)), read, strings)
        # The code's own assignments are where it keeps things, not settings.
        assigned = frozenset().union(*(function.assigned for function in reached))
        values = {value for function in reached for value in function.values if value[:2] not in assigned}
        references = _References(self)
        for cls in classes:
            references.add_source_of(cls)
        described.append(sorted({function.described for function in reached}))
        described.append(sorted({(name, value) for _, name, value in values}))
        described.extend(_class_attributes(cls, attributes, references) for cls in in_order)
        for function in reached:
            references.opaque.update(what for scope, name, what in function.opaque if (scope, name) not in assigned)
        references.sources.update(*(function.references.sources for function in reached))
        digest = hashlib.sha256(repr(described).encode()).hexdigest()
        sources, opaque = frozenset(references.sources), frozenset(references.opaque)
        return CodeHash(digest, strings, attributes, unread, sources, opaque)

    def _reach(self, roots: list[types.FunctionType]) -> list[_Function]:
        """These functions and all that they call in turn; calls into libraries are not followed."""
        seen: dict[int, _Function] = {}
        while roots:
            function = roots.pop()
            if id(function) not in seen:
                if id(function) not in self._functions:
                    self._functions[id(function)] = _Function(function, self)
                found = seen[id(function)] = self._functions[id(function)]
                roots.extend(call for call in found.calls if id(call) not in seen)
        return list(seen.values())


class _References(References):
    """What descriptions of values leave to be looked up: functions and classes, sources, and opaque objects."""

    def __init__(self, reader: CodeReader):
        super().__init__(reader)
        self.sources: set[str] = set()
        self.opaque: set[str] = set()

    def add_source(self, scope: Mapping[str, Any]) -> None:
        """Note the module, given by its namespace, that code or a value is from."""
        try:
            self.sources.add(source_of(scope) or "")
        except Unknown as unknown:
            self.opaque.add(str(unknown))

    def add_source_of(self, cls: type) -> None:
        """Note the module that a class is from."""
        if not _is_library(cls.__module__):
            module = sys.modules.get(cls.__module__)
            self.add_source({"__name__": cls} if module is None else vars(module))

    def describe(self, value: Any) -> Any:
        """A description of any value: of an indescribable one its type, of an indescribable container None."""
        if _is_constant(value):
            return ("tensor", value.dtype, tuple(value.shape), value.tolist())
        found = References(self.reader)
        try:
            described = describe_value(value, found)
        except Indescribable:
            if isinstance(value, _CONTAINERS):
                return None
            if not _has_no_state(value):
                self.opaque.add(f"a {type(value).__module__}.{type(value).__qualname__}")
            return ("a", type(value).__module__, type(value).__qualname__)
        self.add(found)
        return described

    def describe_default(self, value: Any, function: types.FunctionType) -> Any:
        """A description of one of the function's defaults, or of what is in one of its cells."""
        if isinstance(value, (tuple, list)):
            return tuple(self.describe_default(item, function) for item in value)
        if isinstance(value, torch.Tensor) and not value.numel():  # marks an argument that was not given
            return ("empty", tuple(value.shape), value.dtype, value.device)
        if isinstance(value, (torch.Tensor, torch.nn.Module)) and not _is_library(function.__module__):
            raise Indescribable(f"{function.__qualname__}, a function around a {type(value).__qualname__}")
        return [self.function(inner) for inner in _functions_in(value)] or self.describe(value)

    def all_functions(self) -> Iterator[types.FunctionType]:
        yield from self.functions
        for cls in self.classes:
            yield from (function for _, function in _methods_of(cls))


class _Function:
    """One function: its description with what its names refer to now, and the functions to read next.

    values: the plain values that it reads, as (namespace, name, description).
    opaque: the opaque objects that it reads, as (namespace, name, what it is).
    assigned: the globals that it sets, as (namespace, name).
    """

    def __init__(self, function: types.FunctionType, reader: CodeReader):
        self.function = function  # kept alive, since its id is its key
        self.facts = facts_of(function.__code__)
        self.references = _References(reader)
        self.values: list[tuple[int, str, str]] = []
        self.opaque: set[tuple[int, str, str]] = set()
        self._reader = reader
        self._names: list[tuple] = []
        self._namespaces: set[Any] = set()
        for value in _defaults_and_cells(function):
            self.references.describe_default(value, function)
        scope = function.__globals__
        self._follow("", scope, _is_library(function.__module__))
        for cls in self.references.classes:
            self.references.add_source_of(cls)
        self.opaque.update((0, "", what) for what in self.references.opaque)
        self.calls = [call for call in self.references.all_functions() if not _is_library(call.__module__)]
        self.assigned = frozenset((id(scope), name) for name in self.facts.globals_set)
        self.described = repr((reader.describe_function(function), self._names))

    def _follow(self, path: str, scope: Mapping[str, Any], is_library: bool) -> None:
        """Note what the function's names refer to in a module or class, and in those that they lead to."""
        references = self.references
        if not is_library and "__name__" in scope:
            references.add_source(scope)
        for name in sorted(self.facts.names.intersection(scope)):
            if (scope.get("__name__"), name) in self._reader.ignored:
                continue
            value, inner = scope[name], f"{path}{name}"
            called = list(_functions_in(value))
            if isinstance(value, types.MethodType) and not isinstance(value.__self__, type) and not is_library:
                references.opaque.add(f"a method of a {type(value.__self__).__qualname__}")
            if called:
                self._names.append((inner, [references.function(function) for function in called]))
            elif isinstance(value, OPERATORS):
                found = _References(self._reader) if is_library else references
                self._names.append((inner, found.describe(value)))
            elif isinstance(value, (types.ModuleType, type)):
                self._follow_namespace(inner, value, is_library)
            elif not is_library and not name.startswith("__") and not (path and name in self.facts.assigned):
                found = _References(self._reader)
                self.values.extend((id(scope), name, repr((inner, item))) for item in self._settings(value, found))
                self.opaque.update((id(scope), name, what) for what in found.opaque)
                references.add(found)

    def _follow_namespace(self, path: str, value: types.ModuleType | type, is_library: bool) -> None:
        is_module = isinstance(value, types.ModuleType)
        if value in self._namespaces or not (is_module or _is_namespace(value)):
            return
        self._namespaces.add(value)
        if not is_module:
            self.references.add_source_of(value)
        elif value is os and not _ENVIRONMENT.isdisjoint(self.facts.names) and not is_library:
            self.opaque.add((0, "", "the environment's variables"))
        self._follow(f"{path}.", vars(value), is_library or is_module and _is_library(value.__name__))

    def _settings(self, value: Any, references: _References) -> Iterator[Any]:
        """Descriptions of a plain value, or of those attributes of an object that the function reads."""
        if isinstance(value, _CONTAINERS):
            # An empty container says as little as an indescribable one: such are filled while a program runs.
            if len(value) > _MAX_ITEMS:
                references.opaque.add(f"a table of {len(value)} items")
                return
            described = references.describe(value) if value and not self.facts.mutates else None
            if described is not None:
                yield described
        elif _has_named_state(value):
            references.class_of(value)
            for name in sorted(self.facts.names.intersection(vars(value)) - self.facts.assigned):
                yield (name, references.describe(vars(value)[name]))
        else:
            yield references.describe(value)


def _never_read(assigned: frozenset[str], read: frozenset[str], strings: frozenset[str]) -> frozenset[str]:
    """Those of the attributes that are read neither by name nor by one made with a string at an end (f"kept_{n}")."""
    parts = {part for string in strings for part in string.split(".") if len(part) > 1}
    return frozenset(
        name for name in assigned - read - strings if not any(name.startswith(p) or name.endswith(p) for p in parts)
    )


def _class_attributes(cls: type, names: frozenset[str], references: _References) -> list[tuple]:
    """The plain class attributes with these names."""
    return [
        (base.__qualname__, name, references.describe(vars(base)[name]))
        for base in cls.__mro__
        if base not in _BASES
        for name in sorted(names.intersection(vars(base)))
        if not name.startswith("__") and next(_functions_in(vars(base)[name]), None) is None
    ]


def _methods_of(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The functions that a call of an instance may run: all but `_NOT_RUN`."""
    for base in cls.__mro__:
        if base not in _BASES:
            for name, value in vars(base).items():
                if name not in _NOT_RUN and "state_dict" not in name and not isinstance(value, type):
                    for function in _functions_in(value):
                        yield f"{base.__qualname__}.{name}", function


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions that a value is or directly wraps: a method, a property, a cached function."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from _functions_in(part)
    elif isinstance(value, functools.cached_property):
        yield from _functions_in(value.func)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from _functions_in(value.__wrapped__)


def _defaults_and_cells(function: types.FunctionType) -> Iterator[Any]:
    """The function's defaults and the contents of its cells, where a decorator's product has what it wraps."""
    yield from function.__defaults__ or ()
    yield from sorted((function.__kwdefaults__ or {}).items())
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            yield None


@functools.lru_cache(maxsize=4096)
def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _is_namespace(cls: type) -> bool:
    return not issubclass(cls, torch.nn.Module) and not _is_library(cls.__module__)


def _is_constant(value: Any) -> bool:
    """Whether it is a small tensor, such as a table of the numbers that codes stand for."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_quantized
        and value.numel() <= _MAX_ITEMS
    )


def _has_named_state(value: Any) -> bool:
    cls = type(value)
    if cls in PLAIN or isinstance(value, (torch.nn.Module, torch.Tensor, enum.Enum)):
        return False
    return hasattr(value, "__dict__") and (not _is_library(cls.__module__) or cls in _RECORDS)


def _has_no_state(value: Any) -> bool:
    """Whether no result depends on it, or it is the descriptor of an attribute in a class with slots or fields."""
    is_slot = isinstance(value, (types.GetSetDescriptorType, types.MemberDescriptorType))
    return is_slot or type(value).__qualname__ == "_tuplegetter" or type(value).__module__ in _NO_STATE
