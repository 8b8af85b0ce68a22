"""The tools that torch needs for compiling, where they are installed."""

from __future__ import annotations

import os
import shutil
import sys

from .reasons import Reason


def triton_version() -> str | None:
    """The version of Triton, which compiles for GPUs; None where it is not installed."""
    from importlib import metadata

    for package in ("triton", "pytorch-triton-rocm", "triton-windows"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def lacking(device: str) -> Reason | None:
    """What torch needs to generate kernels for this type of device and does not find; None where nothing is missing."""
    if device == "cpu" and cpp_compiler() is None:
        return Reason("no_cpp_compiler", name=_cpp_compiler_name())
    if device in ("cuda", "xpu") and triton_version() is None:
        return Reason("no_triton")
    return None


def cpp_compiler() -> str | None:
    """The path of the compiler that torch calls for the CPU: CXX, or the system's default; None where it is missing."""
    return shutil.which(_cpp_compiler_name())


def _cpp_compiler_name() -> str:
    return os.environ.get("CXX") or {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
