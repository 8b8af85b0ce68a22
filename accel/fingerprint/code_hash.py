"""A hash of the code that a block's classes run: their functions, those they call, and the plain values they read.

Extensions replace functions and methods, for a run or for good, so no hash outlives its survey; within one, a
`CodeReader` reads each thing once.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any

import torch

from ..modules.code_owner import home_of, package_of
from ..signature.switches import read_settings
from .code_facts import facts_of, find_changed_lists, is_of_dataclass
from .code_references import (
    BASES,
    CONTAINERS,
    KEPT_NAMES,
    MAX_ITEMS,
    CodeReferences,
    functions_in,
    has_named_state,
    is_foreign,
    is_of_library,
    is_run,
    methods_of,
    read_held_values,
)
from .code_snapshot import CodeNotes
from .plain_values import OPERATORS, PLAIN, Indescribable, References, describe_value

_CALLED = frozenset({"__call__", "_call_impl", "_wrapped_call_impl", "__getattr__"})
"""Methods that torch runs in each call of a module, whatever its code names."""

_MADE = frozenset({"__init__", "__new__", "__call__", "__enter__", "__exit__"})
"""Methods that run where code calls a class or enters its instance, without naming them."""

_FUNCTIONAL = "torch.nn.functional"
"""The module of torch's functions that models call, and that call others of torch by name."""

_PROGRAM = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, os.path.dirname(__file__), os.__file__)
)
"""Folders of torch, this engine and Python's own modules."""

_INSTALLED = f"{os.sep}site-packages{os.sep}"
"""Part of the path of packages that are installed among Python's own modules; torch is."""

_EXTENSIONS = f"{os.sep}custom_nodes{os.sep}"
_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})
_READS_ENVIRONMENT = tuple(vars(os)[name] for name in sorted(_ENVIRONMENT.intersection(vars(os))))
"""What code reads the environment's variables by: names in `os`, and their values under any name."""


@dataclass(frozen=True)
class CodeHash:
    """All the code that some classes and functions run.

    digest: of the functions, of those that they call and of the plain values that they read.
    strings: the string constants. attributes: may be read, by name or by `getattr` with a constant.
    unread: attributes that the code sets and never reads, such as a call's results that a model keeps for others.
    affixes: prefixes and suffixes of attributes whose names the code builds.
    sources: the files and packages that it is in or reads from (`module_files.source_of`), without libraries.
    opaque: objects that it reads, which the digest covers by type alone; constant within a process.
    """

    digest: str
    strings: frozenset[str]
    attributes: frozenset[str]
    unread: frozenset[str]
    affixes: frozenset[str]
    sources: frozenset[str]
    opaque: frozenset[str]

    def may_read(self, attribute: str) -> bool:
        """Whether the code may read the attribute."""
        if attribute in self.attributes:
            return attribute not in self.unread
        return any(attribute.startswith(affix) or attribute.endswith(affix) for affix in self.affixes)


@dataclass(frozen=True, eq=False)
class ReadCode:
    """The code that was read for a model's blocks.

    codes: of every function. notes: where these are, and the values that they read. around: code around the blocks.
    read: the settings that the code of one block reads, as for `kinds.template_of`; None for all blocks.
    """

    codes: frozenset[types.CodeType]
    notes: tuple[CodeNotes, ...] = ()
    around: frozenset[types.CodeType] = frozenset()
    read: Sequence[tuple[str, Sequence[str]]] | None = None

    @property
    def settings(self) -> frozenset[str]:
        """The names of the watched settings of torch."""
        return frozenset().union(*(notes.settings for notes in self.notes))


