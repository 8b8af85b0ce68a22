"""Facts about a code object that its bytecode alone decides; they are computed once."""

from __future__ import annotations

import dis
import hashlib
import inspect
import operator
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_SETS_GLOBALS = ("STORE_GLOBAL", "DELETE_GLOBAL")
_READS_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_SETS_ATTRIBUTES = ("STORE_ATTR", "DELETE_ATTR")
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_ASSIGNS = (*_SETS_GLOBALS, *_SETS_ATTRIBUTES)
_EFFECTS = {"assigned": _ASSIGNS, "globals_set": _SETS_GLOBALS, "loaded": _READS_GLOBALS}
"""The facts that are the names in these operations."""

_LOOKS_UP = frozenset({"getattr", "vars", "attrgetter", "__dict__", "__getattribute__"})
_OF_DATACLASSES = frozenset("__init__ __eq__ __lt__ __le__ __gt__ __ge__ __setattr__ __delattr__ __hash__".split())
_ASKS = frozenset({"getattr", "hasattr"})
_MUTATES = ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
_MUTATING_METHODS = frozenset(
    "__setitem__ add append appendleft clear extend insert pop popitem remove setdefault update".split()
)
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
    strings: its string constants. asked: those by which it may ask for attributes.
    affixes: those of a code that looks attributes up by name, which it may make of them.
    whole: the variables and attributes that it does more with than to read an attribute of theirs. It may pass them on,
        so of what they hold, more may count than the names in this code.
    assigned: the globals and attributes that it sets or deletes.
    globals_set: those of them that are globals of its own module.
    imports: the modules that it imports, as (level, name).
    loaded: the globals that it reads.
    mutates: of what it may change the items, as of a list, set or dict: the global variable whose method it calls,
        which may be a module with a function of that name; None for anything else but its own `**keywords`.
    """

    digest: str
    names: frozenset[str]
    read: frozenset[str]
    strings: frozenset[str]
    asked: frozenset[str]
    affixes: frozenset[str]
    whole: frozenset[str]
    assigned: frozenset[str]
    globals_set: frozenset[str]
    imports: frozenset[tuple[int, str]]
    loaded: frozenset[str]
    mutates: frozenset[str | None]


_known: weakref.WeakKeyDictionary[types.CodeType, CodeFacts] = weakref.WeakKeyDictionary()


def facts_of(code: types.CodeType) -> CodeFacts:
    """The facts about `code`."""
    known = _known.get(code)
    if known is None:
        known = _known[code] = _read(code)
    return known


def _read(code: types.CodeType) -> CodeFacts:
    nested = [facts_of(item) for item in code.co_consts if isinstance(item, types.CodeType)]
    signature = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    constants = tuple(_constant(item) for item in code.co_consts)
    described = (code.co_code, code.co_names, constants, signature, getattr(code, "co_exceptiontable", b""))
    strings = set(_strings(code.co_consts))
    looks_up = not _LOOKS_UP.isdisjoint(code.co_names)
    affixes = {part for string in strings for part in string.split(".") if len(part) > 1 and looks_up}
    asked = set() if _ASKS.isdisjoint(code.co_names) else {string for string in strings if string.isidentifier()}
    own = {"names": set(code.co_names), "strings": strings, "asked": asked, "affixes": affixes, **_operations(code)}
    with_nested = {name: frozenset(found).union(*(getattr(of, name) for of in nested)) for name, found in own.items()}
    return CodeFacts(hashlib.sha256(repr(described).encode()).hexdigest()[:16], **with_nested)


def _operations(code: types.CodeType) -> dict[str, set]:
    """The facts that only its instructions tell, by name."""
    facts: dict[str, set] = {name: set() for name in ("read", "whole", "mutates", "imports", *_EFFECTS)}
    steps: list[Any] = [None, None, *dis.get_instructions(code)]
    stored = [_names_in(step) for step in steps[2:] if "STORE_FAST" in step.opname]
    others = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    own = set(code.co_varnames[others : others + bool(code.co_flags & inspect.CO_VARKEYWORDS)]).difference(*stored)
    for two_before, before, step in zip(steps, steps[1:], steps[2:], strict=False):
        name, what = step.opname, step.argval
        for fact in [fact for fact, operations in _EFFECTS.items() if name in operations]:
            facts[fact].add(what)
        if name == "STORE_DEREF" and what in code.co_freevars:
            facts["assigned"].add("cell_contents")
        if name == "IMPORT_NAME":
            facts["imports"].add((two_before.argval, what))
        if step.opcode in dis.hasname and name not in _SETS_ATTRIBUTES:
            facts["read"].add(what)
        if name in _MUTATES:
            is_own = before.opname == "LOAD_CONST" and _loads_one_of(own, two_before)
            facts["mutates"].update(() if is_own else (None,))
        elif name in _ATTRIBUTES and what in _MUTATING_METHODS and not _loads_one_of(own, before):
            facts["mutates"].add(before.argval if before is not None and before.opname == "LOAD_GLOBAL" else None)
        if before is not None and (before.opname in _ATTRIBUTES or any(load in before.opname for load in _LOADS)):
            *first, last = _names_in(before)
            facts["whole"].update(first if name in (*_ATTRIBUTES, *_SETS_ATTRIBUTES) else (*first, last))
    return facts


def _loads_one_of(names: set[str], step: dis.Instruction | None) -> bool:
    """Whether the last that the step puts on the stack is one of these variables."""
    return step is not None and step.opname.startswith("LOAD_FAST") and _names_in(step)[-1] in names


def _names_in(step: dis.Instruction) -> tuple:
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)  # of two steps in one, from Python 3.13


def is_of_dataclass(code: types.CodeType) -> bool:
    """Whether Python has made the code for a dataclass or a named tuple: it makes one object, and names no file."""
    is_tuple = code.co_name == "<lambda>" and code.co_names == ("_tuple_new",)
    return code.co_filename == "<string>" and (is_tuple or code.co_name in _OF_DATACLASSES)


def may_keep(code: types.CodeType) -> bool:
    """Whether the code, without those nested in it, may leave anything that its next call finds."""
    changes_by_name = (name in _CHANGING or name.endswith("_") and not name.endswith("__") for name in code.co_names)
    if any(changes_by_name) or "out" in _strings(code.co_consts):
        return True
    changes, of_others = (*_ASSIGNS, *_MUTATES), code.co_freevars
    return any(
        step.opname in changes
        or step.opname.startswith("INPLACE_")
        or step.opname == "BINARY_OP"
        and step.argrepr.endswith("=")  # `x += y` changes what x is, if it is a list or tensor
        or step.opname == "STORE_DEREF"
        and step.argval in of_others
        for step in dis.get_instructions(code)
    )


def find_changed_lists(code: types.CodeType) -> frozenset[str]:
    """The arguments of which the code, or those nested in it, may change the items, if they are lists."""
    return _find_changed_lists(code).intersection(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _find_changed_lists(code: types.CodeType) -> frozenset[str]:
    names, on_line = set(), []
    for step in dis.get_instructions(code):
        if step.starts_line not in (None, False):
            on_line.clear()
        if "LOAD_FAST" in step.opname or step.opname == "LOAD_DEREF":  # with what Python 3.13 stores in the same step
            on_line += step.argval if isinstance(step.argval, tuple) else (step.argval,)
        elif step.opname in _MUTATES or step.opname in _ATTRIBUTES and step.argval in _CHANGING:
            names.update(on_line)
    nested = (item for item in code.co_consts if isinstance(item, types.CodeType))
    return frozenset(names).union(*(_find_changed_lists(inner).intersection(inner.co_freevars) for inner in nested))


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
