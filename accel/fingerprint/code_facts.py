"""Facts about a code object that its bytecode alone decides; they are computed once."""

from __future__ import annotations

import dis
import hashlib
import operator
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_SETS_GLOBALS = ("STORE_GLOBAL", "DELETE_GLOBAL")
_SETS_ATTRIBUTES = ("STORE_ATTR", "DELETE_ATTR")
_ASSIGNS = (*_SETS_GLOBALS, *_SETS_ATTRIBUTES)
_LOOKS_UP = frozenset({"getattr", "vars", "attrgetter", "__dict__", "__getattribute__"})
_MUTATES = ("STORE_SUBSCR", "DELETE_SUBSCR")
_MUTATING_METHODS = frozenset("add append appendleft clear extend insert pop popitem remove setdefault update".split())
_CHANGING = _MUTATING_METHODS.union(
    "BaseException __dict__ __next__ __setattr__ __setitem__ delattr difference_update discard globals"
    " intersection_update methodcaller move_to_end next popleft random reverse rotate send set setattr sort"
    " vars".split(),
    (name for name in vars(operator) if name.startswith("__i")),
)
"""By what else the state of an object, an iterator or a context is changed, or the end of a run of ours held up."""


@dataclass(frozen=True)
class CodeFacts:
    """A code object and those nested in it.

    digest: equal in every process for equal code.
    names: the globals and attributes that it reads, sets or calls.
    read: those of them that it does more with than to set or delete them.
    strings: its string constants.
    affixes: those of a code that looks attributes up by name, which it may make of them.
    assigned: the globals and attributes that it sets or deletes.
    globals_set: those of them that are globals of its own module.
    mutates: of what it may change the items, as of a list, set or dict: the global variable whose method it calls,
        which may be a module with a function of that name; None for anything else.
    """

    digest: str
    names: frozenset[str]
    read: frozenset[str]
    strings: frozenset[str]
    affixes: frozenset[str]
    assigned: frozenset[str]
    globals_set: frozenset[str]
    mutates: frozenset[str | None]


_known: weakref.WeakKeyDictionary[types.CodeType, CodeFacts] = weakref.WeakKeyDictionary()


def facts_of(code: types.CodeType) -> CodeFacts:
    """The facts about `code`."""
    known = _known.get(code)
    if known is None:
        known = _known[code] = _read(code)
    return known


_used_whole: weakref.WeakKeyDictionary[types.CodeType, frozenset[str]] = weakref.WeakKeyDictionary()

_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


def used_whole(code: types.CodeType) -> frozenset[str]:
    """The variables and attributes that the code does more with than to read an attribute of theirs.

    It may pass them on, so of what they hold, more may count than the names in this code.
    """
    known = _used_whole.get(code)
    if known is None:
        known = _used_whole[code] = _read_whole(code)
    return known


def _read_whole(code: types.CodeType) -> frozenset[str]:
    steps = list(dis.get_instructions(code))
    whole = set()
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if step.opname.startswith(_LOADS) or step.opname in _ATTRIBUTES:
            *first, last = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            whole.update(first)
            if following is None or following.opname not in (*_ATTRIBUTES, *_SETS_ATTRIBUTES):
                whole.add(last)
    nested = (item for item in code.co_consts if isinstance(item, types.CodeType))
    return frozenset(whole).union(*map(used_whole, nested))


def _read(code: types.CodeType) -> CodeFacts:
    nested = [facts_of(item) for item in code.co_consts if isinstance(item, types.CodeType)]
    signature = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    constants = tuple(_constant(item) for item in code.co_consts)
    described = (code.co_code, code.co_names, constants, signature, getattr(code, "co_exceptiontable", b""))
    strings = frozenset(_strings(code.co_consts))
    looks_up = not _LOOKS_UP.isdisjoint(code.co_names)
    affixes = frozenset(part for string in strings for part in string.split(".") if len(part) > 1 and looks_up)
    return CodeFacts(
        digest=hashlib.sha256(repr(described).encode()).hexdigest()[:16],
        names=frozenset(code.co_names).union(*(inner.names for inner in nested)),
        read=_read_names(code).union(*(inner.read for inner in nested)),
        strings=strings.union(*(inner.strings for inner in nested)),
        affixes=affixes.union(*(inner.affixes for inner in nested)),
        assigned=frozenset(_assigned(code, _ASSIGNS)).union(*(inner.assigned for inner in nested)),
        globals_set=frozenset(_assigned(code, _SETS_GLOBALS)).union(*(inner.globals_set for inner in nested)),
        mutates=frozenset(_mutated(code)).union(*(inner.mutates for inner in nested)),
    )


