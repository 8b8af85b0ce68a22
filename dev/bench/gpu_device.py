"""The device of `bench gpu`: its name and driver, its measured rate of matrix products, memory and waiting."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from kit import made_up_device
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ROUNDS = 10
SIDE, SIDE_CPU = 8192, 512


def described(device: torch.device) -> dict[str, Any]:
    """name, driver, torch, and the rate of matrix products: tflops, dtype, side.

    cuda: None without a GPU, and on the made-up device.
    """
    is_gpu = device.type == "cuda"
    dtype = torch.float16 if is_gpu else torch.float32
    side = SIDE if is_gpu else SIDE_CPU
    return {
        "name": torch.cuda.get_device_name(device) if is_gpu else "CPU",
        "driver": _driver() if is_gpu else None,
        "cuda": torch.version.cuda if is_gpu and not made_up_device.is_here() else None,
        "torch": torch.__version__,
        "matrix_tflops": round(matrix_rate(device, dtype, side) / 1e12, 4),
        "matrix_dtype": str(dtype).removeprefix("torch."),
        "matrix_side": side,
    }


def matrix_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Floating-point operations a second of square matrix products."""
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / seconds_of(lambda: one @ other, device)


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, of several in a row after two to warm up."""
    for count in (2, ROUNDS):
        wait(device)
        started = time.perf_counter()
        for _ in range(count):
            call()
        wait(device)
    return (time.perf_counter() - started) / ROUNDS


def wait(device: torch.device) -> None:
    """Until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels(call: Callable[[], Any], device: torch.device) -> list[tuple[str, int, float]]:
    """(name, calls, microseconds) of each kernel in a call, the longest first; of operators without a GPU."""
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU], acc_events=True) as seen:
        call()
        wait(device)
    found = [
        (event.key, event.count, event.self_device_time_total if is_cuda else event.self_cpu_time_total)
        for event in seen.key_averages()
        if not is_cuda or event.device_type == DeviceType.CUDA
    ]
    return sorted(found, key=lambda kernel: -kernel[2])


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_mb(device: torch.device, kept: int = 0) -> float | None:
    """Most that tensors held since `forget_peak`, MB; None without a GPU. kept: bytes to leave out."""
    return round((torch.cuda.max_memory_allocated(device) - kept) / 2**20) if device.type == "cuda" else None


def private_bytes() -> int:
    """Bytes in the pools of CUDA graphs, as a part of what torch counts as tensors."""
    segments = torch.cuda.memory_snapshot(include_traces=False)
    return sum(segment["active_size"] for segment in segments if segment["segment_pool_id"] != (0, 0))


def held_mb(device: torch.device) -> float:
    """Device memory that torch holds, MB, graphs included; without a GPU, memory of the process."""
    held = torch.cuda.memory_reserved(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    return round(held / 2**20)


def _driver() -> str | None:
    try:
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(ask, capture_output=True, text=True, timeout=30).stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return None
