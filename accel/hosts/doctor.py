"""The pack's `doctor`: what will be accelerated on this machine, and what to do for the rest, in ten lines.

Imports nothing of ComfyUI; where that is loaded, as for the report, its attention and allocator are told too.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator

import torch

from ..compile.registry import DEFAULT, backend_named
from ..core import toolchain
from ..core.reasons import Reason
from .comfyui import attention, words  # noqa: F401 which has its sentences
from .comfyui.server import allocator

_ATTENTION = "comfy.ldm.modules.attention"


def parts() -> Iterator[tuple[str, Reason]]:
    """Each part of the machine: its name, and what is said of it."""
    device = _find_device()
    yield "Versions", _describe_versions()
    yield "Device", _describe_device(device)
    lacking = backend_named(DEFAULT).find_missing() or toolchain.find_missing(device)
    if lacking is not None:
        yield "Compiling", Reason("compiles_not", why=lacking)
    elif device == "cpu":
        yield "Compiling", Reason("compiles_on_cpu", compiler=toolchain.cpp_compiler() or "")
    else:
        triton = toolchain.triton_version()
        yield "Compiling", Reason("compiles_with", triton=triton) if device != "mps" and triton else Reason("compiles")
    yield "CUDA graphs", allocator.state()
    its_attention = _describe_attention()
    if its_attention is not None:
        yield "Attention", its_attention


def _describe_versions() -> Reason:
    its = Reason("versions", python=platform.python_version(), torch=torch.__version__, platform=sys.platform)
    version = getattr(sys.modules.get("comfyui_version"), "__version__", None)
    if version is None:
        return its
    from .comfyui.versions import OLDEST  # which needs ComfyUI

    with_core = Reason("versions_with_core", versions=its, core=version)
    is_old = tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST
    return Reason("core_is_old", versions=with_core, oldest=".".join(map(str, OLDEST))) if is_old else with_core


def _find_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return "xpu"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _describe_device(device: str) -> Reason:
    if device == "cpu":
        return Reason("device_cpu")
    if device != "cuda":
        return Reason("device", name={"mps": "Apple (MPS)", "xpu": "Intel (XPU)"}[device])
    card = torch.cuda.get_device_properties(0)
    kind = f"capability {card.major}.{card.minor}" if torch.version.hip is None else "AMD (ROCm)"
    return Reason("device", name=f"{card.name}, {kind}, {card.total_memory / (1 << 30):.0f} GB")


def _describe_attention() -> Reason | None:
    """Core's; None where it is not loaded."""
    function = getattr(sys.modules.get(_ATTENTION), "optimized_attention", None)
    if function is None:
        return None
    if not attention.is_opaque(_ATTENTION, "optimized_attention"):
        return Reason("attention_compiled")
    return Reason("attention_called", name=getattr(function, "__name__", type(function).__name__))
