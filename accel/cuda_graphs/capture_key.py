"""The key of a captured call."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from ..signature.argument_guard import InputGuard
from ..signature.tensors import is_channels_last
from ..signature.tree_spec import Spec


@dataclass(frozen=True)
class BufferSpec:
    """A tensor as it is copied into its buffer: everything about it but its values and strides."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    channels_last: bool


@dataclass(frozen=True)
class CaptureKey:
    """What must be equal for two calls of a model to be replays of one captured graph.

    model: whose weights' addresses are in the graph. A weak reference, so that a key keeps no model alive.
    call: how the call is made of tensors, with the numbers and texts in it, which become constants of the graph: how
        many conditioning chunks are joined, which residuals of a ControlNet there are.
    inputs: of the call: latent shape, batch, context length.
    facts: constants of the graph that the call does not show: the model's code and what it looks at (the attention
        implementation), how its blocks are compiled, torch's switches for arithmetic.

    Sigma, seeds, uuids and LoRA strength are not part of it, since only values depend on them. Nor are the addresses
    of the weights: a captured call is compared with them, and dropped when they have moved (`WeightSnapshot`).
    """

    model: weakref.ref
    call: Spec
    inputs: tuple[BufferSpec, ...]
    facts: Hashable

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # There are many parts, and each call needs the hash several times.
        return hash((self.model, self.call, self.inputs, self.facts))

    @property
    def sizes(self) -> tuple[torch.Size, ...]:
        """Shapes of the inputs, as in a `GraphKey` for exact sizes."""
        return tuple(spec.shape for spec in self.inputs)


class CallVariant:
    """What is known of calls with the arguments of one call but for the values of its tensors, which are plain.

    inputs: the tensors of that call, from `tree_spec.flatten`. Neither they nor the model are kept.
    device: of the first tensor that has elements; None where none has.
    """

    def __init__(self, spec: Spec, inputs: Sequence[torch.Tensor]):
        self.guards: dict[tuple, InputGuard] = {}
        self._spec = spec
        self.device = next((tensor.device for tensor in inputs if tensor.numel()), None)
        # Not their strides: buffers are dense.
        self._inputs = tuple(BufferSpec(t.shape, t.dtype, t.device, is_channels_last(t)) for t in inputs)
        self._key: CaptureKey | None = None

    def key(self, model: weakref.ref[torch.nn.Module], facts: Hashable) -> CaptureKey:
        """The key of such a call. model, facts: the same at every call of this method."""
        if self._key is None:
            self._key = CaptureKey(model, self._spec, self._inputs, facts)
        return self._key
