"""Sizes that a traced function turned out to be good for alone, though they were meant to vary.

Code that loops over the batch, or asks whether a size is some number, is traced for that size. Torch leaves it to
its guards on tensors to check such a size, and a graph of ours has none: they ask for much that is in its key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class FixedSizes:
    """What is known of the sizes of one function's tensors once it is compiled."""

    def __init__(self) -> None:
        self._sizes: Any = None

    def watch(self) -> Callable[[], None]:
        """To be called by the function while it is traced; torch calls it then and there, and never again."""

        @torch.compiler.assume_constant_result
        def watch() -> None:
            self._sizes = torch._guards.TracingContext.get().fake_mode.shape_env

        return watch

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int, int], ...]:
        """(tensor, dimension, size) of those that are fixed, given the function's examples. Asked once."""
        sizes, self._sizes = self._sizes, None  # it is large

        def is_fixed(source: str) -> bool:
            symbol = sizes.source_to_var.get(source)
            return symbol is not None and bool(sizes.replace(symbol).is_number)

        return tuple(
            (index, dimension, size)
            for index, tensor in enumerate(tensors)
            for dimension, size in enumerate(tensor.shape)
            if is_fixed(f"L['tensors'][{index}].size()[{dimension}]")
        )
