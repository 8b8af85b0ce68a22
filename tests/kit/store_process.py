"""What a process says that runs one small block with a matrix in it, beside a store in a folder."""

import json
import sys
from pathlib import Path

import torch
from comfy_accel.accel.core.fallbacks import fallbacks
from torch._dynamo.utils import counters

from kit import blocks, stores

COMPILER = [
    *("torch._inductor." + name for name in ("compile_fx", "graph", "ir", "lowering", "scheduler", "select_algorithm")),
    "torch._functorch.aot_autograd",
]
"""What torch imports to compile, and not to call what was compiled."""


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(self.norm(x)))


def told(home):
    """What was compiled and loaded, how far the answers are off, and these themselves, exact to the last bit: JSON."""
    torch.manual_seed(0)
    block, cache = Block(), stores.saving(Path(home))
    stand_in = blocks.runner(block, cache, backend="inductor")
    inputs = [torch.linspace(-1, 1, batch * 8).view(batch, 8) for batch in (2, 1, 5)]
    outs = [stand_in(block.forward, x) for x in inputs]
    counts = {name: cache.statistics()[name] for name in ("compilations", "loaded")}
    counts["compiler"] = [name for name in COMPILER if name in sys.modules]
    counts |= {"traced": counters["stats"]["unique_graphs"], "misses": stores.reasons(cache.store)}
    off = max((out - block(x)).abs().max().item() for out, x in zip(outs, inputs, strict=True))
    answers = {"off": off, "out": [out.tolist() for out in outs]}
    return json.dumps({**counts, **answers, "uncompiled": fallbacks.rows()})
