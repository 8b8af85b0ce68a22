"""What makes two blocks the same *kind*: the same code over weights of the same shapes.

Blocks of one kind share their compiled graphs, so whatever can change what a block computes, and
is not a tensor it is given, must be in the fingerprint. Something that cannot be described raises
`Indescribable`, and the block stays eager: never the same fingerprint for different behaviour.
"""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..modules import wrapped_layers
from ..modules.wrapped_layers import Wraps
from ..signature.tensors import PLAIN_TENSORS, tensor_spec
from .code_reach import CodeReader, Meaning
from .held_code import Held
from .plain_values import Indescribable, attributes_of, describe_value


@dataclass(frozen=True)
class Kind:
    """A kind of block.

    name: for people. digest: for equality. weights: the names of its parameters and buffers.
    varying: (weight, dimension) pairs whose size differs between blocks of the kind; graphs are
        compiled with these dynamic, so that blocks which differ in channels alone share one.
    sources, opaque: what else its code rests on, for whoever wants to keep a graph beyond this process
        (`code_reach.Meaning`).
    """

    name: str
    digest: str
    weights: tuple[str, ...]
    varying: tuple[tuple[int, int], ...] = ()
    sources: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    opaque: frozenset[str] = field(default=frozenset(), compare=False, repr=False)


@dataclass(frozen=True)
class Description:
    """A block's code, settings and weights: all that decides its kind.

    digest: of everything but the sizes of its weights. shapes: these, in the order of `weights`.
    meaning: of its code. Among its strings are the dict keys that it may look at.
    """

    name: str
    digest: str
    weights: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    meaning: Meaning

    @property
    def structure(self) -> tuple:
        """How it is built: alike in blocks that may be of one kind, whatever state they are in."""
        return _structure(self.name, self.weights, self.shapes)


@dataclass(frozen=True)
class WeightSlots:
    """Where a block's parameters and buffers live, so that replaced ones are seen at every call."""

    holders: tuple[dict[str, torch.Tensor], ...]
    names: tuple[str, ...]

    def read(self) -> list[torch.Tensor]:
        return list(map(operator.getitem, self.holders, self.names))


def describe(block: torch.nn.Module, reader: CodeReader | None = None, wraps: Wraps | None = None) -> Description:
    """What the block is now; its weights' dtypes, devices and layouts count, their values do not.

    reader: shared by the blocks of one survey. wraps: the wrappers that are left out of it.
    Raises:
        Indescribable: with the path of what cannot be described.
    """
    reader = reader or CodeReader()
    held = Held(reader)
    parts = list(wrapped_layers.modules(block, wraps))
    state = [(path, module, attributes_of(module, path, held)) for path, module in parts]
    classes = {type(module) for _, module in parts} | held.classes
    meaning = reader.meaning(frozenset(classes), held.functions)
    digest = hashlib.sha256(meaning.digest.encode())
    for path, module, attributes in state:
        # No code of the block reads the others: its own number in its model, what a host notes down there.
        read = [item for item in attributes if not item.is_plain or item.name in meaning.looked_at]
        cls = type(module)
        digest.update(
            repr((path, cls.__module__, cls.__qualname__, [(item.name, item.described) for item in read])).encode()
        )
    names, shapes = [], []
    for name, tensor in wrapped_layers.weights(block, wraps):
        names.append(name)
        shapes.append(tensor.shape)
        spec = tensor_spec(tensor)
        strides = tensor.stride() if isinstance(spec.layout, tuple) else None
        digest.update(repr((name, spec, strides, _sort_of(name, tensor, held))).encode())
    return Description(type(block).__name__, digest.hexdigest(), tuple(names), tuple(shapes), meaning)


