"""Whether the code that was read still stands: compared by identity, cheap enough to ask in each call of a model.

Other programs replace functions for the length of a call and put the old ones back: what was read before the call is
then not what runs in it. So a reader notes everywhere that it looked, and blocks ask again when they are called.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Container, Iterable, Mapping
from itertools import chain
from operator import attrgetter, contains, getitem, is_, sub
from typing import Any

import torch

_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.device, torch.Size)

_contents, _version = attrgetter("cell_contents"), attrgetter("_version")


class CodeNotes:
    """Where somebody looked for code, and for the values that it reads.

    Namespaces are dicts (`vars` of modules and objects) and classes. What is noted twice counts once.
    """

    def __init__(self) -> None:
        self._named: dict[tuple[int, Any], tuple[Any, Any]] = {}
        self._hiding: dict[tuple[int, str], tuple[dict, str]] = {}
        self._sized: dict[int, Any] = {}
        self._sized_but: dict[int, tuple[Any, str]] = {}
        self._containers: dict[int, dict | list | set] = {}
        self._typed: dict[int, Any] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._cells: dict[int, types.CellType] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def watch(self, namespace: Any, name: Any) -> None:
        """Invalidate when the namespace has something else under the name, if it has it."""
        self._named[id(namespace), name] = namespace, name

    def watch_absent(self, namespace: dict, name: str) -> None:
        """Invalidate when the namespace gets or loses the name, which would hide what was found elsewhere."""
        self._hiding[id(namespace), name] = namespace, name

    def watch_len(self, namespace: Any, ignore: str = "") -> None:
        """Invalidate when a name is added or removed. ignore: one that comes and goes."""
        if ignore:
            self._sized_but[id(namespace)] = namespace, ignore
        else:
            self._sized[id(namespace)] = namespace

    def watch_items(self, container: dict | list | set) -> None:
        """Invalidate when the container has other items."""
        self._containers[id(container)] = container

    def watch_type(self, value: Any) -> None:
        """Invalidate when the object is of another class."""
        self._typed[id(value)] = value

    def watch_function(self, function: types.FunctionType) -> None:
        """Invalidate when it has other code, other defaults or other values in its cells."""
        self._functions[id(function)] = function
        if function.__kwdefaults__:
            self.watch_items(function.__kwdefaults__)

    def watch_cell(self, cell: types.CellType) -> None:
        """Invalidate when the cell holds something else."""
        self._cells[id(cell)] = cell

    def watch_numbers(self, tensor: torch.Tensor) -> None:
        """Invalidate when numbers are written to the tensor."""
        self._tensors[id(tensor)] = tensor

    def add(self, other: CodeNotes) -> None:
        for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            mine.update(theirs)

    def codes(self) -> frozenset[types.CodeType]:
        """The code of the functions."""
        return frozenset(function.__code__ for function in self._functions.values())

    def snapshot(self, but: Container[tuple[int, Any]] = ()) -> CodeSnapshot:
        """What stands at all of these places now.

        but: (id of a namespace, name) of what changes as the code runs, and decides nothing.
        """
        named = [place for key, place in self._named.items() if key not in but]
        rest = (self._hiding, self._sized, self._sized_but, self._containers, self._typed, self._functions)
        rest = (*rest, self._cells, self._tensors)
        return CodeSnapshot(named, *(list(places.values()) for places in rest))


class CodeSnapshot:
    """What stood at the places that `CodeNotes` has."""

    def __init__(
        self,
        named: Iterable[tuple[Any, Any]],
        hiding: list[tuple[dict, str]],
        sized: list[Any],
        sized_but: list[tuple[Any, str]],
        containers: list[dict | list | set],
        typed: list[Any],
        functions: list[types.FunctionType],
        cells: list[types.CellType],
        tensors: list[torch.Tensor],
    ):
        there = [(names, name) for space, name in named if name in (names := _names_of(space))]
        self._namespaces, self._names = [names for names, _ in there], [name for _, name in there]
        self._values = list(map(getitem, self._namespaces, self._names))
        self._may_hide, self._hidden = [space for space, _ in hiding], [name for _, name in hiding]
        self._are_hidden = list(map(contains, self._may_hide, self._hidden))
        self._sized = list(map(_names_of, sized))
        self._sizes = list(map(len, self._sized))
        self._sized_but, self._but = [_names_of(space) for space, _ in sized_but], [name for _, name in sized_but]
        self._sizes_but = self._counted()
        self._empty = [container for container in containers if not container]
        self._containers = [container for container in containers if container]
        self._items = list(map(_items, self._containers))
        self._typed, self._types = typed, list(map(type, typed))
        self._functions = functions
        self._of_functions = [(of, list(map(of, functions))) for of in map(attrgetter, _OF_FUNCTIONS)]
        closures = (cell for function in functions for cell in function.__closure__ or ())
        self._cells = list(filter(_is_filled, chain(cells, closures)))
        self._cell_contents = list(map(_contents, self._cells))
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]  # those count no changes
        self._versions = list(map(_version, self._tensors))

    def is_current(self) -> bool:
        """Whether all of it stands; about 0.03 µs for each place."""
        try:
            return (
                (all(map(is_, map(getitem, self._namespaces, self._names), self._values)) or self._are_alike())
                and list(map(contains, self._may_hide, self._hidden)) == self._are_hidden
                and list(map(len, self._sized)) == self._sizes
                and self._counted() == self._sizes_but
                and not any(self._empty)
                and all(map(is_, map(type, self._typed), self._types))
                and all(all(map(is_, map(of, self._functions), values)) for of, values in self._of_functions)
                and _are_same(map(_contents, self._cells), self._cell_contents)
                and all(map(_has, self._containers, self._items))
                and list(map(_version, self._tensors)) == self._versions
            )
        except (KeyError, ValueError):  # a name is gone, a cell is empty
            return False

    def _are_alike(self) -> bool:
        return _are_same(map(getitem, self._namespaces, self._names), self._values)

    def _counted(self) -> list[int]:
        return list(map(sub, map(len, self._sized_but), map(contains, self._sized_but, self._but)))


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
    if type(one) in (tuple, list):
        parts, theirs = one, other
    elif isinstance(one, types.FunctionType):
        if one.__code__ is not other.__code__ or one.__globals__ is not other.__globals__:
            return False
        parts, theirs = _given(one), _given(other)
    elif isinstance(one, types.MethodType):
        parts, theirs = (one.__func__,), (other.__func__,)
        if one.__self__ is not other.__self__:
            return False
    elif isinstance(one, (staticmethod, classmethod)):
        parts, theirs = (one.__func__,), (other.__func__,)
    elif type(one) is functools.partial:
        parts, theirs = ((p.func, *p.args, *p.keywords, *p.keywords.values()) for p in (one, other))
    else:
        return False
    return len(parts) == len(theirs) and all(_are_alike(*pair, asked) for pair in zip(parts, theirs, strict=True))


def _given(function: types.FunctionType) -> tuple:
    cells = (cell.cell_contents if _is_filled(cell) else None for cell in function.__closure__ or ())
    keywords = function.__kwdefaults__ or {}
    return (*(function.__defaults__ or ()), *keywords, *keywords.values(), *cells)


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
