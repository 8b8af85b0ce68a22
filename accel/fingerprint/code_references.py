"""Descriptions of what code reads: of functions, of what is around them, and of objects.

Of an object that no description captures it is what the code reads of it by name.
"""

from __future__ import annotations

import argparse
import enum
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import getattr_static
from typing import Any

import torch

from ..modules.code_owner import home_of, package_of
from .code_facts import facts_of, find_changed_lists
from .code_snapshot import CodeNotes
from .module_files import Unknown, source_of
from .plain_values import MAX_DEPTH, OPERATORS, PLAIN, Indescribable, References, describe_value, number_of

CONTAINERS = (dict, list, set)
_RECORDS = (argparse.Namespace, types.SimpleNamespace)
MAX_ITEMS = 512
"""A larger table in a module is not a setting, and would be read in every survey."""

_NO_STATE = ("_thread", "ctypes", "logging", "threading", "typing")
"""Modules of types whose objects no result depends on: locks, libraries, loggers, parts of annotations."""

_NOT_RUN = {"__init__", "__setstate__", "__repr__", "extra_repr", "reset_parameters", "_reset_parameters"} | {
    *("__annotate__", "__annotate_func__")
}
"""Construction, printing, annotations (functions from Python 3.14): calling a module runs none, and no `state_dict`."""

BASES = (torch.nn.Module, torch.Tensor, torch._C.TensorBase, object)
"""Bases whose own functions and attributes are torch's version's alone, unless somebody has replaced them."""

_FINDS = frozenset({"__getattr__", "__getattribute__"})
"""Methods that answer for attributes of any name."""

_ITEMS = frozenset({"__getitem__", "__contains__", "__iter__", "__len__", "__call__"}) | _FINDS
"""Methods that code runs without their names."""

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"numpy", "psutil", "torch", "tqdm"}
"""Their functions are described by their own code alone, not by what they call in turn."""

_ENGINE = __name__.rpartition(".fingerprint")[0] + "."
"""What the names of this engine's modules begin with."""

KEPT_NAMES = "__slotnames__"
"""The attribute of a class in which Python keeps it once an instance was copied."""


