"""Descriptions of plain values: equal in every process for values that compute the same."""

from __future__ import annotations

import collections
import ctypes
import enum
import functools
import itertools
import sys
import types
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from .code_snapshot import CodeNotes

PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout),
)
OPERATORS = (types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by Python code

_TORCH_STATE = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"} | {
    *("_is_full_backward_hook", "forward"),
}
MAX_DEPTH = 16
"""Settings are not nested deeper than this; registries that lead to half of a program are."""

_numbers: dict[int, int] = {}
_kept: collections.deque[Any] = collections.deque(maxlen=256)
"""Numbered objects that are kept because Python has no weak references to them; the latest ones."""
_next_number = itertools.count()

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Indescribable(TypeError):
    """Something whose effect on a block's output no description can capture."""


def number_of(value: Any) -> int:
    """A number that no other object of this process has or will have."""
    if id(value) not in _numbers:
        try:
            weakref.finalize(value, _numbers.pop, id(value), None).atexit = False
        except TypeError:  # kept alive for a while, lest another take its place
            if len(_kept) == _kept.maxlen:
                _numbers.pop(id(_kept[0]), None)
            _kept.append(value)
        _numbers[id(value)] = next(_next_number)
    return _numbers[id(value)]


class References:
    """The functions and classes that values refer to, collected while a `CodeReader` has the values described."""

    def __init__(self, reader: Any, notes: CodeNotes | None = None):
        self.reader = reader
        self.functions: list[types.FunctionType] = []
        self.classes: set[type] = set()
        self.open: set[int] = set()
        """The ids of the values that are being described, from the outermost inwards."""
        self.notes = CodeNotes() if notes is None else notes

    def add(self, other: References) -> None:
        self.functions.extend(other.functions)
        self.classes |= other.classes
        self.notes.add(other.notes)

    def function(self, function: types.FunctionType) -> tuple:
        self.functions.append(function)
        return ("function", self.reader.describe_function(function))

    def class_of(self, value: Any) -> tuple:
        self.classes.add(type(value))
        return (type(value).__module__, type(value).__qualname__)


def describe_value(value: Any, references: References) -> Any:
    """A description of `value` whose repr is complete, but for the code and the classes of objects that it refers to,
    which go to `references`. Raises Indescribable, naming the type."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, enum.Enum):
        references.notes.watch(vars(value), "_value_")
        return (type(value).__qualname__, value.name, value.value if type(value.value) in PLAIN else None)
    if hasattr(type(value), "__members__") and type(value).__mro__[-2].__name__ == "pybind11_object":  # as torch's are
        return (type(value).__qualname__, value.name, value.value)
    if id(value) in references.open or len(references.open) >= MAX_DEPTH:
        raise Indescribable(f"a {type(value).__module__}.{type(value).__qualname__} inside of itself, or very deep")
    references.open.add(id(value))
    try:
        return _describe_parts(value, references)
    finally:
        references.open.discard(id(value))


def _describe_parts(value: Any, references: References) -> Any:
    if isinstance(value, (list, set, dict)):
        references.notes.watch_items(value)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(describe_value(item, references) for item in value))
    if isinstance(value, (set, frozenset)):
        return ("set", *sorted(repr(describe_value(item, references)) for item in value))
    if isinstance(value, dict):
        items = ((describe_value(key, references), describe_value(item, references)) for key, item in value.items())
        return ("dict", *sorted(map(repr, items)))
    if isinstance(value, type):
        references.classes.add(value)
        return ("class", value.__module__, value.__qualname__)
    if isinstance(value, functools.partial):
        return ("partial", *(describe_value(part, references) for part in (value.func, value.args, value.keywords)))
    if isinstance(value, types.FunctionType):
        return references.function(value)
    if isinstance(value, (classmethod, staticmethod)):
        return (type(value).__name__, describe_value(value.__func__, references))
    if isinstance(value, getattr(sys.modules.get("numpy"), "generic", ())):
        return (type(value).__name__, value.tobytes())
    if isinstance(value, types.MethodType):
        raise Indescribable(f"a bound method, {value.__qualname__}")
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            raise Indescribable(f"a bound method, {value.__qualname__}")
        return ("builtin", getattr(owner, "__name__", None), value.__qualname__)
    if isinstance(value, OPERATORS):
        return ("builtin", str(value))
    if is_plain_object(value):
        references.notes.watch_type(value)
        references.notes.watch_items(vars(value))
        state = ((name, describe_value(part, references)) for name, part in sorted(vars(value).items()))
        return ("object", references.class_of(value), *state)
    if isinstance(value, torch.nn.Module) and not any(part._parameters or part._buffers for part in value.modules()):
        # a module in a place where torch does not look for modules
        described = []
        for path, part in value.named_modules():
            note_part(part, references.notes)
            require_own_code(part, path)
            attributes = [attribute(part, path, name, references) for name, _ in settings_of(part)]
            described.append((path, references.class_of(part), *(item for item in attributes if item.is_own)))
            for item in attributes:
                references.notes.watch(part.__dict__, item.name)
        return ("module", *described)
    raise Indescribable(f"a {type(value).__module__}.{type(value).__qualname__}")


@dataclass(frozen=True)
class Attribute:
    """One setting of a module. is_own: it is another than the attribute of its class."""

    name: str
    described: str
    is_own: bool


def require_own_code(module: torch.nn.Module, path: str) -> None:
    """Raise Indescribable where calling the module runs more than its class's forward. path: of it in its block."""
    for name in _HOOKS:
        hooks = module.__dict__.get(name)
        if path and hooks:
            owners = ", ".join(sorted({str(getattr(hook, "__module__", None)) for hook in hooks.values()}))
            raise Indescribable(f"{path} has {name.strip('_').replace('_', ' ')} of {owners}")
    if path and "forward" in module.__dict__:
        raise Indescribable(f"{path} has a forward of its own")


