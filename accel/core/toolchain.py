"""The tools that torch needs for compiling, where they are installed."""

from __future__ import annotations

import os
import shutil
import sys


def triton_version() -> str | None:
    """The version of Triton, which compiles for GPUs; None where it is not installed."""
    from importlib import metadata

    for package in ("triton", "pytorch-triton-rocm", "triton-windows"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def cpp_compiler() -> str | None:
    """The path of the compiler that torch calls for the CPU: CXX, or the system's default; None where it is missing."""
    usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX") or usual)
