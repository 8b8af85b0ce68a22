"""Whether modules are still as they were when they were looked at: cheap enough to be asked at every call."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch

from . import wrapped_layers
from .wrapped_layers import Wraps


class Settled:
    """What modules hold, noted when this is made. Not the values of tensors, nor what is within a value.

    Layers of torch's own have settings that nobody changes; one that is replaced is seen in what holds it. Of
    wrappers (wraps) it counts that they are there: what they add is read at each call.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], wraps: Wraps | None = None):
        parts = {part for module in modules for _, part in wrapped_layers.modules(module, wraps)}
        self._noted = [
            (names, list(names.values()))
            for part in parts
            if not type(part).__module__.startswith("torch.nn.")
            for names in (part.__dict__, part._modules)
        ]

    def holds(self) -> bool:
        """Whether nothing was set, replaced, added or taken away since."""
        return all(
            len(names) == len(values) and all(map(operator.is_, names.values(), values))
            for names, values in self._noted
        )