class CodeReferences(References):
    """What descriptions of values leave to be looked up: functions and classes, sources, and opaque objects; its notes
    are the reader's."""

    def __init__(self, reader: Any):
        super().__init__(reader, reader.notes)
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
        if not is_of_library(cls.__module__):
            module = sys.modules.get(cls.__module__)
            self.add_source({"__name__": cls} if module is None else vars(module))

    def describe(self, value: Any) -> Any:
        """A description of any value: of an indescribable one its type, of an indescribable container None."""
        if _is_constant(value):
            self.notes.watch_numbers(value)
            return ("tensor", value.dtype, tuple(value.shape), value.tolist())
        found = References(self.reader)
        try:
            described = describe_value(value, found)
        except Indescribable:
            if isinstance(value, CONTAINERS):
                return None
            if _has_no_state(value):
                return ("a", type(value).__module__, type(value).__qualname__)
            self.opaque.add(f"a {type(value).__module__}.{type(value).__qualname__}")
            return ("a", type(value).__module__, type(value).__qualname__, number_of(value))
        self.add(found)
        return described

    def describe_type(self, value: Any) -> Any:
        """A description of a value that a library reads: of an indescribable one its type."""
        try:
            return describe_value(value, References(self.reader))
        except Indescribable:
            return ("a", type(value).__module__, type(value).__qualname__)

    def describe_default(self, value: Any, function: types.FunctionType, name: str) -> Any:
        """A description of one of the function's defaults, or of what is in one of its cells. name: in its code."""
        code, is_library = function.__code__, is_of_library(home_of(function))
        if isinstance(value, (tuple, list)):
            if isinstance(value, list) and not is_library:
                self.notes.watch_items(value)
            return tuple(self.describe_default(item, function, name) for item in value)
        if isinstance(value, dict) and name not in code.co_freevars:
            if is_library or name in find_changed_lists(code):  # models fill a default with what a call comes to
                return ("dict", *self.functions_of(value, is_filled=True))
            described = self.describe(value)
            return ("dict", *self.functions_of(value, is_whole=True)) if described is None else described
        if isinstance(value, torch.Tensor) and not value.numel():  # marks an argument that was not given
            return ("empty", tuple(value.shape), value.dtype, value.device)
        inner = value.__self__ if isinstance(value, types.MethodType) else value
        if isinstance(inner, (torch.Tensor, torch.nn.Module)) and not is_library:
            raise Indescribable(f"{function.__qualname__}, a function around a {type(inner).__qualname__}")
        described = [self.function(inner) for inner in functions_in(value)]
        if described:
            return described if is_library else [*described, *self.owner_of(value)]
        return self.describe_type(value) if is_library else self.describe_part(value, name, [code])

    def owner_of(self, value: Any) -> list[tuple]:
        """Descriptions of what a bound method reads of the object that it is bound to; none for anything else."""
        if not isinstance(value, types.MethodType) or isinstance(value.__self__, type):
            return []
        owner, function = value.__self__, value.__func__
        if not isinstance(function, types.FunctionType) or not has_named_state(owner) or id(owner) in self.open:
            return [self.describe(owner)]
        return [self.describe_state(owner, [function.__code__])]

    def describe_part(self, value: Any, name: str, codes: Sequence[types.CodeType]) -> Any:
        """A description of what these codes have in a variable or attribute of this name; of an object what they read
        of it by name, and all of it where they may pass it on."""
        if not has_named_state(value) or id(value) in self.open or len(self.open) >= MAX_DEPTH:
            described = self.describe(value)
            is_table = described is None and isinstance(value, CONTAINERS)
            return self.functions_of(value, is_whole=not self.open) if is_table else described
        if not any(name in facts_of(code).whole for code in codes):
            return self.describe_state(value, codes)
        return (self.describe(value), self.describe_state(value, codes))

    def describe_state(self, value: Any, codes: Sequence[types.CodeType], but: frozenset[str] | None = None) -> tuple:
        """A description of those attributes of an object, and of its class, that code reads by name.

        codes: of the functions that have it. but: of an object that is a global, attributes that do not count; whom its
            methods pass it on to is not asked.
        """
        cls, state = type(value), vars(value)
        names, called, methods = _reads_of(cls, codes)
        codes = [*codes, *methods]
        is_passed_on = any(not facts_of(code).whole.isdisjoint(code.co_varnames[:1]) for code in methods)
        if not _FINDS.isdisjoint(called) or (but is None and is_passed_on):
            names |= state.keys()
        names -= but or set()
        # What these keep on the object is made by their functions, which count, at the first call or at a later one.
        names = {name for name in names if not isinstance(getattr_static(cls, name, None), functools.cached_property)}
        self.notes.watch_type(value)
        self.open.add(id(value))
        described: list[Any] = [self.class_of(value)]
        for name in frozenset().union(*(facts_of(code).asked for code in codes)).difference(state):
            self.notes.watch_absent(state, name)
        for name in sorted(names.intersection(state)):
            self.notes.watch(state, name)
            described.append((name, self.describe_part(state[name], name, codes)))
        for base in cls.__mro__:
            if is_of_library(base.__module__):
                continue
            for name in sorted(names.intersection(vars(base)).difference(state)):
                self.notes.watch_absent(state, name)
                attribute = vars(base)[name]
                if next(functions_in(attribute), None) is None and not name.startswith("__"):
                    self.notes.watch(base, name)
                    described.append((base.__qualname__, name, self.describe_part(attribute, name, codes)))
        self.open.discard(id(value))
        return tuple(described)

    def functions_of(self, container: Any, is_filled: bool = False, is_whole: bool = False) -> list[str]:
        """Descriptions of the functions, and of the plain values beside them, in a container of which nothing else can
        be told, as in a table of them. is_filled: by the code that reads it. is_whole: its plain values count without a
        function too."""
        items = list(container.items() if isinstance(container, dict) else enumerate(container))
        described, beside = [], []
        for key, item in items:
            if type(item) in PLAIN and type(key) in PLAIN:
                beside.append(repr((key, item)))
            elif isinstance(item, OPERATORS):
                described.append(repr(self.describe_type(item)))
            for function in functions_in(item):
                try:
                    described.append(repr([self.function(function), *self.owner_of(item)]))
                except Indescribable as why:
                    self.opaque.add(str(why))
        if described or is_whole or not (container or is_filled):
            self.notes.watch_items(container)
        return sorted(described + beside) if described or is_whole else []


def _reads_of(cls: type, codes: Sequence[types.CodeType]) -> tuple[set[str], set[str], list[types.CodeType]]:
    """What these codes, which have an object of the class, may read of it: the names in them and in the methods that
    they may call; the names of these methods; and their codes."""
    methods: dict[str, list[types.CodeType]] = {}
    for path, function in methods_of(cls):
        methods.setdefault(path.rpartition(".")[2], []).append(function.__code__)
    names, called, found = set(_ITEMS), set(), []
    waiting = list(codes)
    while waiting:
        names.update(*(facts_of(code).names | facts_of(code).asked for code in waiting))
        more = names.intersection(methods) - called
        called |= more
        waiting = [code for name in more for code in methods[name]]
        found += waiting
    return names, called, found


