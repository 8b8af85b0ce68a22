"""Whether the code that was read still stands: compared by identity, cheap enough to ask in each call of a model.

Other programs replace functions for the length of a call and put the old ones back: what was read before the call is
then not what runs in it. So a reader notes everywhere that it looked, and blocks ask again when they are called.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, contains, eq, getitem, is_
from typing import Any

import torch

from ..signature.switches import read_settings
from .code_facts import facts_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.device, torch.Size)

_BY_NAME = frozenset({"setattr", "__setattr__", "__dict__", "vars", "globals"})
"""By what code changes what it names by a string."""

_code, _defaults, _kwdefaults = map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__"))
_contents, _version = attrgetter("cell_contents"), attrgetter("_version")
_PARTS = {
    **{"__code__": _code, "__defaults__": _defaults, "__kwdefaults__": _kwdefaults},
    **{"cell_contents": _contents, "__class__": type},
}
_SETTERS, _SET = ("set_", "enable_", "use_", "allow_"), (torch, torch.backends.cuda, torch.autograd)
"""What names of functions that set torch begin with, and where they are."""


class CodeNotes:
    """Where somebody looked for code, and for the values that it reads. Namespaces are dicts (`vars` of modules and
    objects) and classes."""

    def __init__(self) -> None:
        self._named: dict[tuple[int, Any], tuple[Any, Any]] = {}
        self._hiding: dict[tuple[int, str], tuple[Mapping, str]] = {}
        self._sized: dict[tuple[int, str], tuple[Any, str]] = {}
        self._containers: dict[int, dict | list | set] = {}
        self._parts: dict[tuple[Callable, int], Any] = {}
        self.settings: set[str] = set()
        """Names by which code may ask how torch is set (`read_settings`); other answers invalidate."""
        self._ignored: set[tuple[int, Any]] = set()

    def watch(self, namespace: Any, name: Any) -> None:
        """Invalidate when the namespace has something else under the name, if it has it."""
        self._named[id(namespace), name] = namespace, name

    def watch_absent(self, namespace: Mapping, name: str) -> None:
        """Invalidate when the namespace gets or loses the name, which would hide what was found elsewhere."""
        self._hiding[id(namespace), name] = namespace, name

    def watch_len(self, namespace: Any, ignore: str = "") -> None:
        """Invalidate when a name is added or removed. ignore: one that comes and goes."""
        self._sized[id(namespace), ignore] = namespace, ignore

    def watch_items(self, container: dict | list | set) -> None:
        """Invalidate when the container has other items."""
        self._containers[id(container)] = container

    def watch_type(self, value: Any) -> None:
        """Invalidate when the object is of another class."""
        self._parts[type, id(value)] = value

    def watch_function(self, function: types.FunctionType) -> None:
        """Invalidate when it has other code, defaults or attributes, or other values in its cells."""
        for part in (_code, _defaults, _kwdefaults):
            self._parts[part, id(function)] = function
        if function.__kwdefaults__:
            self.watch_items(function.__kwdefaults__)
        for name in vars(function):
            if not name.startswith("_"):  # torch marks functions, too
                self.watch(vars(function), name)
        for cell in function.__closure__ or ():
            self.watch_cell(cell)

    def watch_cell(self, cell: types.CellType) -> None:
        """Invalidate when the cell holds something else."""
        self._parts[_contents, id(cell)] = cell

    def watch_numbers(self, tensor: torch.Tensor) -> None:
        """Invalidate when numbers are written to the tensor."""
        if not tensor.is_inference():  # those count no changes
            self._parts[_version, id(tensor)] = tensor

    def ignore(self, namespace: Any, name: Any) -> None:
        """Watch no longer what changes as the code runs, and decides nothing."""
        self._ignored.add((id(namespace), name))

    def has(self, namespace: Any, name: Any) -> bool:
        """Whether something else under the name there invalidates."""
        if id(namespace) in self._containers or not isinstance(name, (str, int)):
            return id(namespace) in self._containers
        place = id(namespace), name
        return place not in self._ignored and (place in self._named or place in self._hiding)

    def has_part(self, value: types.FunctionType | types.CellType) -> bool:
        """Whether other code in the function, or another value in the cell, invalidates."""
        return (_code, id(value)) in self._parts or (_contents, id(value)) in self._parts

    def select_changed(self, codes: Collection[types.CodeType]) -> CodeNotes:
        """Those of the places where this code may put something else, by the names that it assigns or changes."""
        facts, found = list(map(facts_of, codes)), CodeNotes()
        names = frozenset().union(*(of.names for of in facts))
        by_name = (of.strings for of in facts if not of.names.isdisjoint(_BY_NAME))
        assigned = frozenset().union(*(of.assigned for of in facts), *by_name)
        changes_items = any(of.mutates for of in facts)
        parts = {part for name, part in _PARTS.items() if name in assigned}
        parts |= {_version} if any(name.endswith("_") and not name.endswith("__") for name in names) else set()
        for mine, theirs in ((self._named, found._named), (self._hiding, found._hiding)):
            theirs.update((at, of) for at, of in mine.items() if at[1] in assigned and at not in self._ignored)
        for at, of in self._containers.items():  # but those that a part may have its hooks in
            if (of or type(of) is not OrderedDict) and (changes_items or not assigned.isdisjoint(map(str, of))):
                found._containers[at] = of
        found._parts = {at: of for at, of in self._parts.items() if at[0] in parts}
        setters = (name for name in names if name.startswith(_SETTERS) and "grad" not in name)  # no modes
        if self.settings & assigned or any(hasattr(of, name) for name in setters for of in _SET):
            found.settings = self.settings
        return found

    @classmethod
    def join(cls, *notes: CodeNotes) -> CodeNotes:
        joined = cls()
        for each in notes:
            joined.add(each)
        return joined

    def __bool__(self) -> bool:
        """Whether anything is watched."""
        return any(vars(self).values())

    def add(self, other: CodeNotes) -> None:
        for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            mine.update(theirs)

    def codes(self) -> frozenset[types.CodeType]:
        """The code of the functions."""
        return frozenset(function.__code__ for (part, _), function in self._parts.items() if part is _code)

    def snapshot(self) -> CodeSnapshot:
        """What stands at all of these places now."""
        named = [(_names_of(space), name) for key, (space, name) in self._named.items() if key not in self._ignored]
        sized = [(_names_of(space), ignored) for space, ignored in self._sized.values()]
        asked: list[tuple[Callable, Callable, list]] = [
            (is_, getitem, [place for place in named if place[1] in place[0]]),
            (eq, contains, list(self._hiding.values())),
            (eq, len, [(names,) for names, ignored in sized if not ignored]),
            (eq, lambda names, ignored: len(names) - (ignored in names), [pair for pair in sized if pair[1]]),
            (eq, read_settings, [(frozenset(self.settings),)] if self.settings else []),
        ]
        parts: dict[Callable, list[tuple]] = {}
        for (part, _), value in self._parts.items():
            if part is not _contents or _is_filled(value):
                parts.setdefault(part, []).append((value,))
        return CodeSnapshot([*asked, *((is_, *of) for of in parts.items())], self._containers.values())


class CodeSnapshot:
    """What stood at the places that `CodeNotes` has. asked: how answers are compared, what is asked, and of which
    things. containers: those of which the items count."""

    def __init__(
        self, asked: Iterable[tuple[Callable, Callable, Sequence[tuple]]], containers: Iterable[dict | list | set]
    ):
        self._asked = []
        for compare, ask, places in asked:
            given = list(map(list, zip(*places, strict=True)))
            if given:
                self._asked.append((compare, ask, given, list(map(ask, *given))))
        self._empty = [container for container in containers if not container]
        self._containers = [container for container in containers if container]
        self._items = list(map(_items, self._containers))

    def is_current(self) -> bool:
        """Whether all of it stands; about 0.03 µs for each place."""
        try:
            return (
                all(
                    all(map(compare, map(ask, *given), found)) or _are_same(map(ask, *given), found)
                    for compare, ask, given, found in self._asked
                )
                and not any(self._empty)
                and all(map(_has, self._containers, self._items))
            )
        except (KeyError, ValueError):  # a name is gone, a cell is empty
            return False


def _are_same(ones: Iterable[Any], others: list) -> bool:
    ones = list(ones)
    return all(map(is_, ones, others)) or all(
        _are_alike(one, other, set()) for one, other in zip(ones, others, strict=True)
    )


def _are_alike(one: Any, other: Any, asked: set[tuple[int, int]]) -> bool:
    """Whether these are the same object, or plain values, lists or functions that nobody can tell apart: some make a
    function for each call, of the same code with the very same values in its cells, or a list for each load of a model.

    asked: pairs that are being compared already, as those of a function that refers to itself.
    """
    if one is other or (id(one), id(other)) in asked:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _PLAIN):
        return repr(one) == repr(other)
    asked.add((id(one), id(other)))
    parts, theirs = _parts_of(one), _parts_of(other)
    return 0 < len(parts) == len(theirs) and all(_are_alike(*pair, asked) for pair in zip(parts, theirs, strict=True))


def _parts_of(value: Any) -> Sequence[Any]:
    """The parts that decide what the value does, of a function its code and globals too; none where more decides it."""
    if type(value) in (tuple, list):
        return (type(value), *value)
    if isinstance(value, types.FunctionType):
        cells = (cell.cell_contents if _is_filled(cell) else None for cell in value.__closure__ or ())
        keywords = value.__kwdefaults__ or {}
        given = (*(value.__defaults__ or ()), *keywords, *keywords.values(), *cells)
        attributes = {name: of for name, of in vars(value).items() if not name.startswith("_")}
        return (value.__code__, value.__globals__, *given, *attributes, *attributes.values())
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        return value.__func__, getattr(value, "__self__", None)
    if type(value) is functools.partial:
        return value.func, *value.args, *value.keywords, *value.keywords.values()
    return ()


def _names_of(namespace: Any) -> Mapping:
    return vars(namespace) if isinstance(namespace, type) else namespace


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _items(container: dict | list | set) -> list:
    return list(chain(container, container.values())) if isinstance(container, dict) else list(container)


def _has(container: dict | list | set, items: list) -> bool:
    there = _items(container)
    return len(there) == len(items) and _are_same(there, items)
