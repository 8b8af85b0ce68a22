"""What compiling has done, for tests of any host."""

from __future__ import annotations

from collections import Counter

import torch
from comfy_accel.accel.core.events import subscribe
from torch._dynamo.utils import counters

told: Counter[str] = Counter()
"""How often each event was told since the test began."""

subscribe(lambda name, data: told.update([name]))


def graphs() -> int:
    """The graphs that torch has made since the test began, but for those that told something of a block and were
    dropped."""
    return counters["stats"]["unique_graphs"] - told["block_traced"]


def forwards_in_place(network: torch.nn.Module) -> list[str]:
    """The modules of a network that have a forward of their own now: none between runs."""
    return [name for name, part in network.named_modules() if "forward" in vars(part)]
