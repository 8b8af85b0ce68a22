"""What must be equal for an artifact made elsewhere to be right here: the key of its graph, and the environment."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import sysconfig
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from . import ahead_of_time, call_spec, compilers, convolution, native_kernels, same_path
from .code_digest import facts_of

if TYPE_CHECKING:
    from .graph_key import GraphKey

_ENGINE = (ahead_of_time, call_spec, compilers, convolution, native_kernels, same_path)
"""Modules that decide what is in an artifact."""


def key_digest(key: GraphKey, values: tuple[str, ...] = ()) -> str | None:
    """A name for the key, and for the values that its graph is good for, that is the same in every process.

    None for a key that means something in this one alone.
    """
    if not isinstance(key.backend, str):
        return None
    kind = key.kind
    content = repr((kind.digest, kind.weights, kind.varying, key.call, key.inputs, key.backend, key.sizes, values))
    if " at 0x" in content:  # an object that says no more of itself than where it lies
        return None
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def environment(devices: Iterable[torch.device]) -> dict[str, str]:
    """What an artifact for these devices depends on beside its key, each as text.

    Not among it: the driver, since what is saved is machine code for the GPU, which every driver
    that runs this torch takes.
    """
    return {
        **_software(),
        "device": ", ".join(sorted({_device(device.type, device.index) for device in devices})),
        "options": _options(),
    }


def difference(here: dict[str, str], there: object) -> str | None:
    """What stands between two environments, in words; None when they are equal."""
    if not isinstance(there, dict):
        return "it does not say where it was made"
    for name in sorted({*here, *there}, key=lambda name: (name != "torch", name)):
        if here.get(name) != there.get(name):
            return f"saved with another {name} ({there.get(name)}; here it is {here.get(name)})"
    return None


@functools.lru_cache(maxsize=1)
def _software() -> dict[str, str]:
    # The code that runs, not its files: these may have been updated since.
    functions = [
        (name, facts_of(value.__code__).digest)
        for module in _ENGINE
        for name, value in sorted(vars(module).items())
        if isinstance(value, types.FunctionType)
    ]
    return {
        "engine": hashlib.sha256(repr(functions).encode()).hexdigest()[:16],
        # Bytecode is saved, and libraries for this interpreter's interface.
        "python": f"{sys.implementation.cache_tag} {platform.python_version()} {sysconfig.get_config_var('SOABI')}",
        "system": f"{sys.platform} {platform.machine()} {'-'.join(platform.libc_ver())}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
    }


@functools.lru_cache(maxsize=16)
def _device(kind: str, index: int | None) -> str:
    if kind == "cpu":
        return f"cpu {_processor()}"
    name = capability = ""
    backend = getattr(torch, kind, None)
    if backend is not None:
        name = backend.get_device_name(index)
        capability = backend.get_device_capability(index) if hasattr(backend, "get_device_capability") else ""
    toolkit = torch.version.hip or torch.version.cuda if kind == "cuda" else getattr(torch.version, kind, None)
    # The index is in the generated code.
    return f"{kind}:{index} {name} {capability} toolkit {toolkit} triton {_triton()}"


def _triton() -> str | None:
    from importlib import metadata

    for package in ("triton", "pytorch-triton-rocm", "triton-windows"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def _processor() -> str:
    """The processor's instruction sets: kernels are built for exactly these."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            line = next(line for line in lines if line.lower().startswith(("flags", "features")))
        flags = " ".join(sorted(line.partition(":")[2].split()))
    except (OSError, StopIteration):
        flags = platform.processor()
    return f"{torch.backends.cpu.get_cpu_capability()} {hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def _options() -> str:
    """Torch's settings that change what inductor generates, as a digest."""
    from torch._inductor import config

    settings = (
        config.get_hash().hex(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
