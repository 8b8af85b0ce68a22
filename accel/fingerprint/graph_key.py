"""The key under which calls share a compiled graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..signature.tensors import TensorSpec
from ..signature.tree_spec import Spec
from .kinds import Kind


@dataclass(frozen=True)
class GraphKey:
    """The key of one compiled graph.

    call: the structure of the call without its values (`tree_spec.without_values`); few graphs are kept for
        the values of one key.
    inputs: the block's weights, then the call's tensors.
    sizes: the inputs' shapes for an exact-size graph, None for one that serves any size.
    Sigma, seeds, uuids and LoRA strength are not part of it, because only values depend on them.
    """

    kind: Kind
    call: Spec
    inputs: tuple[TensorSpec, ...]
    backend: str
    sizes: tuple[torch.Size, ...] | None = None
