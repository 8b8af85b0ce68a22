"""A made-up CUDA device, for what CUDA paths do on the host where there is no card. It is no GPU.

Real on it: torch's allocator, streams, events and captures, Dynamo, Inductor, Triton, ptxas. Made up: the device.
Kernels do nothing, so values are zeros but for what copies carry; how long work takes, tests say. No time from it means
anything, and none is to be quoted.

    folder = build(Path("somewhere"))
    subprocess.run([python, ...], env={**os.environ, **environment(folder)})

In that process call `prepare`; `counts`, `launches_take` and `fail` steer the device. From a shell:

    PYTHONPATH=tests python -m kit.made_up_device FOLDER && . FOLDER/environment.sh

FAKECUDA_CC makes it a card of that compute capability (80, 86, 89, 90, 120), FAKECUDA_MEM_MB one of that memory (24
GB), FAKECUDA_LOG=1 writes captures and allocations to stderr.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

SOURCES = Path(__file__).parent

TORCH = "2.11"
"""The torch that it is made for: others ask for more of CUDA's functions."""

_LIBRARY = "libcuda.so.1"


class Unavailable(Exception):
    """There cannot be a made-up device here; the message says why."""


def build(folder: Path) -> Path:
    """Compile the device into `folder`, in two seconds. Raises Unavailable."""
    if not metadata.version("torch").startswith(f"{TORCH}."):
        raise Unavailable(f"it knows what torch {TORCH} asks of a driver, and this is {metadata.version('torch')}")
    compiler = shutil.which("gcc")
    if compiler is None:
        raise Unavailable("no gcc")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    headers = [f"-I{path}" for path in _headers()]
    # All of it in one library by the driver's name: preloaded, it also is what Triton opens and links with.
    made = subprocess.run(
        [compiler, "-O1", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{_LIBRARY}", *headers]
        + [*map(str, sorted(SOURCES.glob("*.c"))), "-o", str(folder / _LIBRARY), "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        raise Unavailable(f"gcc failed: {made.stderr.strip()[-500:]}")
    link = folder / "libcuda.so"
    if not link.is_symlink():
        link.symlink_to(_LIBRARY)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """What a process that shall see the device in `folder` needs beside the rest of its environment."""
    return {
        "LD_PRELOAD": str(folder / _LIBRARY),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")])),
        "TRITON_LIBCUDA_PATH": str(folder),
        # Processes that compile aside would each load torch again.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # cuDNN is the real library, and finds no card.
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    }


def is_here() -> bool:
    """Whether this process has the device."""
    return hasattr(ctypes.CDLL(None), "fakecuda_counts")


def prepare() -> None:
    """In the process with the device: keep torch away from what needs a card, and outputs from being compared."""
    import torch
    from comfy_accel.accel.dispatch import block_runner
    from comfy_accel.accel.signature import output_check

    torch.backends.cudnn.enabled = False  # convolutions then are products, as those that are compiled
    # There are no values: what is read is what somebody left in the memory.
    output_check._worst = functools.wraps(output_check._worst)(lambda *of_outputs: 0.0)
    block_runner.have_equal_values = lambda *tensors: True


def sample_without_values() -> None:
    """Let core's samplers step through levels that are computed here, in a process that has ComfyUI.

    comfy-kitchen's own kernels need a card, so its other ones are called.
    """
    import comfy.samplers
    import torch

    comfy.samplers.calculate_sigmas = lambda sampling, scheduler, steps: torch.linspace(10.0, 0.0, steps + 1)
    if kitchen := sys.modules.get("comfy_kitchen"):  # of later cores
        kitchen.disable_backend("cuda")


class Counts(ctypes.Structure):
    """Calls since the process began, as in device.h.

    launches: kernels outside of graphs. captured: kernels that a capture recorded. waits: calls in which the host waits
    for the device. to_device, to_host: copies. modules: of compiled kernels, loaded.
    """

    _fields_ = [
        (name, ctypes.c_ulong)
        for name in ("launches", "captured", "graph_launches", "waits", "to_device", "to_host", "modules")
    ]

    launches: int
    captured: int
    graph_launches: int
    waits: int
    to_device: int
    to_host: int
    modules: int


def counts() -> Counts:
    """The calls until now."""
    now = Counts()
    ctypes.CDLL(None).fakecuda_counts(ctypes.byref(now))
    return now


def launches_take(microseconds: float) -> None:
    """From now on each kernel that is launched, or recorded, keeps the device at work for so long; at first, 0."""
    ctypes.CDLL(None).fakecuda_launches_take(ctypes.c_double(microseconds))


def fail(function: str, calls_before: int = 0, calls: int = 1, error: int = 700) -> None:
    """Let so many calls of a function of the runtime fail, after some that do not. 700: illegal address; 2: no memory.

    function: of runtime.c, where it says MAY_FAIL, or cuMemCreate; "" for none. A plan replaces the one before.
    """
    ctypes.CDLL(None).fakecuda_fail(function.encode(), calls_before, calls, error)


def _headers() -> list[Path]:
    """Folders with the headers of torch's CUDA, and after them Triton's, which has those of nvcc too."""
    found = [_package("nvidia") / "cu13" / "include", _package("triton") / "backends" / "nvidia" / "include"]
    for folder, header in zip(found, ("cuda_runtime_api.h", "crt/host_defines.h"), strict=True):
        if not (folder / header).is_file():
            raise Unavailable(f"no headers of CUDA 13: {folder / header}")
    return found


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(f"no package {name}")
    return Path(next(iter(spec.submodule_search_locations)))