def methods_of(cls: type, notes: CodeNotes | None = None) -> Iterator[tuple[str, types.FunctionType]]:
    """The functions that a call of an instance may run: all but `_NOT_RUN`. notes: get where they are."""
    for base in cls.__mro__:
        if base in BASES:
            continue
        if notes is not None:
            notes.watch_len(base, KEPT_NAMES)
        for name, value in vars(base).items():
            if is_run(name, value):
                for function in functions_in(value):
                    if notes is not None:
                        notes.watch(base, name)
                    yield f"{base.__qualname__}.{name}", function


def find_codes_run_by(
    modules: Iterable[torch.nn.Module], others: Iterable[torch.nn.Module] = ()
) -> frozenset[types.CodeType]:
    """The code, but libraries', that calls of these modules may run, where names, cells and attributes lead to it.
    others: modules of which they may call methods by name."""
    waiting: list[Any] = [value for module in modules for value in (type(module), *vars(module).values())]
    seen: dict[int, types.FunctionType] = {}
    methods: dict[str, list[types.FunctionType]] = {}
    for cls in set(map(type, others)):
        for path, method in methods_of(cls):
            name = path.rpartition(".")[2]
            if name != "forward" and not name.startswith("__"):
                methods.setdefault(name, []).append(method)
    while waiting:
        value = waiting.pop()
        cls = value if isinstance(value, type) else type(value)
        of_class = () if is_of_library(cls.__module__) else (method for _, method in methods_of(cls))
        for function in (*functions_in(value), *of_class):
            if id(function) in seen or home_of(function).startswith(_ENGINE):
                continue
            seen[id(function)] = function
            waiting += (of for _, of in read_held_values(function))
            if is_of_library(home_of(function)):  # a decorator's product: what it wraps is what it is given
                continue
            names, scope = facts_of(function.__code__).names, function.__globals__
            waiting += (method for name in names.intersection(methods) for method in methods[name])
            for each in [scope[name] for name in names.intersection(scope)]:
                inside = vars(each) if isinstance(each, types.ModuleType) and not is_of_library(each.__name__) else {}
                waiting += (each, *(inside[name] for name in names.intersection(inside)))
    return frozenset(function.__code__ for function in seen.values() if not is_of_library(home_of(function)))


def is_foreign(value: Any) -> bool:
    """Whether what can be called may be of anybody's making."""
    return isinstance(value, functools.partial) or not is_of_library(type(value).__module__)


def is_run(name: str, value: Any) -> bool:
    """Whether a call of an instance may run what its class has under the name."""
    return name not in _NOT_RUN and "state_dict" not in name and not isinstance(value, type)


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions that a value is or directly wraps: a method, a property, a cached function."""
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


def read_held_values(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The values that the function holds, by name: its defaults, the contents of its cells, where a decorator's product
    has what it wraps, and those attributes that are plain or functions."""
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from sorted((function.__kwdefaults__ or {}).items())
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            yield name, None
    for name, value in sorted(vars(function).items()):
        if not name.startswith("_") and (type(value) in PLAIN or isinstance(value, types.FunctionType)):
            yield name, value


@functools.lru_cache(maxsize=4096)
def is_of_library(module: str | None) -> bool:
    """Whether the module of this name is of Python, torch or a library whose functions are not followed."""
    return package_of(module) in _LIBRARIES


def _is_constant(value: Any) -> bool:
    """Whether it is a small tensor, such as a table of the numbers that codes stand for."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_quantized
        and value.numel() <= MAX_ITEMS
    )


def has_named_state(value: Any) -> bool:
    """Whether it is an object whose state is attributes with names, which code reads one by one."""
    cls = type(value)
    if cls in PLAIN or isinstance(value, (torch.nn.Module, torch.Tensor, enum.Enum)):
        return False
    return hasattr(value, "__dict__") and (not is_of_library(cls.__module__) or cls in _RECORDS)


def _has_no_state(value: Any) -> bool:
    """Whether no result depends on it, or it is the descriptor of an attribute in a class with slots or fields."""
    is_slot = isinstance(value, (types.GetSetDescriptorType, types.MemberDescriptorType))
    return is_slot or type(value).__qualname__ == "_tuplegetter" or type(value).__module__ in _NO_STATE
