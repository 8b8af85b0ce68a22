"""Whether tensors are like others that were looked at closely: asked for all of them in one call of torch's own.

Dynamo guards compiled code with it; asking Python for the type, device and sizes of each tensor takes four times as
long. Where torch has it not, or it does not tell what is asked of it here, the same is asked in Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

Check = Callable[..., bool]
"""Takes as many tensors as there were examples. True where each has the class, sizes, strides, type and device of its
example, none comes twice, and torch is in the mode that it was in then: autocast, inference mode, dispatch modes.
Not asked is whether gradients are wanted (`torch.is_grad_enabled`). Anything else in place of a tensor is False,
and so is all where the examples are tensors that cannot be described."""

_is_autocast_on = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)


def like(examples: Sequence[torch.Tensor]) -> Check:
    """The check for tensors like these; it keeps none of them alive."""
    if _is_native():
        try:
            return _native(examples)
        except Exception:  # a layout that has no strides, say
            pass
    return _portable(examples)


def _native(examples: Sequence[torch.Tensor]) -> Check:
    guards = torch._C._dynamo.guards.TensorGuards
    return guards(*examples, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _portable(examples: Sequence[torch.Tensor]) -> Check:
    classes, mode = list(map(type, examples)), _mode()
    try:
        known = list(map(_described, examples))
    except Exception:  # a class of tensors that has no strides, say
        return lambda *tensors: False

    def check(*tensors: torch.Tensor) -> bool:
        return (
            len(set(map(id, tensors))) == len(tensors)
            and list(map(type, tensors)) == classes
            and list(map(_described, tensors)) == known
            and _mode() == mode
        )

    return check


def _described(tensor: torch.Tensor) -> tuple:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.shape, strides, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad


def _mode() -> tuple:
    modes = getattr(torch._C, "_len_torch_dispatch_stack", int)()
    return bool(_is_autocast_on()), torch.is_inference_mode_enabled(), modes


@functools.cache
def _is_native() -> bool:
    """Whether torch's own check tells what it is relied upon for; it is no public part of torch."""
    plain, other = torch.empty(2, 3), torch.empty(2, 3)
    unlike = (
        torch.empty(2, 3, dtype=torch.float16),
        torch.empty(2, 3, device="meta"),
        torch.empty(3, 2),
        torch.empty(3, 2).t(),
        torch.nn.Parameter(other, requires_grad=False),
        torch.empty(2, 3, requires_grad=True),
        None,
    )
    try:
        check = _native((plain, other))
        if not check(other, plain) or check(plain, plain) or any(check(plain, odd) for odd in unlike):
            return False
        with torch.autocast("cpu", torch.bfloat16):
            if check(plain, other):
                return False
        with torch.inference_mode(not torch.is_inference_mode_enabled()):
            return not check(plain, other)
    except Exception:
        return False
