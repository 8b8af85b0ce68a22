"""How a weight is stored: a tensor of a class of its own, such as a quantised one, as plain tensors and back.

Graphs take plain tensors alone. A weight of such a class gives the tensors in it to the graph, and the graph's code
puts the class around them again. So torch never sees the weight itself: it would unpack it at every call, and keep weak
references to it, with which `Module.to` fails for weights of such a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.reasons import Reason, RunEagerly
from ..signature.tensors import PLAIN_TENSORS


class Opaque(TypeError):
    """Nothing tells how a tensor of this class is made of plain tensors."""


@dataclass(frozen=True, eq=False)
class StoredForm:
    """What a tensor of a class of its own is, besides the tensors in it (torch's `__tensor_flatten__`).

    parts: the attributes with the tensors in it, each with its own form, None for a plain tensor.
    """

    cls: type[torch.Tensor]
    parts: tuple[tuple[str, StoredForm | None], ...]
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """The paths of the plain tensors in it, in order."""
        return [
            f"{name}.{inner}" if inner else name
            for name, form in self.parts
            for inner in (("",) if form is None else form.names)
        ]


Forms = Sequence[StoredForm | None]
"""The form of each weight, None for a plain tensor; empty where all are plain."""


def form_of(tensor: torch.Tensor) -> StoredForm | None:
    """The tensor's form; None for a plain tensor.

    Raises Opaque.
    """
    cls = type(tensor)
    if cls in PLAIN_TENSORS:
        return None
    if not hasattr(tensor, "__tensor_flatten__"):
        raise Opaque(f"{cls.__module__}.{cls.__qualname__}, which does not tell what it is made of")
    names, context = tensor.__tensor_flatten__()
    parts = tuple((name, form_of(getattr(tensor, name))) for name in names)
    return StoredForm(cls, parts, context, tuple(tensor.shape), tuple(tensor.stride()))


def plain(weights: Sequence[torch.Tensor], forms: Forms) -> list[torch.Tensor]:
    """The plain tensors that the weights are made of, as a graph takes them.

    Raises RunEagerly: one is stored in another form than this.
    """
    if not forms:
        return list(weights)
    tensors: list[torch.Tensor] = []
    for weight, form in zip(weights, forms, strict=True):
        if form is None:
            tensors.append(weight)
        else:
            _take(weight, form, tensors)
    return tensors


def _take(weight: torch.Tensor, form: StoredForm, tensors: list[torch.Tensor]) -> None:
    if type(weight) is not form.cls:
        raise RunEagerly(Reason("stored_otherwise", type=type(weight).__name__))
    names, context = weight.__tensor_flatten__()
    if len(names) != len(form.parts) or context != form.context:
        raise RunEagerly(Reason("stored_otherwise", type=type(weight).__name__))
    for name, inner in form.parts:
        part = getattr(weight, name)
        if inner is None:
            tensors.append(part)
        else:
            _take(part, inner, tensors)


def restored(forms: Forms, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The weights from the tensors that `plain` gave; simple enough for a compiler to trace."""
    if not forms:
        return list(tensors)
    weights, at = [], 0
    for form in forms:
        weight, at = _restored(form, tensors, at)
        weights.append(weight)
    return weights


def _restored(form: StoredForm | None, tensors: Sequence[torch.Tensor], at: int) -> tuple[torch.Tensor, int]:
    if form is None:
        return tensors[at], at + 1
    inner = {}
    for name, part in form.parts:
        inner[name], at = _restored(part, tensors, at)
    return form.cls.__tensor_unflatten__(inner, form.context, form.shape, form.stride), at