class CodeReader:
    """Hashes code as it is now, for one survey. Raises Indescribable if a function refers to tensors or modules.

    ignored: (module, global) pairs that no result depends on. Its `reads`: names that ignored code may read of objects.
    """

    def __init__(self, ignored: frozenset[tuple[str, str]] = frozenset()):
        self.ignored = ignored
        self.reads: frozenset[str] = getattr(ignored, "reads", frozenset())
        self._functions: dict[int, _Function] = {}
        self._hashes: dict[Any, CodeHash] = {}
        self._described: dict[int, tuple[types.FunctionType, tuple]] = {}
        self._class_attributes: dict[tuple[type, str], str | None] = {}
        self._active: set[int] = set()
        self.notes = CodeNotes()
        """Every place where code and values were read, or could not be."""

    def collect_code(self, around: frozenset[types.CodeType] = frozenset()) -> ReadCode:
        """All code that was read."""
        return ReadCode(self.notes.codes(), (self.notes,), around)

    def read(
        self,
        classes: frozenset[type],
        functions: Iterable[types.FunctionType] = (),
        inside: tuple[type, types.FunctionType] | None = None,
    ) -> CodeHash:
        """The hash of what instances of the classes run when called, and of further functions.

        inside: a class, and the function to read in place of its forward.
        """
        key = classes, tuple(dict.fromkeys(functions)), inside
        if key not in self._hashes:
            self._hashes[key] = self._hash(*key)
        return self._hashes[key]

    def describe_function(self, function: types.FunctionType) -> tuple:
        """The function by itself: its code, its defaults and the contents of its cells."""
        known = self._described.get(id(function))
        if known is not None:
            return known[1]
        if id(function) in self._active:
            return ("itself", function.__qualname__)
        if _is_hidden(function):
            self.notes.watch(vars(torch.nn.functional), function.__qualname__)
            raise Indescribable(f"{function.__qualname__}, a function of torch for which another stands in")
        is_outermost = not self._active
        self._active.add(id(function))
        self.notes.watch_function(function)
        try:
            references = CodeReferences(self)
            held = read_held_values(function)
            values = tuple(references.describe_default(value, function, name) for name, value in held)
        finally:
            self._active.discard(id(function))
        described = (function.__module__, function.__qualname__, facts_of(function.__code__).digest, values)
        if is_outermost:  # further in, it may contain an "itself"
            self._described[id(function)] = (function, described)
        return described

    def class_attribute(self, cls: type, name: str) -> str | None:
        """The description of the class's own attribute; None if there is none or it is indescribable."""
        if (cls, name) not in self._class_attributes:
            try:
                description = repr(describe_value(getattr_static(cls, name), References(self)))
            except (AttributeError, Indescribable):
                description = None
            self._class_attributes[cls, name] = description
        return self._class_attributes[cls, name]

    def _hash(
        self,
        classes: frozenset[type],
        functions: tuple[types.FunctionType, ...],
        inside: tuple[type, types.FunctionType] | None,
    ) -> CodeHash:
        described: list[Any] = []
        roots = list(functions)
        in_order = sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__))
        for cls in in_order:
            described.append((cls.__module__, cls.__qualname__, [base.__qualname__ for base in cls.__mro__]))
            for name, function in methods_of(cls, self.notes):
                if inside is not None and name == f"{inside[0].__qualname__}.forward":
                    function = inside[1]
                described.append((name, self.describe_function(function)))
                roots.append(function)
        reached = self._reach(roots)
        strings, names, set_anywhere, affixes = (
            frozenset().union(*(getattr(function.facts, fact) for function in reached))
            for fact in ("strings", "names", "assigned", "affixes")
        )
        for base in (torch.nn.Module, torch.Tensor, torch._C.TensorBase):
            if base is torch.Tensor:  # a new method may hide one of its base's
                self.notes.watch_len(base, KEPT_NAMES)
            for name in sorted((names | _CALLED).intersection(vars(base))):
                self.notes.watch(base, name)
                _require_torchs(f"{base.__name__}.{name}", vars(base)[name])
        attributes = names | self.reads | {string for string in strings if string.isidentifier()}
        settings = read_settings({*attributes, "get_default_dtype"})  # of which code makes tensors
        self.notes.settings.update(name for name, *_ in settings)
        described.append(settings)
        packages = {package_of(cls.__module__) for cls in classes}
        for called in reached:
            if called.filled and package_of(home_of(called.function)) not in packages:
                name = called.function.__qualname__
                raise Indescribable(f"{name}, which keeps {called.filled[0]} from one call to the next")
        unread = find_unread_attributes(set_anywhere, [function.function.__code__ for function in reached])
        # The code's own assignments are where it keeps things, not settings.
        assigned = frozenset().union(*(function.assigned for function in reached))
        values = {value for function in reached for value in function.values if value[:2] not in assigned}
        references = CodeReferences(self)
        for cls in classes:
            references.add_source_of(cls)
        described.append(sorted({function.described for function in reached}))
        described.append(sorted({(name, value) for _, name, value in values}))
        described.extend(_class_attributes(cls, attributes, references) for cls in in_order)
        for called in reached:
            references.opaque.update(what for scope, name, what in called.opaque if (scope, name) not in assigned)
        references.sources.update(*(function.references.sources for function in reached))
        digest = hashlib.sha256(repr(described).encode()).hexdigest()
        sources, opaque = frozenset(references.sources), frozenset(references.opaque)
        return CodeHash(digest, strings, attributes, unread, affixes, sources, opaque)

    def _reach(self, roots: list[types.FunctionType]) -> list[_Function]:
        """These functions and all that they call in turn; calls into libraries are not followed."""
        seen: dict[int, _Function] = {}
        waiting = list(roots)
        while waiting:
            function = waiting.pop()
            if id(function) not in seen:
                if id(function) not in self._functions:
                    self._functions[id(function)] = _Function(function, self)
                seen[id(function)] = self._functions[id(function)]
                waiting += seen[id(function)].calls
        return list(seen.values())


