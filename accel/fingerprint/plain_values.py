"""Descriptions of plain values: equal in every process for values that compute the same."""

from __future__ import annotations

import ctypes
import enum
import functools
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .held_code import Held

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)
OPERATORS = (types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by Python code


_TORCH_STATE = {
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
    "forward",
}
_DEEPEST = 16
"""Settings are not nested deeper than this; registries that lead to half of a program are."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Indescribable(TypeError):
    """Something whose effect on a block's output cannot be told from its description."""


def describe_value(value: Any, held: Held) -> Any:
    """A value whose repr says all there is to say about `value`, but for what the code in it calls.

    held: gets the functions and the classes of objects among it.
    Raises:
        Indescribable: naming the type.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return (type(value).__qualname__, value.name)
    if id(value) in held.within or len(held.within) >= _DEEPEST:
        raise Indescribable(f"a {type(value).__module__}.{type(value).__qualname__} inside of itself, or very deep")
    held.within.add(id(value))
    try:
        return _describe_parts(value, held)
    finally:
        held.within.discard(id(value))


def _describe_parts(value: Any, held: Held) -> Any:
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(describe_value(item, held) for item in value))
    if isinstance(value, (set, frozenset)):
        return ("set", *sorted(repr(describe_value(item, held)) for item in value))
    if isinstance(value, dict):
        items = ((describe_value(key, held), describe_value(item, held)) for key, item in value.items())
        return ("dict", *sorted(map(repr, items)))
    if isinstance(value, type):
        return ("class", value.__module__, value.__qualname__)
    if isinstance(value, functools.partial):
        return ("partial", *(describe_value(part, held) for part in (value.func, value.args, value.keywords)))
    if isinstance(value, types.FunctionType):
        return held.function(value)
    if isinstance(value, types.MethodType):
        raise Indescribable(f"a bound method, {value.__qualname__}")
    if isinstance(value, OPERATORS):
        return operator_name(value)
    if is_plain_object(value):
        state = sorted(vars(value).items())
        return ("object", held.class_of(value), *((name, describe_value(item, held)) for name, item in state))
    if isinstance(value, torch.nn.Module) and not any(part._parameters or part._buffers for part in value.modules()):
        # one that is held where torch does not look for modules
        parts = value.named_modules()
        return ("module", *((path, held.class_of(part), *attributes_of(part, path, held)) for path, part in parts))
    raise Indescribable(f"a {type(value).__module__}.{type(value).__qualname__}")


@dataclass(frozen=True)
class Attribute:
    """One setting of a module. is_plain: it matters only if code looks at it by its name."""

    name: str
    described: str
    is_plain: bool


def attributes_of(module: torch.nn.Module, path: str, held: Held) -> list[Attribute]:
    """The module's settings, but for those that its class holds alike.

    path: of the module in its block, "" for the block itself.
    Raises:
        Indescribable: with the path of what cannot be described.
    """
    for hooks in _HOOKS:
        if path and module.__dict__.get(hooks):
            raise Indescribable(f"{path} has {hooks.strip('_').replace('_', ' ')}")
    if path and "forward" in module.__dict__:
        raise Indescribable(f"{path} has a forward of its own")
    attributes = []
    for name, value in sorted(module.__dict__.items()):
        if name in _TORCH_STATE or name.endswith("_hooks") or "_hooks_" in name:
            continue
        try:
            described = repr(describe_value(value, held))
        except Indescribable as reason:
            raise Indescribable(f"{path + '.' if path else ''}{name} holds {reason}") from None
        if described != held.class_value(type(module), name):
            attributes.append(Attribute(name, described, type(value) in PLAIN and name != "training"))
    return attributes


def operator_name(value: Any) -> tuple:
    """An operator of torch, or a function written in C.

    Raises:
        Indescribable: a method of an object with a state.
    """
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            raise Indescribable(f"a bound method, {value.__qualname__}")
        return ("builtin", getattr(owner, "__name__", None), value.__qualname__)
    return ("builtin", str(value))


def is_plain_object(value: Any) -> bool:
    """Whether it is of a class written in Python whose `__dict__` says all there is about the instance."""
    return _makes_plain_objects(type(value)) and hasattr(value, "__dict__")


@functools.lru_cache(maxsize=4096)
def _makes_plain_objects(cls: type) -> bool:
    return (
        not issubclass(cls, (torch.nn.Module, torch.Tensor, type, enum.Enum, ctypes.CDLL))
        and all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)
        and not any("__slots__" in vars(base) for base in cls.__mro__)
        # no state in C: nothing but a dict and the list of weak references
        and cls.__basicsize__ <= object.__basicsize__ + 2 * tuple.__itemsize__
    )
