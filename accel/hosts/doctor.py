"""`python -m accel doctor`: what will be accelerated on this machine, and what to do for the rest, in ten lines.

Imports nothing of ComfyUI; where that is loaded, as for the report, its attention and allocator are told too.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator

import torch

from ....compile.registry import DEFAULT, backend_named
from ....core import toolchain
from .. import attention
from . import allocator

_ATTENTION = "comfy.ldm.modules.attention"


def lines() -> list[str]:
    """One sentence for each part of the machine, each with what it is called first."""
    return [f"{name}: {said}" for name, said in _parts()]


def _parts() -> Iterator[tuple[str, str]]:
    device = _device()
    yield "Versions", f"Python {platform.python_version()}, PyTorch {torch.__version__}, {sys.platform}{_of_core()}"
    yield "Device", _named(device)
    lacking = backend_named(DEFAULT).missing() or toolchain.lacking(device)
    if lacking is not None:
        yield "Compiling", f"no: {lacking}"
    elif device == "cpu":
        yield "Compiling", f"yes, with {toolchain.cpp_compiler()}; on a CPU it gains little"
    else:
        yield "Compiling", f"yes, with Triton {toolchain.triton_version()}" if device != "mps" else "yes"
    yield "CUDA graphs", str(allocator.state())
    its_attention = _attention()
    if its_attention is not None:
        yield "Attention", its_attention


def _of_core() -> str:
    version = getattr(sys.modules.get("comfyui_version"), "__version__", None)
    if version is None:
        return ""
    from ..versions import OLDEST  # which needs ComfyUI

    is_old = tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST
    oldest = ".".join(map(str, OLDEST))
    return f", ComfyUI {version}" + (f" (update it: Accel is tested with {oldest} and later)" if is_old else "")


def _device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return "xpu"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _named(device: str) -> str:
    if device != "cuda":
        return {"cpu": "none but the CPU", "mps": "Apple (MPS)", "xpu": "Intel (XPU)"}[device]
    card = torch.cuda.get_device_properties(0)
    kind = f"capability {card.major}.{card.minor}" if torch.version.hip is None else "AMD (ROCm)"
    return f"{card.name}, {kind}, {card.total_memory / (1 << 30):.0f} GB"


def _attention() -> str | None:
    """Core's; None where it is not loaded."""
    function = getattr(sys.modules.get(_ATTENTION), "optimized_attention", None)
    if function is None:
        return None
    if not attention.is_opaque(_ATTENTION, "optimized_attention"):
        return "compiled with the blocks"
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name}, called from compiled blocks; no CUDA graphs with it"