def _sort_of(name: str, tensor: torch.Tensor, held: Held) -> tuple | None:
    """What a tensor of a class of its own is besides the tensors in it, as quantised weights are; None of plain ones.

    Its sizes too: a graph's example of such a weight must be one itself, so none may stand for others.
    """
    cls = type(tensor)
    if cls in PLAIN_TENSORS:
        return None
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        raise Indescribable(f"{name} holds a {cls.__module__}.{cls.__qualname__}")
    parts, about = flatten()
    try:
        described = describe_value(about, held)
    except Indescribable as reason:
        raise Indescribable(f"{name} holds {reason}") from None
    inner = tuple((part, _sort_of(f"{name}.{part}", getattr(tensor, part), held)) for part in parts)
    return (cls.__module__, cls.__qualname__, tuple(tensor.shape), described, inner)


def kinds_of(
    descriptions: Sequence[Description], model: Iterable[torch.nn.Module] = (), wraps: Wraps | None = None
) -> list[Kind]:
    """The kind of each block of a model: blocks alike in all but the sizes of weights are of one kind.

    model: all blocks of the model, the indescribable ones included. Which sizes vary is asked of all that
        are built alike, so that it does not change with the weights that are on the device just now.
    """
    built_alike: dict[tuple, list[tuple[torch.Size, ...]]] = {}
    for description in descriptions:
        built_alike.setdefault(description.structure, []).append(description.shapes)
    for block in model:
        named = list(wrapped_layers.weights(block, wraps))
        shapes = tuple(tensor.shape for _, tensor in named)
        structure = _structure(type(block).__name__, tuple(name for name, _ in named), shapes)
        built_alike.setdefault(structure, []).append(shapes)
    varying = {structure: _varying(members) for structure, members in built_alike.items()}
    return [_kind(description, varying[description.structure]) for description in descriptions]


def _structure(name: str, weights: tuple[str, ...], shapes: tuple[torch.Size, ...]) -> tuple:
    return (name, weights, tuple(len(shape) for shape in shapes))


def _varying(members: Sequence[tuple[torch.Size, ...]]) -> tuple[tuple[int, int], ...]:
    """The (weight, dimension) pairs in which not all members have one size."""
    return tuple(
        (index, dimension)
        for index, sizes in enumerate(zip(*members, strict=True))
        for dimension, of_members in enumerate(zip(*sizes, strict=True))
        if len(set(of_members)) > 1
    )


def _kind(description: Description, varying: tuple[tuple[int, int], ...]) -> Kind:
    sizes = [
        [None if (index, dimension) in varying else size for dimension, size in enumerate(shape)]
        for index, shape in enumerate(description.shapes)
    ]
    full = hashlib.sha256(repr((description.digest, sizes)).encode()).hexdigest()[:32]
    meaning = description.meaning
    return Kind(description.name, full, description.weights, varying, meaning.sources, meaning.opaque)


def weight_slots(block: torch.nn.Module, names: tuple[str, ...], wraps: Wraps | None = None) -> WeightSlots:
    """The slots of the named parameters and buffers, in that order."""
    holders, leaves = [], []
    parts = dict(wrapped_layers.modules(block, wraps))
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = parts[path]
        holders.append(owner._parameters if leaf in owner._parameters else owner._buffers)
        leaves.append(leaf)
    return WeightSlots(tuple(holders), tuple(leaves))


def template_of(block: torch.nn.Module, wraps: Wraps | None = None) -> torch.nn.Module:
    """A copy of the block with its weights on the meta device: its code and settings, no memory, no tie to it.

    wraps: the wrappers in whose place the copy has their layers.
    """
    memo: dict[int, Any] = {}
    for _, tensor in wrapped_layers.weights(block, wraps):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, torch.nn.Parameter):
            empty = torch.nn.Parameter(empty, requires_grad=False)
        memo[id(tensor)] = empty
    for wrapper, layer in wrapped_layers.wrapped(block, wraps):
        memo[id(wrapper)] = copy.deepcopy(layer, memo)
    template = copy.deepcopy(block, memo)
    # The block keeps its stand-in meanwhile: other threads may be calling it.
    template.__dict__.pop("forward", None)
    return template
