"""Whether compiled code can be captured where torch allocates with cudaMallocAsync, as ComfyUI has it do by default.

Triton asks the driver about each address that it is given, and the driver does not know those of memory that a capture
took; it does not ask about plain numbers. And torch ends the process where a tensor of a capture goes outside it; so
all of them go within, and the output is copied into memory that was there before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kit import made_up_device

from tools import pack

ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
REPLAYS = 20


def captured(is_tiny: bool, fails: bool = False) -> dict[str, Any]:
    """Captures and replays a compiled block; to be called in a process that has `ENVIRONMENT`.

    fails: a capture that waits for the device instead, as calls of some models do; whether the process outlives it.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    class Block(torch.nn.Module):
        def __init__(self, width: int = 64 if is_tiny else 640):
            super().__init__()
            self.conv = torch.nn.Conv2d(width, width, 3, padding=1)
            self.norm, self.out = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)
            self.qkv = torch.nn.Linear(width, 3 * width)

        def forward(self, x):
            x = x + self.conv(torch.nn.functional.silu(x))
            tokens = x.flatten(2).transpose(1, 2)
            q, k, v = (part.unflatten(2, (-1, 64)).transpose(1, 2) for part in self.qkv(self.norm(tokens)).chunk(3, 2))
            attention = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return x + self.out(attention * 0.5).transpose(1, 2).unflatten(2, x.shape[2:])

    def say(what: str) -> None:
        print(f"cudaMallocAsync: {what}", file=sys.stderr, flush=True)  # the last of these is where a process ended

    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    pack.load()
    if made_up_device.is_here():
        made_up_device.prepare()
    row: dict[str, Any] = {"allocator": torch.cuda.get_allocator_backend()}
    with torch.inference_mode():
        block = Block().cuda().half()
        x = torch.randn(2, block.norm.weight.numel(), 64, 64, device="cuda", dtype=torch.half)
        compiled = torch.compile(block, dynamic=True)
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            for _ in range(2):
                kept = compiled(x).clone()
        before = free()
        say("captures")
        graph = torch.cuda.CUDAGraph()
        torch._C._cuda_clearCublasWorkspaces()
        if fails:
            try:
                with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                    (x * 2).sum().item()
            except RuntimeError as error:
                row["error"] = str(error).splitlines()[0]
            return row | {"free_mb": free() / 2**20}
        with _addresses_as_numbers(), torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            kept.copy_(compiled(x))
            torch._C._cuda_clearCublasWorkspaces()  # the capture's own
        say("replays")
        worst, seconds = 0.0, []
        for _ in range(REPLAYS):
            x.normal_()
            torch.cuda.synchronize()
            started = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            worst = max(worst, (kept - compiled(x)).abs().max().item())
        row |= {"replay_ms": min(seconds) * 1e3, "difference": worst, "graph_mb": (before - free()) / 2**20}
        say("frees the graph")
        del graph
        torch.cuda.empty_cache()
        row["left_mb"] = (before - free()) / 2**20
        say("calls the block again")
        compiled(x)
        free()
    return row


@contextmanager
def _addresses_as_numbers() -> Iterator[None]:
    """Within it, kernels of compiled code are given numbers for tensors."""
    import torch
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    own = CachingAutotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs)

    CachingAutotuner.run = run
    try:
        yield
    finally:
        CachingAutotuner.run = own