def settings_of(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """(name, value) of all that is on the module and not torch's, in the order of their names."""
    return [(name, value) for name, value in sorted(module.__dict__.items()) if not is_torchs(name)]


def is_torchs(name: str) -> bool:
    return name in _TORCH_STATE or name.endswith("_hooks") or "_hooks_" in name


def attribute(module: torch.nn.Module, path: str, name: str, references: References) -> Attribute:
    """One of the settings of a module at this path in its block ("" for the block itself). Raises Indescribable, with
    the path of what cannot be described."""
    try:
        described = repr(describe_value(module.__dict__[name], references))
    except Indescribable as reason:
        raise Indescribable(f"{path + '.' if path else ''}{name} holds {reason}") from None
    return Attribute(name, described, described != references.reader.class_attribute(type(module), name))


def note_part(part: torch.nn.Module, notes: CodeNotes, shown: bool = True, outermost: bool = False) -> None:
    """Note what a module is made of: its class, its parts, which weights it has, its own attributes and hooks.

    shown: it is the module that was described, not one that a host keeps account on. outermost: it is a block, whose
        forward has a stand-in and which may have hooks, that run around it.
    """
    notes.watch_type(part)
    if not isinstance(part._modules, dict):  # compiled by TorchScript, which nobody changes
        return
    if part._modules:
        notes.watch_len(part._modules)
    for name in part._modules:
        notes.watch(part._modules, name)
    if shown:
        notes.watch_len(part.__dict__, "forward" if outermost else "")
        for weights in (part._parameters, part._buffers):
            if part._modules:  # a layer's own code does not ask whether it has others
                notes.watch_len(weights)
            for name in [name for name, weight in weights.items() if weight is None]:
                notes.watch(weights, name)
    elif not outermost:
        notes.watch_absent(part.__dict__, "forward")
    if not outermost:
        for name in _HOOKS:
            notes.watch_items(part.__dict__[name])


def is_plain(value: Any) -> bool:
    """Whether it is a constant, or a list or tuple of constants."""
    items = value if type(value) in (list, tuple) else (value,)
    return all(type(item) in PLAIN for item in items)


def is_plain_object(value: Any) -> bool:
    """Whether it is an instance of a class written in Python, with all of its state in `__dict__`."""
    return _makes_plain_objects(type(value)) and hasattr(value, "__dict__")  # type: ignore[arg-type]  # a class is hashable


@functools.lru_cache(maxsize=4096)
def _makes_plain_objects(cls: type) -> bool:
    return (
        not issubclass(cls, (torch.nn.Module, torch.Tensor, type, enum.Enum, ctypes.CDLL))
        and all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)
        and not any(vars(base).get("__slots__") for base in cls.__mro__)
        # no state in C except a dict and the list of weak references
        and cls.__basicsize__ <= object.__basicsize__ + 2 * tuple.__itemsize__
    )
