"""What a graph has in place of comfy-kitchen's functions.

Its products with quantised weights are no operators of torch. Traced directly, they would read memory that does not
exist during tracing, and choose an implementation by it; so they become operators, and a graph does not look inside.

Its rotary embeddings and modulated norms are operators, which would keep the compiler from joining them with what
is around them. They are traced as its own Python code computes them.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...core.events import log
from ...kernels.operators import define

_KERNELS = {
    "convrot_w4a4": ("convrot_w4a4_linear", "dequantize_convrot_w4a4_weight"),
    "w4a8_int8": ("w4a8_int8_linear", "dequantize_w4a8_int8_weight"),
}
"""Module of a layout → its functions: the product with a weight, and the weight itself."""

_IN_PYTHON = "comfy_kitchen.backends.eager"
_TRACED = (
    *("apply_rope", "apply_rope1", "apply_rope_split_half", "apply_rope_split_half1"),
    *("rms_rope", "rms_rope1", "rms_rope_split_half", "rms_rope_split_half1"),
    *("adaln", "rms_adaln"),
)


def stand_ins() -> Iterator[tuple[types.ModuleType, str, Any]]:
    """(module, name, function or operator) of each of these functions that this comfy-kitchen has."""
    kitchen, in_python = map(sys.modules.get, ("comfy_kitchen", _IN_PYTHON))
    for name in _TRACED:
        function = getattr(in_python, name, None)
        if isinstance(function, types.FunctionType) and hasattr(kitchen, name):
            yield kitchen, name, function
    for layout, names in _KERNELS.items():
        module = sys.modules.get(f"comfy_kitchen.tensor.{layout}")
        for name in names:
            function = getattr(module, name, None)
            if isinstance(function, types.FunctionType) and _is_defined(name, function):
                yield module, name, getattr(torch.ops.accel, name)


def _is_defined(name: str, function: Callable) -> bool:
    """Define the operator where it is not; True if there is one."""
    if hasattr(torch.ops.accel, name):
        return True
    signature = inspect.signature(function)

    def fake(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _result(bound.arguments)

    try:
        define(name, torch.library.infer_schema(function, mutates_args=()), function, fake)
    except (RuntimeError, ValueError) as error:  # a version with arguments that no operator takes
        log.debug("%s is traced as it is: %s", name, error)
        return False
    return True


def _result(arguments: dict[str, Any]) -> torch.Tensor:
    """The shape and type of the function's result, as a tensor without values. A byte of a weight holds two numbers."""
    packed = arguments["qweight"] if "qweight" in arguments else arguments["qdata"]
    rows, half = packed.shape
    if "x" not in arguments:
        return packed.new_empty((rows, 2 * half), dtype=arguments["output_dtype"])
    x = arguments["x"]
    return x.new_empty((*x.shape[:-1], rows), dtype=arguments.get("out_dtype", x.dtype))