class _Function:
    """One function: its description with what its names refer to now, and the functions to read next.

    values: the plain values that it reads, as (namespace, name, description).
    opaque: the opaque objects that it reads, as (namespace, name, what it is).
    assigned: the globals that it sets, as (namespace, name).
    filled: arguments whose default is a list that it may change, which a graph would not do.
    """

    def __init__(self, function: types.FunctionType, reader: CodeReader):
        self.function = function  # kept alive, since its id is its key
        self.facts = facts_of(function.__code__)
        self.references = CodeReferences(reader)
        self.values: list[tuple[int, str, str]] = []
        self.opaque: set[tuple[int, str, str]] = set()
        self._reader = reader
        scope = function.__globals__
        self.assigned = frozenset((id(scope), name) for name in self.facts.globals_set)
        for name in self.facts.globals_set:
            reader.notes.ignore(scope, name)
        self._names: list[tuple] = []
        self._namespaces: set[Any] = set()
        for name, value in read_held_values(function):
            self.references.describe_default(value, function, name)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        has_lists, is_library = any(isinstance(value, list) for value in defaults), is_of_library(home_of(function))
        self.filled = sorted(find_changed_lists(function.__code__)) if has_lists and not is_library else []
        if not is_library and self.facts.names & _ENVIRONMENT:
            self._read_environment()
        self._follow("", scope, scope, is_library)
        for level, name in sorted(self.facts.imports):
            for module in _find_imported_modules(level, name, scope):
                self._follow_namespace(module.__name__, module, is_library)
        owner = scope.get(function.__qualname__.partition(".")[0])
        if isinstance(owner, type):  # a method reads what is on its class by way of its first argument
            self._follow_namespace(f"{owner.__qualname__} of it", owner, is_library)
        for cls in self.references.classes:
            self.references.add_source_of(cls)
        self.opaque.update((0, "", what) for what in self.references.opaque)
        self.calls: list[types.FunctionType] = []
        of_classes = (function for cls in self.references.classes for _, function in methods_of(cls, reader.notes))
        for call in (*self.references.functions, *of_classes):
            # Of a library's wrapper, such as `contextlib.contextmanager` makes, what it wraps.
            wrapped = (inner for _, value in read_held_values(call) for inner in functions_in(value))
            self.calls += filter(_is_followed, [call] if _is_followed(call) else wrapped)
        self.described = repr((reader.describe_function(function), self._names))

    def _follow(
        self, path: str, owner: Any, scope: Mapping[str, Any], is_library: bool, also: frozenset[str] = frozenset()
    ) -> None:
        """Note what the function's names refer to in a module or class, and in those that they lead to.

        owner: of the scope, as for `CodeNotes.watch`. also: names beside the function's.
        """
        references, notes = self.references, self.references.notes
        function_of_torch = _is_functional(self.function)
        if not is_library and "__name__" in scope and not is_generated(scope):
            references.add_source(scope)
        if not path:  # a module can have others in the place of built-in functions
            for name in sorted(self.facts.loaded.intersection(vars(builtins)).difference(scope)):
                notes.watch_absent(scope, name)
                notes.watch(vars(builtins), name)
                if others := [references.function(function) for function in functions_in(vars(builtins)[name])]:
                    self._names.append((name, others))
        names = self.facts.names | self.facts.asked if path else self.facts.loaded  # not attributes named like globals
        if "__name__" in scope and path and not is_library:
            for name in self.facts.asked.difference(scope):
                notes.watch_absent(scope, name)
        for name in sorted((names | also).intersection(scope)):
            pair = (scope.get("__name__"), name)
            if pair in self._reader.ignored:
                if not frozenset.__contains__(self._reader.ignored, pair):
                    notes.watch(owner, name)  # by a rule, which another value may not fall under
                continue
            value, inner = scope[name], f"{path}{name}"
            if not is_library and any(value is read for read in _READS_ENVIRONMENT):
                self._read_environment()
            called = list(functions_in(value))
            is_code = bool(called) or isinstance(value, (*OPERATORS, types.ModuleType, type))
            if not (is_code or is_library) and (name.startswith("__") or (path and name in self.facts.assigned)):
                continue
            notes.watch(owner, name)
            is_bound = isinstance(value, types.MethodType) and not isinstance(value.__self__, type)
            if is_bound and (not is_library or is_foreign(value.__self__)):
                self._names.append((inner, list(self._settings(value.__self__, references, value.__func__))))
            if called:
                if function_of_torch:
                    _require_torchs(inner, value)
                self._names.append((inner, [references.function(function) for function in called]))
            elif isinstance(value, OPERATORS):
                describe = references.describe_type if is_library else references.describe
                self._names.append((inner, describe(value)))
            elif is_code:
                self._follow_namespace(inner, value, is_library)
            elif is_library and type(value) in PLAIN:
                self._names.append((inner, value))
            elif is_library and callable(value):
                self._names.append((inner, references.describe(value) if is_foreign(value) else type(value).__name__))
            elif not is_library:
                settings = CodeReferences(self._reader)
                self.values.extend((id(scope), name, repr((inner, item))) for item in self._settings(value, settings))
                self.opaque.update((id(scope), name, what) for what in settings.opaque)
                references.add(settings)

    def _follow_namespace(self, path: str, value: types.ModuleType | type, is_library: bool) -> None:
        if value in self._namespaces:
            return
        if isinstance(value, type) and (issubclass(value, torch.nn.Module) or is_of_library(value.__module__)):
            return
        self._namespaces.add(value)
        if isinstance(value, types.ModuleType):
            self._follow(f"{path}.", vars(value), vars(value), is_library or is_of_library(value.__name__))
            return
        self.references.add_source_of(value)
        for cls in (*value.__mro__, *type(value).__mro__):  # type: ignore[misc]  # of the metaclass
            if not is_of_library(cls.__module__):
                self._follow(f"{path}.", cls, vars(cls), is_library, _MADE | self._reader.reads)

    def _read_environment(self) -> None:
        """Note that graphs are not to be saved where an installed package reads its setup, as transformers does.

        Raises Indescribable for any other code, whose variables may change from image to image.
        """
        if not is_installed(self.function.__code__.co_filename):
            raise Indescribable(f"{self.function.__qualname__}, which reads variables of the environment in each call")
        self.opaque.add((0, "", "the environment's variables"))

    def _settings(
        self, value: Any, references: CodeReferences, method: types.FunctionType | None = None
    ) -> Iterator[Any]:
        """Descriptions of a plain value, or of the attributes of an object that the function or the method reads."""
        if isinstance(value, CONTAINERS):
            # An empty container says as little as an indescribable one: such are filled while a program runs.
            if len(value) > MAX_ITEMS:
                references.opaque.add(f"a table of {len(value)} items")
                return
            scope: dict[Any, Any] = self.function.__globals__  # `torch.add` changes no items
            is_filled = any(not isinstance(scope.get(name), types.ModuleType) for name in self.facts.mutates)
            described = references.describe(value) if value and not is_filled else None
            if described is None:
                described = references.functions_of(value, is_filled=is_filled)
            if described:
                yield described
        elif has_named_state(value):
            codes = [self.function.__code__, *([] if method is None else [method.__code__])]
            yield references.describe_state(value, codes, but=self.facts.assigned)
        else:
            yield references.describe(value)


