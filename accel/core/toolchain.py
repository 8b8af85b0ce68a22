"""The tools that torch needs for compiling, where they are installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

from .reasons import Reason

_TRITONS = ("triton", "triton-windows", "triton-rocm", "triton-xpu") + (
    *("pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu"),
)
"""Packages that bring the module `triton`."""


def triton_version() -> str | None:
    """The version of Triton, which compiles for GPUs; None where it is not installed."""
    from importlib import metadata

    for package in _TRITONS:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def lacking(device: str) -> Reason | None:
    """What torch needs to generate kernels for this type of device and does not find; None where nothing is missing."""
    if device == "cpu" and cpp_compiler() is None and not os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        return Reason("no_cpp_compiler", name=_cpp_compiler_name())
    if device in ("cuda", "xpu") and importlib.util.find_spec("triton") is None:
        return Reason("no_triton")
    return None


def cpp_compiler() -> str | None:
    """The path of the compiler that torch calls for the CPU: CXX, or the system's default; None where it is missing."""
    return shutil.which(_cpp_compiler_name())


def _cpp_compiler_name() -> str:
    given = os.environ.get("CXX", "").split()  # it may have arguments
    return given[0] if given else {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
