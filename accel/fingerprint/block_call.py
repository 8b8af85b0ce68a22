"""What is known of one call of a block, from its first line to its graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..signature import tree_spec
from ..signature.tensors import tensor_spec
from .kinds import GraphKey, Kind


@dataclass(eq=False)
class Call:
    """One call of a block, and how it is to be compiled. What is not known yet is empty.

    kind: the block's. backend: as `registry.backend_named` takes it. any_size: one graph serves every size.
    spec: how (args, kwargs) are made of tensors (`tree_spec.flatten`). given: these tensors; inputs: the same, dense.
    weights: the block's, in the order in which its graphs take them, while they are taken. added: what LoRA adds to
        them (`lora.Added`).
    in_graph: its graph runs.
    inner, args, kwargs: the call itself: `inner(*args, **kwargs)` runs it eagerly.
    """

    kind: Kind
    spec: tree_spec.Spec = ()
    weights: Sequence[torch.Tensor] = ()
    inputs: Sequence[torch.Tensor] = ()
    backend: str | Callable = "inductor"
    any_size: bool = True
    inner: Any = None
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    given: list[torch.Tensor] = field(default_factory=list)
    added: Sequence = ()
    in_graph: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a graph takes."""
        return (*self.weights, *self.inputs)

    @functools.cached_property
    def _split(self) -> tuple[tree_spec.Spec, tuple[str, ...]]:
        return tree_spec.remove_values(self.spec)

    @property
    def values(self) -> tuple[str, ...]:
        """The numbers and texts among the arguments, which a graph has compiled in."""
        return self._split[1]

    @functools.cached_property
    def key(self) -> GraphKey:
        """The key of its graphs; asked for while the weights are taken."""
        return GraphKey(
            kind=self.kind,
            call=self._split[0],
            # The kind describes the weights at the start of the run; they may have been moved or cast since.
            inputs=tuple(tensor_spec(tensor) for tensor in self.tensors),
            backend=self.backend,
            sizes=None if self.any_size else tuple(tensor.shape for tensor in self.inputs),
        )

    @property
    def device(self) -> torch.device:
        """Where it is computed; a tensor without dimensions may be elsewhere."""
        tensors = (*self.inputs, *self.weights)
        return next((tensor.device for tensor in tensors if tensor.ndim), torch.device("cpu"))

    @property
    def devices(self) -> set[torch.device]:
        """Where its weights and inputs are."""
        return {tensor.device for tensor in self.key.inputs}