def may_keep(code: types.CodeType) -> bool:
    """Whether the code, without those nested in it, may leave anything that its next call finds."""
    if any(map(_changes_by_name, code.co_names)) or "out" in _strings(code.co_consts):
        return True
    changes, of_others = (*_ASSIGNS, *_MUTATES, "STORE_SLICE"), code.co_freevars
    return any(
        step.opname in changes
        or step.opname.startswith("INPLACE_")
        or step.opname == "BINARY_OP"
        and step.argrepr.endswith("=")  # `x += y` changes what x is, if it is a list or tensor
        or step.opname == "STORE_DEREF"
        and step.argval in of_others
        for step in dis.get_instructions(code)
    )


def _changes_by_name(name: str) -> bool:
    """Whether a function, method or attribute of the name is there to change something."""
    return name in _CHANGING or name.endswith("_") and not name.endswith("__")


def filled(code: types.CodeType) -> frozenset[str]:
    """The arguments of which the code may change the items, if they are lists."""
    names, on_line = set(), []
    for step in dis.get_instructions(code):
        if step.starts_line not in (None, False):
            on_line.clear()
        if step.opname.startswith("LOAD_FAST"):
            on_line += step.argval if isinstance(step.argval, tuple) else (step.argval,)
        elif step.opname in _MUTATES or step.opname in _ATTRIBUTES and step.argval in _CHANGING:
            names.update(on_line)
    return frozenset(names.intersection(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]))


def _mutated(code: types.CodeType) -> Iterator[str | None]:
    operations = code.co_code[::2]  # made anew whenever it is read
    if any(dis.opmap[name] in operations for name in _MUTATES if name in dis.opmap):
        yield None
    if _MUTATING_METHODS.isdisjoint(code.co_names):
        return
    before = None
    for step in dis.get_instructions(code):
        if step.opname in _ATTRIBUTES and step.argval in _MUTATING_METHODS:
            yield before.argval if before is not None and before.opname == "LOAD_GLOBAL" else None
        before = step


def _constant(item: Any) -> Any:
    if isinstance(item, types.CodeType):
        return facts_of(item).digest
    if isinstance(item, frozenset):  # its order differs between processes
        return ("set", *sorted(map(repr, item)))
    if isinstance(item, tuple):
        return ("tuple", *map(_constant, item))
    return item


def _strings(constants: tuple) -> Iterator[str]:
    for item in constants:
        if isinstance(item, str):
            yield item
        elif isinstance(item, (tuple, frozenset)):
            yield from _strings(tuple(item))


def _read_names(code: types.CodeType) -> frozenset[str]:
    if next(_assigned(code, _SETS_ATTRIBUTES), None) is None:
        return frozenset(code.co_names)
    steps = dis.get_instructions(code)
    return frozenset(i.argval for i in steps if i.opcode in dis.hasname and i.opname not in _SETS_ATTRIBUTES)


def _assigned(code: types.CodeType, operations: tuple[str, ...]) -> Iterator[str]:
    raw = code.co_code
    for name in operations:
        operation = dis.opmap[name]
        at = raw.find(operation)
        while at >= 0:
            if at % 2 == 0:
                argument, before, shift = raw[at + 1], at - 2, 8
                while before >= 0 and raw[before] == dis.EXTENDED_ARG:
                    argument |= raw[before + 1] << shift
                    before, shift = before - 2, shift + 8
                yield code.co_names[argument]
            at = raw.find(operation, at + 1)
