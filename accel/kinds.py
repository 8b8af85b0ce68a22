"""What makes two blocks the same *kind*: the same code over weights of the same shapes.

Blocks of one kind share their compiled graphs, so whatever can change what a block computes, and
is not a tensor it is given, must be in the fingerprint. Something that cannot be described raises
`Indescribable`, and the block stays eager: never the same fingerprint for different behaviour.
"""

from __future__ import annotations

import copy
import enum
import functools
import hashlib
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .code_digest import class_fingerprint, code_digest, code_of
from .graph_key import tensor_spec

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
_TORCH_STATE = {
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
    "forward",
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_NOTHING = object()
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by Python code


class Indescribable(TypeError):
    """A module holds something whose effect on its output cannot be told from its description."""


@dataclass(frozen=True)
class Kind:
    """A kind of block.

    name: for people. digest: for equality. weights: the names of its parameters and buffers.
    varying: (weight, dimension) pairs whose size differs between blocks of the kind; graphs are
        compiled with these dynamic, so that blocks which differ in channels alone share one.
    """

    name: str
    digest: str
    weights: tuple[str, ...]
    varying: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Description:
    """A block's code, settings and weights: all that decides its kind.

    digest: of everything but the sizes of its weights. shapes: these, in the order of `weights`.
    """

    name: str
    digest: str
    weights: tuple[str, ...]
    shapes: tuple[torch.Size, ...]


@dataclass(frozen=True)
class WeightSlots:
    """Where a block's parameters and buffers live, so that replaced ones are seen at every call."""

    places: tuple[tuple[dict, str], ...]

    def read(self) -> list[torch.Tensor]:
        return [holder[name] for holder, name in self.places]


def describe(block: torch.nn.Module) -> Description:
    """What the block is now; its weights' dtypes, devices and layouts count, their values do not.

    Raises:
        Indescribable: with the path of what cannot be described.
    """
    digest = hashlib.sha256()
    classes = _classes(block)
    used = frozenset().union(*(code_of(cls).names for cls in classes))
    fingerprints = {cls: class_fingerprint(cls) for cls in classes}
    for path, module in block.named_modules():
        digest.update(repr((path, fingerprints[type(module)], _attributes(module, path, used))).encode())
    names, shapes = [], []
    for name, tensor in _named_weights(block):
        names.append(name)
        shapes.append(tensor.shape)
        spec = tensor_spec(tensor)
        strides = tensor.stride() if isinstance(spec.layout, tuple) else None
        digest.update(repr((name, spec, strides)).encode())
    return Description(type(block).__name__, digest.hexdigest(), tuple(names), tuple(shapes))


def kinds_of(descriptions: Sequence[Description]) -> list[Kind]:
    """The kind of each block of a model: blocks alike in all but the sizes of weights are of one kind."""
    alike: dict[str, list[Description]] = {}
    for description in descriptions:
        alike.setdefault(description.digest, []).append(description)
    kinds = {}
    for digest, members in alike.items():
        first = members[0]
        varying = tuple(
            (index, dimension)
            for index, shape in enumerate(first.shapes)
            for dimension in range(len(shape))
            if len({member.shapes[index][dimension] for member in members}) > 1
        )
        sizes = [
            [None if (index, dimension) in varying else size for dimension, size in enumerate(shape)]
            for index, shape in enumerate(first.shapes)
        ]
        full = hashlib.sha256(repr((digest, sizes)).encode()).hexdigest()[:32]
        kinds[digest] = Kind(first.name, full, first.weights, varying)
    return [kinds[description.digest] for description in descriptions]


def weight_slots(block: torch.nn.Module, names: tuple[str, ...]) -> WeightSlots:
    """The slots of the named parameters and buffers, in that order."""
    places = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = block.get_submodule(path)
        places.append((owner._parameters if leaf in owner._parameters else owner._buffers, leaf))
    return WeightSlots(tuple(places))


def template_of(block: torch.nn.Module) -> torch.nn.Module:
    """A copy of the block with its weights on the meta device: its code and settings, no memory, no tie to it."""
    memo: dict[int, Any] = {}
    for _, tensor in _named_weights(block):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, torch.nn.Parameter):
            empty = torch.nn.Parameter(empty, requires_grad=False)
        memo[id(tensor)] = empty
    own = block.__dict__.pop("forward", None)
    try:
        return copy.deepcopy(block, memo)
    finally:
        if own is not None:
            block.__dict__["forward"] = own