def find_unread_attributes(attributes: frozenset[str], codes: Iterable[types.CodeType]) -> frozenset[str]:
    """Attributes never read: neither by name nor by getattr with a prefix or suffix found in the code (f"kept_{n}")."""
    facts = list(map(facts_of, codes))
    strings = frozenset().union(*(fact.strings for fact in facts))
    read = strings.union(*(fact.read for fact in facts))
    affixes = tuple({part for string in strings for part in string.split(".") if len(part) > 1})
    return frozenset(name for name in attributes - read if not (name.startswith(affixes) or name.endswith(affixes)))


def _class_attributes(cls: type, names: frozenset[str], references: CodeReferences) -> list[tuple]:
    """Descriptions of the class attributes with these names that are no functions, and of other callables there."""
    described = []
    for base in cls.__mro__:
        if base in BASES:
            continue
        for name, value in sorted(vars(base).items()):
            is_read = name in names and not name.startswith("__")
            if not is_read and not (callable(value) and is_run(name, value) and is_foreign(value)):
                continue
            if next(functions_in(value), None) is None:
                references.notes.watch(base, name)
                described.append((base.__qualname__, name, references.describe(value)))
    return described


def _require_torchs(name: str, value: Any) -> None:
    """Raise Indescribable if other code replaces a function of torch, which graphs name."""
    if any(not is_of_library(home_of(function)) for function in functions_in(value)):
        raise Indescribable(f"code of another extension in place of torch's {name}")


