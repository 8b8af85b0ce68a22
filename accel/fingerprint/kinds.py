"""The *kind* of a block: the same code over weights of the same shapes; and the key of a compiled graph.

Blocks of one kind share their compiled graphs, so everything that can change what a block computes, except the tensors
it is given, must be in the fingerprint. A block with what cannot be described stays eager.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..modules import stored_form, wrapped_layers
from ..modules.opaque_layers import OpaqueLayer
from ..modules.stored_form import Forms, StoredForm
from ..modules.wrapped_forward import WrappedForward
from ..modules.wrapped_layers import Wraps
from ..signature.tensors import PLAIN_TENSORS, TensorSpec, tensor_spec
from ..signature.tree_spec import Spec
from .code_hash import CodeHash, CodeReader
from .code_references import CodeReferences
from .code_snapshot import CodeNotes
from .plain_values import (
    Attribute,
    Indescribable,
    References,
    attribute,
    describe_value,
    is_plain,
    require_own_code,
    settings_of,
)

Read = Sequence[tuple[str, Sequence[str]]]
"""Settings of a block's parts: (path, names)."""

_NOT_COPIED = (type, enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
"""What a deep copy shares with its original."""


@dataclass(frozen=True)
class Kind:
    """A kind of block, equal for blocks that share graphs.

    name: for people. digest: of code, settings and weights' layouts. weights: the names of its parameters and buffers.
    forms: how weights of tensor subclasses are stored; a graph takes the plain tensors in them (`stored_form`).
    varying: (tensor, dimension) pairs whose size differs between blocks of the kind, which are dynamic in graphs.
    sources, opaque: what else its code depends on, for saved graphs (`CodeHash`).
    """

    name: str
    digest: str
    weights: tuple[str, ...]
    varying: tuple[tuple[int, int], ...] = ()
    sources: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    opaque: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    forms: Forms = field(default=(), compare=False, repr=False)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the plain tensors that its graphs take as weights, in order."""
        return _tensor_names(self.weights, self.forms)


@dataclass(frozen=True)
class GraphKey:
    """The key of one compiled graph. Seeds, sigmas and LoRA strength are no part of it: they change values alone.

    call: its structure without values (`tree_spec.remove_values`), which a few graphs of one key differ in.
    inputs: the block's weights, then the call's tensors. sizes: of these; None for a graph that serves any size.
    """

    kind: Kind
    call: Spec
    inputs: tuple[TensorSpec, ...]
    backend: str | Callable
    sizes: tuple[torch.Size, ...] | None = None


@dataclass(frozen=True)
class Description:
    """A block's code, settings and weights: all that decides its kind.

    digest: of everything except the shapes of its plain weights. shapes: of these; () for a tensor in a subclass.
    weights, forms: as of a kind. code: the hash of its code; the dict keys that it may read are among the strings.
    read: the settings of its parts that its code reads, (path, names). notes: where their values were found.
    numbers: (path, name, value) of the settings that are numbers, read or not.
    """

    name: str
    digest: str
    weights: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    code: CodeHash
    read: Read
    notes: CodeNotes
    numbers: tuple[tuple[str, str, float], ...] = ()
    forms: Forms = ()

    @property
    def structure(self) -> tuple:
        """Equal for blocks that may be of one kind, wherever their weights are."""
        return _structure(self.name, _tensor_names(self.weights, self.forms), self.shapes)


@dataclass(frozen=True)
class WeightSlots:
    """The `WeightSource` of weights in place: the dicts that hold them, read at every call to see new ones."""

    holders: tuple[dict[str, torch.Tensor], ...]
    names: tuple[str, ...]
    forms: Forms = ()

    def take(self, inputs: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """The plain tensors in the weights now. Raises RunEagerly: a weight is stored in another form than it was."""
        weights = list(map(operator.getitem, self.holders, self.names))
        return stored_form.plain(weights, self.forms) if self.forms else weights

    def release(self) -> None:
        pass


def describe(
    block: torch.nn.Module,
    reader: CodeReader | None = None,
    wraps: Wraps | None = None,
    wrapped: WrappedForward | None = None,
    notes: CodeNotes | None = None,
) -> Description:
    """The description of the block as it is now, with its weights' dtypes and layouts, not their values or devices.

    reader: shared by the blocks of one survey. wraps: recognises the wrappers to leave out.
    wrapped: the wrappers around its forward, also left out. notes: are filled, even where it raises.
    Raises Indescribable: with the path of what cannot be described.
    """
    reader = reader or CodeReader()
    references = References(reader, notes)
    parts = list(wrapped_layers.modules(block, wraps))
    for path, module in parts:
        require_own_code(module, path)
    weights = []
    for name, tensor in wrapped_layers.weights(block, wraps):
        try:
            weights.append((name, tensor, stored_form.form_of(tensor)))
        except stored_form.Opaque as why:
            raise Indescribable(f"{name} is stored as a {why}") from None
    classes = {type(module) for _, module in parts}
    classes = classes.union(*(form.running for _, _, form in weights if form is not None))
    code, state = _read(parts, classes, references, wrapped)
    files = CodeReferences(reader)
    # These classes look up in registries what operators run, so no more than their files can be told.
    for cls in set().union(*(form.classes for _, _, form in weights if form is not None)):
        files.add_source_of(cls)
    code = replace(code, sources=code.sources | files.sources, opaque=code.opaque | files.opaque)
    digest = hashlib.sha256(code.digest.encode())
    settings = []
    for (path, module), attributes in zip(parts, state, strict=True):
        settings.append((path, tuple(sorted(attributes))))
        cls = type(module)
        described = [(name, attributes[name].described) for name in sorted(attributes) if attributes[name].is_own]
        digest.update(repr((path, cls.__module__, cls.__qualname__, described)).encode())
    shapes, forms = [], tuple(form for _, _, form in weights)
    for name, tensor, form in weights:
        if form is None:
            shapes.append(tensor.shape)
            digest.update(repr((name, *_describe_layout(tensor))).encode())
            continue
        shapes += [torch.Size()] * len(form.names)
        digest.update(repr((name, _describe_stored(tensor, form, name, references, code.attributes))).encode())
    return Description(
        name=type(block).__name__,
        digest=digest.hexdigest(),
        weights=tuple(name for name, _, _ in weights),
        shapes=tuple(shapes),
        code=code,
        read=tuple(settings),
        notes=references.notes,
        numbers=_numbers(parts),
        forms=forms if any(forms) else (),
    )


def _read(
    parts: Sequence[tuple[str, torch.nn.Module]],
    classes: set[type],
    references: References,
    wrapped: WrappedForward | None,
) -> tuple[CodeHash, list[dict[str, Attribute]]]:
    """The code that the parts of a block run, and of each part the settings that this code reads, by name."""
    state: list[dict[str, Attribute]] = [{} for _ in parts]
    settings = [settings_of(module) for _, module in parts]
    inside = None if wrapped is None else (wrapped.owner, wrapped.own)
    for cell in () if wrapped is None else wrapped.cells:
        references.notes.watch_cell(cell)
    while True:  # what a setting refers to is code that may read more of them
        code = references.reader.read(frozenset(classes | references.classes), references.functions, inside)
        found = False
        for (path, module), part_settings, described in zip(parts, settings, state, strict=True):
            for name, _ in part_settings:
                if name not in described and (name == "training" or code.may_read(name)):
                    described[name], found = attribute(module, path, name, references), True
        if not found:
            return code, state


def _numbers(parts: Iterable[tuple[str, torch.nn.Module]]) -> tuple[tuple[str, str, float], ...]:
    return tuple(
        (path, name, value)
        for path, module in parts
        for name, value in sorted(module.__dict__.items())
        if type(value) in (int, float)
    )


def _describe_layout(tensor: torch.Tensor) -> tuple:
    spec = tensor_spec(tensor)
    return spec.dtype, spec.ndim, spec.layout, tensor.stride() if isinstance(spec.layout, tuple) else None


def _describe_stored(
    tensor: torch.Tensor, form: StoredForm | None, name: str, references: References, read: frozenset[str]
) -> tuple:
    """The form of a weight of a tensor subclass, and its inner tensors with their sizes. read: by the block's code."""
    if form is None:
        return (*_describe_layout(tensor), tuple(tensor.shape))
    context = form.context
    if stored_form.is_data(form.cls):
        context = {attribute: value for attribute, value in context.items() if attribute in read}
    try:
        context = describe_value(context, references)
    except Indescribable as reason:
        raise Indescribable(f"{name} holds {reason}") from None
    inner = [
        (part, _describe_stored(getattr(tensor, part), inner_form, f"{name}.{part}", references, read))
        for part, inner_form in form.parts
    ]
    return (form.cls.__module__, form.cls.__qualname__, form.shape, form.stride, context, inner, *form.factors)


def _tensor_names(weights: Sequence[str], forms: Forms) -> tuple[str, ...]:
    if not forms:
        return tuple(weights)
    return tuple(
        f"{name}.{part}" if part else name
        for name, form in zip(weights, forms, strict=True)
        for part in (("",) if form is None else form.names)
    )


def kinds_of(
    descriptions: Sequence[Description], model: Iterable[torch.nn.Module] = (), wraps: Wraps | None = None
) -> list[Kind]:
    """The kind of each block of a model: blocks that differ only in the sizes of weights are of one kind.

    model: all blocks of the model, indescribable ones too. Which sizes vary is decided over all blocks of equal
        structure and numbers, so that it does not depend on which weights are on the device at the moment.
    """
    read: dict[tuple, set[str]] = {}
    for description in descriptions:
        read.setdefault(description.structure, set()).update(description.code.attributes)

    def group(structure: tuple, numbers: Iterable[tuple[str, str, float]]) -> tuple:
        # Blocks whose code reads different numbers are of different kinds, so that their sizes need not vary.
        return structure, tuple(item for item in numbers if item[1] in read.get(structure, ()))

    groups = [group(description.structure, description.numbers) for description in descriptions]
    shapes_of: dict[tuple, set[tuple[torch.Size, ...]]] = {}
    for key, description in zip(groups, descriptions, strict=True):
        shapes_of.setdefault(key, set()).add(description.shapes)
    for block in model:
        named = list(wrapped_layers.weights(block, wraps))
        if any(type(tensor) not in PLAIN_TENSORS for _, tensor in named):
            continue  # such weights do not vary
        shapes = tuple(tensor.shape for _, tensor in named)
        structure = _structure(type(block).__name__, tuple(name for name, _ in named), shapes)
        shapes_of.setdefault(group(structure, _numbers(wrapped_layers.modules(block, wraps))), set()).add(shapes)
    return [_make_kind(description, shapes_of[key]) for description, key in zip(descriptions, groups, strict=True)]


def _structure(name: str, weights: tuple[str, ...], shapes: tuple[torch.Size, ...]) -> tuple:
    return (name, weights, tuple(len(shape) for shape in shapes))


def _make_kind(description: Description, members: Iterable[tuple[torch.Size, ...]]) -> Kind:
    """The kind of a block; members: the shapes in all blocks of the kind."""
    varying = [
        (index, dimension)
        for index, shapes in enumerate(zip(*members, strict=True))
        for dimension, sizes in enumerate(zip(*shapes, strict=True))
        if len(set(sizes)) > 1
    ]
    sizes = [
        [None if (index, dimension) in varying else size for dimension, size in enumerate(shape)]
        for index, shape in enumerate(description.shapes)
    ]
    digest = hashlib.sha256(repr((description.digest, sizes)).encode()).hexdigest()[:32]
    code, at = description.code, 0
    for form in description.forms:
        at += 1 if form is None else len(form.names)
        if form is not None and form.factors:  # over which dimensions these are summed, no form says
            varying += [(at - 2, 1), (at - 1, 0)]
    names, forms = description.weights, description.forms
    return Kind(description.name, digest, names, tuple(varying), code.sources, code.opaque, forms)


def weight_slots(
    block: torch.nn.Module, names: tuple[str, ...], wraps: Wraps | None = None, forms: Forms = ()
) -> WeightSlots:
    """The slots of the named parameters and buffers, in the order of `names`; forms: theirs."""
    holders, leaves = [], []
    parts = dict(wrapped_layers.modules(block, wraps))
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = parts[path]
        holders.append(owner._parameters if leaf in owner._parameters else owner._buffers)
        leaves.append(leaf)
    return WeightSlots(tuple(holders), tuple(leaves), forms)


def template_of(
    block: torch.nn.Module, wraps: Wraps | None = None, read: Read | None = None, wrapped: WrappedForward | None = None
) -> torch.nn.Module:
    """An independent copy of the block with its weights on the meta device: code and settings without memory.

    wraps: recognises the wrappers, which the copy replaces by their layers. read: its description's; other settings
        are left out unless they are plain, so that no code reads them after all. wrapped: gives the forward inside.
    """
    unread = [] if read is None else list(_find_unread_settings(block, wraps, dict(read)))
    memo: dict[int, Any] = {id(value): None for _, _, value in unread if not isinstance(value, _NOT_COPIED)}
    for _, tensor in wrapped_layers.weights(block, wraps):
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, torch.nn.Parameter):
            empty = torch.nn.Parameter(empty, requires_grad=False)
        memo[id(tensor)] = empty
    for wrapper, layer in wrapped_layers.find_wrapped(block, wraps):
        memo[id(wrapper)] = copy.deepcopy(layer, memo)
    template = copy.deepcopy(block, memo)
    # The block itself keeps its stand-in: other threads may be calling it.
    template.__dict__.pop("forward", None)
    if wrapped is not None:
        template.forward = types.MethodType(wrapped.own, template)
    parts = dict(template.named_modules())
    for path, name, _ in unread:
        parts[path].__dict__.pop(name, None)
    for path, part in template.named_modules():
        part._forward_hooks.clear()  # the block's own run around its stand-in; a part with one is not compiled
        part._forward_pre_hooks.clear()
        if isinstance(part, OpaqueLayer):
            part.path_in_block = path
    return template


def _find_unread_settings(
    block: torch.nn.Module, wraps: Wraps | None, read: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str, Any]]:
    """(path, name, value) of the settings of the block's parts that are neither plain nor read."""
    parts = list(wrapped_layers.modules(block, wraps))
    settings = [(path, name, value) for path, part in parts for name, value in settings_of(part)]
    kept = {id(value) for path, name, value in settings if name in read.get(path, ())}
    kept.update(id(part) for _, part in parts)
    for path, name, value in settings:
        if name not in read.get(path, ()) and id(value) not in kept and not is_plain(value):
            yield path, name, value
