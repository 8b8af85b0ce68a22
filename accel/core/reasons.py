"""Why something did not run compiled, and how a saving is known: codes with fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import torch_internals
from .sentences import SENTENCES

is_autocast_on = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)
current_transform = torch_internals.TRANSFORM.get(lambda: None)
"""The one of torch.func (jvp, vmap) inside which we are, or None. Its tensors have no memory for a kernel to read."""


@dataclass(frozen=True, init=False)
class Reason:
    """A code of `SENTENCES` with the fields of its sentence, equal where both are equal. Fields are text, numbers, or
    another reason. Free text, such as another library's message, is only ever a field."""

    code: str
    fields: tuple[tuple[str, str | int | Reason], ...]

    def __init__(self, code: str, /, **fields: str | int | Reason):
        object.__setattr__(self, "code", code)
        object.__setattr__(self, "fields", tuple(sorted(fields.items())))

    def __str__(self) -> str:
        """The English sentence."""
        return SENTENCES[self.code].format(**dict(self.fields))

    def to_json(self) -> dict[str, Any]:
        """{"code", "fields", "reason"}, the last being the English sentence."""
        fields = {name: value.to_json() if isinstance(value, Reason) else value for name, value in self.fields}
        return {"code": self.code, "fields": fields, "reason": str(self)}


class Refusal(Exception):
    """Base of exceptions that carry a reason for people."""

    def __init__(self, reason: Reason):
        super().__init__(reason)
        self.reason = reason


class RunEagerly(Refusal):
    """No graph is right for this call of a block. Expected, so never `Trouble`."""


def find_other_device(weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.device | None:
    """A device that has weights but no inputs; None where all tensors are on one device."""
    here = {tensor.device for tensor in inputs if tensor.ndim and tensor.numel()}
    return next((weight.device for weight in weights if weight.ndim and here and weight.device not in here), None)


def check_mode(weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Reason | None:
    """Why no graph is right for a call in torch's current mode; None where one is."""
    if is_autocast_on():
        return Reason("autocast")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *weights)):
        return Reason("gradients")
    if current_transform() is not None:
        return Reason("transformed")
    return None
