"""Core's functions as blocks' code is read and traced with them.

Extensions hide core's casting of weights from torch's compiler. And comfy-kitchen's products with quantised weights are
no operators of torch: traced directly, they would read memory that does not exist during tracing, and choose an
implementation by it; so they become operators, and a graph does not look inside. Its rotary embeddings and modulated
norms are operators, which would keep the compiler from joining them with what is around them. They are traced as its
own Python code computes them.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...core.events import log
from ...kernels.operators import define
from . import attention

NO_RESULT_DEPENDS_ON = attention.Ignored(
    {
        ("comfy.model_management", "MAX_PINNED_MEMORY"),
        ("comfy.memory_management", "RAM_CACHE_HEADROOM"),
        ("comfy.memory_management", "extra_ram_release_callback"),
    }
)
"""Globals that blocks' code reads in some versions (0.33.0) and that no result depends on: limits that follow from the
installed memory, and what core calls during a prompt to have its cache of outputs give memory back."""

_CASTS = ("cast_bias_weight", "uncast_bias_weight", "cast_modules_with_vbar", "resolve_cast_module_with_vbar")
_replaced: dict[tuple[Any, str], Callable] = {}
_HIDDEN = "_torchdynamo_orig_callable"
_threads_tracing = 0
_tracing_lock = threading.Lock()


@contextmanager
def traceable(traces: bool = False) -> Iterator[None]:
    """Restore core's own casting functions, and replace kernels by operators of torch, in all threads while it lasts.

    traces: code is traced or called without values, so attention that cannot be traced is replaced too.

    KJNodes hides the casting functions from torch's compiler (`patch_aimdo_for_compile`), process-wide and for good;
    a block could then not be traced in one piece.
    """
    import comfy.ops

    global _threads_tracing
    with _tracing_lock:
        _threads_tracing += 1
        casts = [(comfy.ops, name, getattr(vars(comfy.ops).get(name), _HIDDEN, None)) for name in _CASTS]
        for module, name, function in (*casts, *_kitchen_stand_ins(), *(attention.stand_ins() if traces else ())):
            if function is not None and (module, name) not in _replaced:
                _replaced[module, name] = getattr(module, name)
                setattr(module, name, function)
    try:
        yield
    finally:
        with _tracing_lock:
            _threads_tracing -= 1
            while _replaced and not _threads_tracing:  # another device's thread may be tracing still
                (module, name), function = _replaced.popitem()
                setattr(module, name, function)


_KERNELS = {
    "convrot_w4a4": ("convrot_w4a4_linear", "dequantize_convrot_w4a4_weight"),
    "w4a8_int8": ("w4a8_int8_linear", "dequantize_w4a8_int8_weight"),
}
"""Module of a layout → its functions: the product with a weight, and the weight itself."""

_IN_PYTHON = "comfy_kitchen.backends.eager"
_TRACED = (
    "apply_rope apply_rope1 apply_rope_split_half apply_rope_split_half1 "
    "rms_rope rms_rope1 rms_rope_split_half rms_rope_split_half1 adaln rms_adaln"
).split()


def _kitchen_stand_ins() -> Iterator[tuple[types.ModuleType | None, str, Any]]:
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
            if isinstance(function, types.FunctionType) and _define_operator(name, function):
                yield module, name, getattr(torch.ops.accel, name)


def _define_operator(name: str, function: Callable) -> bool:
    """Define the operator where it is not; True if there is one."""
    if hasattr(torch.ops.accel, name):
        return True
    signature = inspect.signature(function)

    def fake(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _make_fake_result(bound.arguments)

    try:
        define(name, torch.library.infer_schema(function, mutates_args=()), function, fake)
    except (RuntimeError, ValueError) as error:  # a version with arguments that no operator takes
        log.debug("%s is traced as it is: %s", name, error)
        return False
    return True


def _make_fake_result(arguments: dict[str, Any]) -> torch.Tensor:
    """The shape and type of the function's result, as a tensor without values. A byte of a weight holds two numbers."""
    packed = arguments["qweight"] if "qweight" in arguments else arguments["qdata"]
    rows, half = packed.shape
    if "x" not in arguments:
        return packed.new_empty((rows, 2 * half), dtype=arguments["output_dtype"])
    x = arguments["x"]
    return x.new_empty((*x.shape[:-1], rows), dtype=arguments.get("out_dtype", x.dtype))
