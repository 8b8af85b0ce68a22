"""A convolution operator that is opaque to the compiler, so that one graph serves every batch.

Tracing torch's own convolution asks which library will run it, and the answer depends on the batch (on CPU: 1, 2 to
15, 16 and more). The compiler fuses the operations around this operator; cuDNN or oneDNN run it as in eager mode. In
code that inductor generates, torch's function stands in its place: the operator's own Python takes 10 µs a call.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import conv

from ..core.torch_internals import LIBRARY_CALL
from ..signature.tensors import CHANNELS_LAST, is_channels_last
from . import operators

_SIGNATURE = (
    "(Tensor x, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed,"
    " SymInt[] output_padding, SymInt groups) -> Tensor"
)
"""That of `torch.convolution`."""


def _memory_format(x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    if is_channels_last(x) or (weight.ndim == x.ndim and is_channels_last(weight)):
        return CHANNELS_LAST[x.ndim]
    return torch.contiguous_format


def _run(x, weight, *how):
    return torch.convolution(x, weight, *how).contiguous(memory_format=_memory_format(x, weight))


def _fake(x, weight, bias, stride, padding, dilation, *_):
    dimensions = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    sizes = [(size + 2 * pad - spread * (width - 1) - 1) // step + 1 for size, width, step, pad, spread in dimensions]
    out = x.new_empty([x.shape[0], weight.shape[0], *sizes])
    return out.to(memory_format=_memory_format(x, weight))


def _conv_forward(self, x, weight, bias):
    # oneDNN adds the bias before rounding, so it stays inside; cuDNN after, so it is fused with what follows.
    inside = bias if x.device.type == "cpu" else None
    how = list(self.stride), list(self.padding), list(self.dilation), False, [0] * len(self.stride), self.groups
    out = torch.ops.accel.convolution(x, weight, inside, *how)
    return out if bias is inside else out + bias.view(-1, *(1,) * (x.ndim - 2))


_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


def _conv_forward_with(self, x, weight, bias, *own, **named):
    """For classes whose method calls cuDNN itself, which nothing can trace: the operator, unless the call has arguments
    of the class's own (a host's may leave out frames of zeros)."""
    if own or named:
        return type(self)._conv_forward(self, x, weight, bias, *own, **named)
    return _conv_forward(self, x, weight, bias)


@functools.lru_cache(maxsize=64)
def _make_operator_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A convolution's class with the operator in the place of torch's method, which its own method calls."""
    own = next(base for base in cls.__mro__ if base in _CONVOLUTIONS)
    operator = type(own.__name__, (own,), {"_conv_forward": _conv_forward})
    return type(cls.__name__, (cls, operator), {"__module__": cls.__module__})


def _is_torchs_own(cls: type) -> bool:
    """Whether nobody has put something else in place of what this class of convolutions runs."""
    method = vars(cls)["_conv_forward"]
    function = vars(torch.nn.functional)[cls.__name__.lower()]
    is_own = getattr(method, "__code__", None) is not None and method.__code__.co_filename == conv.__file__
    return is_own and isinstance(function, types.BuiltinFunctionType)


def define() -> None:
    """Register the operator."""
    operators.define("convolution", _SIGNATURE, _run, _fake)


@contextmanager
def call_directly() -> Iterator[None]:
    """A context in which inductor generates calls of torch's function where its result is laid out as the operator's:
    channels last, not all libraries give what they are given."""
    own = LIBRARY_CALL.get(None)
    if own is None:
        yield
        return

    def write(self: Any, node: Any) -> None:
        if str(node.op_overload) == "accel.convolution.default" and node.outputs[0].get_layout().is_contiguous():
            node.python_kernel_name = "torch.convolution"
        own(self, node)

    with LIBRARY_CALL.replace(write):
        yield


def leave_to_library(template: torch.nn.Module) -> None:
    """Make every plain convolution of a template (never of a user's model) call the opaque operator."""
    define()
    own = tuple(cls for cls in _CONVOLUTIONS if _is_torchs_own(cls))
    for module in template.modules():
        is_own = isinstance(module, own) and "_conv_forward" not in vars(module)
        if is_own and module.padding_mode == "zeros" and not isinstance(module.padding, str):
            forward = _conv_forward
            if all(type(module)._conv_forward is not cls._conv_forward for cls in _CONVOLUTIONS):
                module.__class__ = cls = _make_operator_class(type(module))  # type: ignore[arg-type]  # a class is hashable
                # What it makes of the weight or of its input belongs to what the block computes.
                names = getattr(getattr(cls._conv_forward, "__code__", None), "co_names", ())
                forward = _conv_forward_with if "cudnn_convolution" in names else cls._conv_forward
            module._conv_forward = types.MethodType(forward, module)
