"""Torch's switches that decide what its operators compute, or by which kernels, without a trace in the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PRODUCTS = (
    "allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction_split_k",
    "allow_bf16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction_split_k",
)
_CONVOLUTIONS = ("enabled", "benchmark", "benchmark_limit", "deterministic")
_ATTENTIONS = ("flash", "mem_efficient", "math", "cudnn")


def in_force() -> tuple:
    """The settings now, some microseconds' work; equal ones mean equal kernels."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        asked(torch.get_float32_matmul_precision),
        torch.are_deterministic_algorithms_enabled(),
        *(asked(lambda name=name: getattr(products, name)) for name in _PRODUCTS),
        *(asked(lambda name=name: getattr(convolutions, name)) for name in _CONVOLUTIONS),
        _tf32(products, products),
        _tf32(convolutions, getattr(convolutions, "conv", None)),
        *attention(),
    )


def put_in_force(given: tuple) -> None:
    """Set the switches as `in_force` said in another process. Raises Exception, of any type: this torch cannot."""
    products, convolutions, of_torch = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
    owners = [*((products, name) for name in _PRODUCTS), *((convolutions, name) for name in _CONVOLUTIONS)]
    values = iter(given)
    torch.set_float32_matmul_precision(next(values))
    torch.use_deterministic_algorithms(next(values))
    for owner, name in owners:
        value = next(values)
        if value != asked(lambda owner=owner, name=name: getattr(owner, name)):
            setattr(owner, name, value)
    for older, newer in ((products, products), (convolutions, getattr(convolutions, "conv", None))):
        value = next(values)
        if value != _tf32(older, newer):
            setattr(*((older, "allow_tf32") if isinstance(value, bool) else (newer, "fp32_precision")), value)
    of_torch.allow_fp16_bf16_reduction_math_sdp(next(values))
    for name in _ATTENTIONS:
        getattr(of_torch, f"enable_{name}_sdp")(next(values))
    if in_force() != given:
        raise ValueError("switches of torch are otherwise here")


def _tf32(older: Any, newer: Any) -> Any:
    """By torch's older name; where it was set by the newer one, by that."""
    allowed = asked(lambda: older.allow_tf32)
    return allowed if isinstance(allowed, bool) else asked(lambda: newer.fp32_precision)


def attention() -> tuple:
    """Those for attention, which are asked where a block is traced too."""
    of_torch = torch.backends.cuda
    names = ("fp16_bf16_reduction_math_sdp_allowed", *(f"{name}_sdp_enabled" for name in _ATTENTIONS))
    return tuple(asked(getattr(of_torch, name, None)) for name in names)


def asked(setting: Callable[[], Any] | None) -> Any:
    """The value of a setting, or the error's name: torch raises for one that was set through another name."""
    try:
        return setting() if setting is not None else None
    except (AttributeError, RuntimeError) as error:
        return type(error).__name__
