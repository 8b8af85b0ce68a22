"""Calls of a block that no graph is for, whatever the block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_is_autocast_on = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)


class RunEagerly(Exception):
    """This call of a block is not for a graph; the message says why. Expected, so never `Trouble`."""


def elsewhere(weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.device | None:
    """A device that holds weights but is not the inputs'; None where all is in one place."""
    here = {tensor.device for tensor in inputs if tensor.ndim and tensor.numel()}
    return next((weight.device for weight in weights if weight.ndim and here and weight.device not in here), None)


def not_in_this_mode(weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> str | None:
    """Why no graph is right for a call in the mode that torch is in now; None where one is."""
    if _is_autocast_on():
        return "autocast is on, and a graph computes in the types that it was made for"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *weights)):
        return "gradients are wanted, and a graph gives none"
    return None