def _named_weights(block: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from block.named_parameters()
    yield from block.named_buffers()


def _classes(block: torch.nn.Module) -> frozenset[type]:
    """The classes of the block's modules and of the plain objects that these hold: all whose code it runs."""
    found = set()
    for module in block.modules():
        found.add(type(module))
        found.update(type(value) for value in vars(module).values() if _is_plain_object(value))
    return frozenset(found)


def _is_plain_object(value: Any) -> bool:
    """Whether it is of a class written in Python whose `__dict__` says all there is about the instance."""
    cls = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (torch.nn.Module, torch.Tensor, type, enum.Enum))
        and all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)
        and not any("__slots__" in vars(base) for base in cls.__mro__)
        # no state in C: nothing but a dict and the list of weak references
        and cls.__basicsize__ <= object.__basicsize__ + 2 * tuple.__itemsize__
    )


def _attributes(module: torch.nn.Module, path: str, used: frozenset[str] | None = None) -> tuple:
    """The module's settings; of whole numbers those that the code reads, or all where that is not known."""
    for hooks in _HOOKS:
        if path and module.__dict__.get(hooks):
            raise Indescribable(f"{path} has {hooks.strip('_').replace('_', ' ')}")
    if path and "forward" in module.__dict__:
        raise Indescribable(f"{path} has a forward of its own")
    described = []
    for name, value in module.__dict__.items():
        if name in _TORCH_STATE or name.endswith("_hooks") or "_hooks_" in name:
            continue
        if type(value) is int and used is not None and name not in used:
            continue  # a block's own number in its model, which no code of the block reads
        try:
            description = _describe(value)
            if repr(description) != repr(_class_value(type(module), name)):
                described.append((name, description))
        except Indescribable as reason:
            raise Indescribable(f"{path + '.' if path else ''}{name} holds {reason}") from None
    return tuple(sorted(described))


def _class_value(cls: type, name: str) -> Any:
    """What the class itself holds under the name: an instance that holds the same is as if it held nothing."""
    value = inspect.getattr_static(cls, name, _NOTHING)
    try:
        return _NOTHING if value is _NOTHING else _describe(value)
    except Indescribable:
        return _NOTHING


def _describe(value: Any) -> Any:
    """A value whose repr says all there is to say about `value`."""
    if isinstance(value, enum.Enum):
        return (type(value).__qualname__, value.name)
    if type(value) in PLAIN:
        return value
    if isinstance(value, (tuple, list, torch.Size)):
        return (type(value).__name__, *(_describe(item) for item in value))
    if isinstance(value, (set, frozenset)):
        return ("set", *sorted(repr(_describe(item)) for item in value))
    if isinstance(value, dict):
        return ("dict", *sorted(repr((key, _describe(item))) for key, item in value.items()))
    if isinstance(value, type):
        return ("class", value.__module__, value.__qualname__)
    if isinstance(value, functools.partial):
        return ("partial", _describe(value.func), _describe(value.args), _describe(value.keywords))
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return _function_fingerprint(value)
    if isinstance(value, (types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return ("builtin", str(value))
    if isinstance(value, torch.nn.Module) and next(_named_weights(value), None) is None:
        # one that is held where torch does not look for modules
        parts = ((path, class_fingerprint(type(part)), _attributes(part, path)) for path, part in value.named_modules())
        return ("module", *parts)
    if _is_plain_object(value):
        state = sorted(vars(value).items())
        return ("object", class_fingerprint(type(value)), *((name, _describe(item)) for name, item in state))
    raise Indescribable(f"a {type(value).__module__}.{type(value).__qualname__}")


def _function_fingerprint(function: Any) -> tuple:
    if isinstance(function, types.MethodType):
        raise Indescribable(f"a bound method, {function.__qualname__}")
    if function.__closure__:
        cells = tuple(_describe(cell.cell_contents) for cell in function.__closure__)
    else:
        cells = ()
    return ("function", function.__module__, function.__qualname__, code_digest(function.__code__), cells)


def strings_used(block: torch.nn.Module) -> frozenset[str]:
    """Every string constant in the code of the block's classes: the dict keys it may look at are among them."""
    return frozenset().union(*(code_of(cls).strings for cls in _classes(block)))
