"""What compiling has done, for tests of any host."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters


def graphs() -> int:
    """The graphs that torch has made since the test began."""
    return counters["stats"]["unique_graphs"]


def forwards_in_place(network: torch.nn.Module) -> list[str]:
    """The modules of a network that have a forward of their own now: none between runs."""
    return [name for name, part in network.named_modules() if "forward" in vars(part)]
