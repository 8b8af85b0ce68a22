"""How torch is set: what decides by which kernels its operators compute, and what code may ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from ..core import torch_internals

_PRODUCTS = (
    "allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction_split_k",
    "allow_bf16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction_split_k",
)
_CONVOLUTIONS = ("enabled", "benchmark", "benchmark_limit", "deterministic")
_ATTENTIONS = ("flash", "mem_efficient", "math", "cudnn")
_PROPERTIES = (*_PRODUCTS, *_CONVOLUTIONS, "allow_tf32", "fp32_precision", "immediate", "strategy")
_GETTERS = (
    *("get_autocast_cpu_dtype", "get_default_device", "get_default_dtype", "get_deterministic_debug_mode"),
    *("get_float32_matmul_precision", "get_num_interop_threads", "get_num_threads", "is_vulkan_available"),
    *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
    *("is_anomaly_check_nan_enabled", "is_anomaly_enabled", "is_warn_always_enabled"),
)
_GETTERS_OF_C = ("_get_cublas_", "_get_cudnn_", "_get_fp32_", "_get_mkldnn_")
_BEGINNINGS, _ENDS = ("get_", "is_", "version"), ("_enabled", "_allowed")


_ATTRIBUTES = {
    **{f"matmul.{name}": (torch.backends.cuda.matmul, name) for name in _PRODUCTS},
    **{f"cudnn.{name}": (torch.backends.cudnn, name) for name in _CONVOLUTIONS},
}
"""The object and the attribute of each switch that is one."""

_TF32 = {
    "matmul.tf32": (torch.backends.cuda.matmul, torch.backends.cuda.matmul),
    "cudnn.tf32": (torch.backends.cudnn, getattr(torch.backends.cudnn, "conv", None)),
}
"""What has torch's older name (`allow_tf32`), and what has the newer one (`fp32_precision`)."""

_SETTERS = {
    "float32_matmul_precision": torch.set_float32_matmul_precision,
    "deterministic_algorithms": torch.use_deterministic_algorithms,
    "fp16_bf16_reduction_math_sdp_allowed": getattr(torch.backends.cuda, "allow_fp16_bf16_reduction_math_sdp", None),
    **{f"{name}_sdp_enabled": getattr(torch.backends.cuda, f"enable_{name}_sdp", None) for name in _ATTENTIONS},
}


def read_switches() -> tuple[tuple[str, Any], ...]:
    """The settings now, (name, value), some microseconds' work; equal ones mean equal kernels."""
    return (
        ("float32_matmul_precision", read_setting(torch.get_float32_matmul_precision)),
        ("deterministic_algorithms", torch.are_deterministic_algorithms_enabled()),
        *((name, read_setting(partial(getattr, *place))) for name, place in _ATTRIBUTES.items()),
        *((name, _tf32(*owners)) for name, owners in _TF32.items()),
        *attention(),
    )


def put_in_force(wanted: Sequence[tuple[str, Any]]) -> None:
    """Set the switches as `read_switches` said in another process. Raises Exception, of any type: this torch cannot."""
    for name, value in wanted:
        if value == dict(read_switches())[name]:  # one may set another
            continue
        if name in _ATTRIBUTES:
            setattr(*_ATTRIBUTES[name], value)
        elif name in _TF32:
            older, newer = _TF32[name]
            setattr(*((older, "allow_tf32") if isinstance(value, bool) else (newer, "fp32_precision")), value)
        else:
            _SETTERS[name](value)
    if read_switches() != wanted:
        raise ValueError("switches of torch are otherwise here")


def _tf32(older: Any, newer: Any) -> Any:
    """By torch's older name; where it was set by the newer one, by that."""
    allowed = read_setting(lambda: older.allow_tf32)
    return allowed if isinstance(allowed, bool) else read_setting(lambda: newer.fp32_precision)


def attention() -> tuple[tuple[str, Any], ...]:
    """Those for attention, which are asked where a block is traced too."""
    names = ("fp16_bf16_reduction_math_sdp_allowed", *(f"{name}_sdp_enabled" for name in _ATTENTIONS))
    return tuple((name, read_setting(getattr(torch.backends.cuda, name, None))) for name in names)


@cache
def getters() -> dict[Callable[..., Any], str]:
    """Torch's functions that answer how it is set or built, with the names that code has for them."""
    owners = {torch: _GETTERS, torch._C: [name for name in vars(torch._C) if name.startswith(_GETTERS_OF_C)]}
    for backend in filter(lambda value: isinstance(value, ModuleType), vars(torch.backends).values()):
        of = vars(backend).get("m", backend)  # what is behind a module with properties
        names = [name for name in vars(of) if name.startswith(_BEGINNINGS) or name.endswith(_ENDS)]
        owners[of] = [name for name in names if "set_" not in name]
    found = {getattr(owner, name, None): name for owner, names in owners.items() for name in names}
    return {of: name for of, name in found.items() if isinstance(of, (BuiltinFunctionType, FunctionType))}


@cache
def _readers() -> dict[str, list[Callable[[], Any]]]:
    """What reads the settings among them, and those that are attributes, by the names that code has for them."""
    owners = (torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn, torch.backends.opt_einsum)
    readers: dict[str, list] = {name: [partial(getattr, owner, name, None) for owner in owners] for name in _PROPERTIES}
    for getter, name in getters().items():
        if name in _GETTERS or name.endswith(_ENDS) and not name.startswith("_"):
            readers.setdefault(name, []).append(getter)
    return readers


def read_settings(names: Collection[str]) -> tuple:
    """How torch is set, as far as code with these names may ask for it: (name, answers)."""
    readers = _readers()
    return tuple((name, *map(read_setting, readers[name])) for name in sorted(readers.keys() & names))


@contextmanager
def treat_as_constants(watched: Collection[str] | None = None) -> Iterator[None]:
    """A context in which torch's compiler takes what `getters` answer as constants, as it does what a few others do.

    watched: names of the settings of which another answer is noticed (`read_settings`); others stay untraceable. None
        for all of them.
    """
    constants, allowed = (name.get(None) for name in (torch_internals.CONSTANTS, torch_internals.ALLOWED))
    new = [] if constants is None or allowed is None else [of for of in getters() if of not in constants]
    if watched is not None:
        names = {of: getters()[of] for of in new}
        of_builds = {of for of, name in names.items() if not name.startswith("_") and name not in _readers()}
        new = [of for of in new if of in of_builds or any(name in names[of] for name in watched)]
    added = [getter for getter in new if id(getter) not in allowed]
    for getter in new:
        constants[getter] = None
    for getter in added:
        allowed.add(id(getter))
    try:
        yield
    finally:
        for getter in new:
            del constants[getter]
        for getter in added:
            allowed.remove(id(getter))


def read_setting(setting: Callable[[], Any] | None) -> Any:
    """The value of a setting, or the error's name: torch raises for one that was set through another name."""
    try:
        return setting() if setting is not None else None
    except (AttributeError, RuntimeError) as error:
        return type(error).__name__