def _find_imported_modules(level: int, name: str, scope: Mapping[str, Any]) -> Iterator[types.ModuleType]:
    """The modules that an import inside a function gives, if loaded: the named one and the outermost."""
    package = scope.get("__package__") or ""
    full = importlib.util.resolve_name("." * level + name, package) if level and package else name
    yield from filter(None, map(sys.modules.get, dict.fromkeys((full.partition(".")[0], full))))


def _is_functional(function: types.FunctionType) -> bool:
    """Whether it is a function of `torch.nn.functional`, in torch itself."""
    return function.__module__ == _FUNCTIONAL and is_of_library(home_of(function))


def is_generated(scope: Mapping[str, Any]) -> bool:
    """Whether these are the globals of the `__new__` that Python makes for a named tuple, and of nothing else."""
    return "__file__" not in scope and str(scope.get("__name__")).startswith("namedtuple_")


def _is_hidden(function: types.FunctionType) -> bool:
    """Whether something else has the function's name in torch, by which graphs would run that."""
    if not _is_functional(function) or "<" in function.__qualname__:
        return False
    current = vars(torch.nn.functional).get(function.__qualname__)
    return current is not None and current is not function


def _is_followed(function: types.FunctionType) -> bool:
    return _is_functional(function) or not is_of_library(home_of(function))


def find_unread_code(ran: Iterable[types.CodeType], read: Iterable[types.CodeType]) -> types.CodeType | None:
    """The first code that ran without having been read, but for libraries' and this engine's; None without one."""
    known = set(read)
    waiting = list(known)
    while waiting:
        inner = {part for part in waiting.pop().co_consts if isinstance(part, types.CodeType)} - known
        known |= inner
        waiting += inner
    others = (code for code in ran if code not in known and not is_of_program(code.co_filename))
    return next((code for code in others if not is_of_dataclass(code)), None)


@functools.lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Whether code in the file is of an installed package, and not of an extension of the host's."""
    return _INSTALLED in file and _EXTENSIONS not in file


def is_of_program(file: str) -> bool:
    torchs, engines, pythons = (file.startswith(folder) for folder in _PROGRAM)
    return torchs or engines or (pythons and _INSTALLED not in file) or file.startswith("<frozen ")
