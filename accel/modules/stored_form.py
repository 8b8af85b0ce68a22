"""How a weight is stored: a tensor of a class of its own, such as a quantised one, as plain tensors and back.

A weight of such a class gives the tensors in it to the graph, whose code puts the class around them again. So torch
never sees the weight itself: it would unpack it at every call, and keep weak references, with which `Module.to` fails.

Such a class tells what it is made of (torch's `__tensor_flatten__`), or its tensors are plain data with attributes that
say how it is to be read. For these, one of a class derived from theirs stands inside a graph (`PlainTensorView`).

An attribute may also say what is added to the weight at each use, as a LoRA. Where a host can read it (`Adds`), graphs
take what is added as two more tensors of any rank: neither strength nor number of LoRAs is compiled in.
"""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_map_only

from ..core.reasons import Reason, RunEagerly
from ..signature.tensors import PLAIN_TENSORS

_PLAIN_VALUES = (type(None), bool, int, float, str, torch.dtype)


class Opaque(TypeError):
    """Nothing tells how a tensor of this class is made of plain tensors."""


class Adds(Protocol):
    """A host's knowledge of an attribute that says what is added to a weight at each use. classes: whose code reads
    what `attribute` gives, besides the layer's own."""

    classes: frozenset[type]

    def require_low_rank(self, value: Any) -> None:
        """Raises Opaque: the attribute says more than that a product of matrices is added."""

    def low_rank(self, value: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices [O, R] and [R, I] whose product is added; R is at least 2. On the weight's device."""

    def attribute(self, up: torch.Tensor, down: torch.Tensor) -> Any:
        """The attribute of a weight to which this product is added."""


ADDS: dict[str, Adds] = {}
"""By the attribute's name; hosts add theirs when they are imported. Without a value, it says that nothing is added."""

_FACTORS = "up", "down"


@dataclass(frozen=True, eq=False)
class StoredForm:
    """What a tensor of a class of its own is, besides the tensors in it.

    parts: the attributes with the tensors in it, each with its own form, None for a plain tensor.
    context: what else the class has to be told; of plain data (`is_data`) its attributes.
    added: the name in `ADDS` of the attribute that says what is added to it; that is none of the context.
    """

    cls: type[torch.Tensor]
    parts: tuple[tuple[str, StoredForm | None], ...]
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    added: str | None = None

    @property
    def names(self) -> list[str]:
        """The paths of the plain tensors in it, in order."""
        return [
            f"{name}.{inner}" if inner else name
            for name, form in self.parts
            for inner in (("",) if form is None else form.names)
        ] + self.factors

    @property
    def factors(self) -> list[str]:
        """The names of the matrices whose product is added: [O, R] and [R, I], where R is no part of the form."""
        return [] if self.added is None else list(_FACTORS)

    @property
    def running(self) -> frozenset[type]:
        """The classes whose code a block's code runs to read it."""
        own = frozenset((self.cls,)) if is_data(self.cls) else frozenset()
        return own if self.added is None else own | ADDS[self.added].classes

    @property
    def classes(self) -> set[type]:
        """Its class, and those of the tensors in it."""
        return {self.cls}.union(*(form.classes for _, form in self.parts if form is not None))


Forms = Sequence[StoredForm | None]
"""The form of each weight, None for a plain tensor; empty where all are plain."""


def is_data(cls: type[torch.Tensor]) -> bool:
    """Whether tensors of this class, if it has a form, are plain data with attributes."""
    return cls not in PLAIN_TENSORS and not hasattr(cls, "__tensor_flatten__")


def form_of(tensor: torch.Tensor) -> StoredForm | None:
    """The tensor's form; None for a plain tensor. Raises Opaque."""
    cls = type(tensor)
    if cls in PLAIN_TENSORS:
        return None
    added = None
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        parts = tuple((name, form_of(getattr(tensor, name))) for name in names)
    elif _runs_no_operators(cls):
        attributes, added = _attributes(tensor)
        context, parts = copy.deepcopy(attributes), (("data", None),)
    else:
        raise Opaque(f"{cls.__module__}.{cls.__qualname__}, which does not tell what it is made of")
    return StoredForm(cls, parts, context, tuple(tensor.shape), tuple(tensor.stride()), added)


def form_or_none(tensor: torch.Tensor) -> StoredForm | None:
    """As `form_of`, and None also for a tensor whose class does not tell."""
    try:
        return form_of(tensor)
    except Opaque:
        return None


def _runs_no_operators(cls: type[torch.Tensor]) -> bool:
    """Whether torch treats tensors of the class as their data, but for the class of what it makes of them."""
    function = getattr(cls.__torch_function__, "__func__", None)
    return (
        function is torch.Tensor.__torch_function__.__func__
        and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not any(vars(base).get("__slots__") for base in cls.__mro__)
    )


def _attributes(tensor: torch.Tensor) -> tuple[dict[str, Any], str | None]:
    """The attributes that a tensor has beside its data, and the name of one that says what is added to it. Raises
    Opaque: one is more than plain values."""
    attributes, added = vars(tensor), None
    for name, value in attributes.items():
        if name in ADDS and value:
            ADDS[name].require_low_rank(value)
            added = name
        elif not _is_plain(value):
            cls = type(tensor)
            raise Opaque(f"{cls.__module__}.{cls.__qualname__}, with {name} that no graph can take")
    if added is not None:
        attributes = {name: value for name, value in attributes.items() if name != added}
    return attributes, added


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN_VALUES or isinstance(value, enum.Enum)


def plain(weights: Sequence[torch.Tensor], forms: Forms, with_factors: bool = True) -> list[torch.Tensor]:
    """The plain tensors that the weights are made of, as a graph takes them. with_factors: with what is added to them,
    computed for each call. Raises RunEagerly: one is stored in another form than this."""
    if not forms:
        return list(weights)
    tensors: list[torch.Tensor] = []
    for weight, form in zip(weights, forms, strict=True):
        if form is None:
            tensors.append(weight)
        else:
            _take(weight, form, tensors, with_factors)
    return tensors


def _take(weight: torch.Tensor, form: StoredForm, tensors: list[torch.Tensor], with_factors: bool) -> None:
    if type(weight) is not form.cls:
        raise RunEagerly(Reason("stored_otherwise", type=type(weight).__name__))
    if is_data(form.cls):
        try:
            attributes, added = _attributes(weight)
            if attributes != form.context or added != form.added:
                raise RunEagerly(Reason("stored_otherwise", type=type(weight).__name__))
            with torch._C.DisableTorchFunctionSubclass():
                tensors.append(weight.data)
            if added is not None and with_factors:
                tensors.extend(ADDS[added].low_rank(vars(weight)[added], weight))
        except Opaque as why:
            raise RunEagerly(Reason("indescribable", what=f"a weight is stored as a {why}")) from None
        return
    names, context = weight.__tensor_flatten__()
    if len(names) != len(form.parts) or context != form.context:
        raise RunEagerly(Reason("stored_otherwise", type=type(weight).__name__))
    for name, inner in form.parts:
        part = getattr(weight, name)
        if inner is None:
            tensors.append(part)
        else:
            _take(part, inner, tensors, with_factors)


def restore_weights(forms: Forms, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The weights from the tensors that `plain` gave; simple enough for a compiler to trace."""
    if not forms:
        return list(tensors)
    weights, at = [], 0
    for form in forms:
        weight, at = _restore_weight(form, tensors, at)
        weights.append(weight)
    return weights


def _restore_weight(form: StoredForm | None, tensors: Sequence[torch.Tensor], at: int) -> tuple[torch.Tensor, int]:
    if form is None:
        return tensors[at], at + 1
    inner = {}
    for name, part in form.parts:
        inner[name], at = _restore_weight(part, tensors, at)
    if is_data(form.cls):
        made = _make_view_class(form.cls).make(inner["data"], form.context)  # type: ignore[arg-type]  # a class is hashable
        if form.added is not None:
            setattr(made, form.added, ADDS[form.added].attribute(*tensors[at : at + len(_FACTORS)]))
            at += len(_FACTORS)
        return made, at
    return form.cls.__tensor_unflatten__(inner, form.context, form.shape, form.stride), at


class PlainTensorView:
    """A tensor of a class derived from a weight's, around its data, inside a graph. Operators run on the data;
    functions of torch give tensors of the class, as in eager mode."""

    @classmethod
    def make(cls, data: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=data.dtype, device=data.device
        )
        vars(made).update(copy.deepcopy(attributes))
        made._inside = data
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(cls, other) for other in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            out = function(*args, **(kwargs or {}))
            if function in get_default_nowrap_functions():
                return out
            return tree_map_only(torch.Tensor, lambda made: made if isinstance(made, cls) else cls.make(made, {}), out)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(PlainTensorView, lambda tensor: tensor._inside, (args, kwargs or {}))
        return function(*args, **kwargs)


@functools.cache
def _make_view_class(cls: type[torch.Tensor]) -> Any:
    # A slot, because the class's own code may copy all attributes from one tensor to another.
    return type(cls.__name__, (PlainTensorView, cls), {"__module__": cls.__module__, "__slots__": ("_inside",)})
