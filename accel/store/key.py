"""Whether a graph saved elsewhere is valid here: the digest of its key, and its environment."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core import torch_internals
from ..core.toolchain import triton_version
from ..fingerprint import module_files
from ..signature import switches

if TYPE_CHECKING:
    from ..fingerprint.kinds import GraphKey

_PACKAGES = ("beside", "cache", "compile", "core", "dispatch", "fingerprint", "kernels", "modules", "signature")
"""Packages of the engine that decide what a saved graph contains and which calls it is valid for."""

_PASSES = (
    "pre_grad_custom_pass joint_custom_pre_pass joint_custom_post_pass post_grad_custom_pre_pass "
    "post_grad_custom_post_pass _pre_fusion_custom_pass _post_fusion_custom_pass"
).split()
"""Settings of inductor that take custom code."""


class NotPortable(Exception):
    """The graph is valid in this process only; the message says why."""


def key_digest(key: GraphKey, values: tuple[str, ...] = ()) -> str:
    """A digest of the key and of the values its graph is valid for; the same in every process.

    Raises NotPortable: the key means something in this process only, or its code could change unnoticed.
    """
    kind = key.kind
    if kind.opaque:
        raise NotPortable(f"its code rests on what cannot be told from outside: {min(kind.opaque)}")
    try:
        code = module_files.digest(kind.sources - {""})
    except module_files.Unknown as unknown:
        raise NotPortable(str(unknown)) from None
    content = repr(
        (kind.digest, code, kind.weights, kind.varying, key.call, key.inputs, key.backend, key.sizes, values)
    )
    if " at 0x" in content:  # the repr of an object that shows only its address
        raise NotPortable("it is called with an object that has no name outside of this process")
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def engine_files() -> list[str]:
    """The engine's own files that decide what a saved graph contains; its sentences do not."""
    folders = (Path(__file__).parents[1] / name for name in _PACKAGES)
    return sorted(str(file) for folder in folders for file in folder.glob("*.py") if file.name != "sentences.py")


def environment(devices: Iterable[torch.device]) -> dict[str, str]:
    """What a graph for these devices depends on besides its key, by name.

    The driver is left out: saved machine code runs on every driver that runs this torch.

    Raises NotPortable: part of it means something in this process only.
    """
    return {
        **_software(),
        "device": ", ".join(sorted({_device(device.type, device.index) for device in devices})),
        "options": _options(),
    }


def difference(here: dict[str, str], there: dict[str, str]) -> str | None:
    """The first difference between two environments, in words; None if they are equal."""
    for name in sorted({*here, *there}, key=lambda name: (name != "torch", name)):
        if here.get(name) != there.get(name):
            return f"saved with another {name} ({there.get(name)}; here it is {here.get(name)})"
    return None


@functools.lru_cache(maxsize=1)
def _software() -> dict[str, str]:
    try:
        engine = module_files.digest(engine_files())
    except module_files.Unknown as unknown:
        raise NotPortable(str(unknown)) from None
    return {
        "engine": engine,
        # Bytecode is saved, and libraries for this interpreter's ABI.
        "python": f"{sys.implementation.cache_tag} {platform.python_version()} {sysconfig.get_config_var('SOABI')}",
        "system": f"{sys.platform} {platform.machine()} {'-'.join(platform.libc_ver())}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
    }


def _device(kind: str, index: int | None) -> str:
    # CPU kernels are generated for a number of threads.
    return f"cpu {_processor()} {torch.get_num_threads()} threads" if kind == "cpu" else _accelerator(kind, index)


@functools.lru_cache(maxsize=16)
def _accelerator(kind: str, index: int | None) -> str:
    name = capability = ""
    backend = getattr(torch, kind, None)
    if backend is not None:
        # Metal has no names for its devices; its kernels are built by the system.
        name = backend.get_device_name(index) if hasattr(backend, "get_device_name") else platform.platform()
        capability = backend.get_device_capability(index) if hasattr(backend, "get_device_capability") else ""
        if kind == "cuda" and torch.version.hip is not None:
            # AMD's cards of one capability are of several instruction sets, and many have the same name.
            capability = backend.get_device_properties(index).gcnArchName
    toolkit = torch.version.hip or torch.version.cuda if kind == "cuda" else getattr(torch.version, kind, None)
    # The index is in the generated code.
    return f"{kind}:{index} {name} {capability} toolkit {toolkit} triton {triton_version()}"


@functools.lru_cache(maxsize=1)
def _processor() -> str:
    """The CPU's instruction sets: kernels are built for exactly these."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            line = next(line for line in lines if line.lower().startswith(("flags", "features")))
        flags = " ".join(sorted(line.partition(":")[2].split()))
    except (OSError, StopIteration):
        flags = platform.processor()
    return f"{torch.backends.cpu.get_cpu_capability()} {hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def _options() -> str:
    """A digest of torch's settings that change what is traced or generated."""
    if (lacking := torch_internals.find_missing(torch_internals.KEYS)) is not None:
        raise NotPortable(f"this torch has no {lacking}")
    from torch._functorch import config as functorch
    from torch._inductor import config

    passes = [getattr(config, name, None) for name in _PASSES]
    if any(passes):
        raise NotPortable("inductor has a pass of somebody's own")
    matmul = torch.backends.cuda.matmul
    settings = (
        _read_config(config),
        _read_config(functorch),
        torch.get_default_dtype(),
        switches.read_setting(torch.get_float32_matmul_precision),
        switches.read_setting(lambda: matmul.fp32_precision),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.mkldnn.enabled,
        *switches.attention(),  # the backend is chosen when the block is traced
    )
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:12]


def _read_config(config: Any) -> list[tuple[str, str]]:
    """A module's settings that decide what is generated, without the compiler's path."""
    return sorted((name, repr(value)) for name, value in config.save_config_portable().items() if name != "cpp.cxx")
