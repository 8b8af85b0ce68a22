"""The tools that torch needs for compiling: where they are installed, and what installs those that are not."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig

import torch

from .reasons import Reason

_TRITONS = "triton triton-windows triton-rocm triton-xpu pytorch-triton pytorch-triton-rocm pytorch-triton-xpu".split()
"""Packages that bring the module `triton`."""

_TRITON_OF = {10: 6, 11: 6, 12: 7, 13: 7, 14: 8, 15: 9}
"""Minor version of torch 2 → that of Triton 3 which belongs to it.

From the metadata of torch's wheels for Linux, and the table of triton-windows, which names torch up to 2.13.
"""

_WINDOWS_CPP = (
    "winget install Microsoft.VisualStudio.2022.BuildTools --override "
    '"--passive --add Microsoft.VisualStudio.Workload.VCTools --includeRecommended"'
)


def triton_version() -> str | None:
    """The version of Triton, which compiles for GPUs; None where it is not installed."""
    from importlib import metadata

    for package in _TRITONS:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def find_missing(device: str) -> Reason | None:
    """What torch needs to generate kernels for this type of device and does not find; None where nothing is missing."""
    if device == "cpu" and cpp_compiler() is None and not os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        name = _cpp_compiler_name() or "compiler in CXX, which is empty"
        on_linux = "dnf install gcc-c++" if shutil.which("dnf") else "apt-get install g++"
        commands = {"win32": _WINDOWS_CPP, "darwin": "xcode-select --install"}
        return Reason("no_cpp_compiler", name=name, command=commands.get(sys.platform, on_linux))
    if device not in ("cuda", "xpu"):
        return None
    if importlib.util.find_spec("triton") is None:
        if device == "xpu" or torch.version.hip is not None:  # theirs are not on PyPI
            return Reason("no_triton_of_torch")
        return Reason("no_triton", command=_install_triton())
    if sys.platform == "win32":
        # Triton builds its launcher with the compiler that it brings along. A portable Python has neither.
        headers = sysconfig.get_path("include")
        libraries = os.path.join(os.path.dirname(headers), "libs")
        for folder, file in ((headers, "Python.h"), (libraries, "python{}{}.lib".format(*sys.version_info))):
            if not os.path.isfile(os.path.join(folder, file)):
                return Reason("no_python_headers", folder=folder, file=file, python="{}.{}".format(*sys.version_info))
    return None


def cpp_compiler() -> str | None:
    """The path of the compiler that torch calls for the CPU: CXX, or the system's default; None where it is missing."""
    return shutil.which(_cpp_compiler_name())


def _cpp_compiler_name() -> str:
    # As torch has it: one name, with its spaces.
    return os.environ.get("CXX", {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++"))


def _install_triton() -> str:
    """The command that installs the Triton of this torch into this Python: a portable one, the desktop's, a venv's."""
    package = "triton-windows" if sys.platform == "win32" else "triton"
    numbers = re.match(r"2\.(\d+)", torch.__version__)
    minor = _TRITON_OF.get(int(numbers[1])) if numbers else None
    below = "" if minor is None else f"<3.{minor + 1}"
    return f'"{sys.executable}" -m pip install -U "{package}{below}"'
