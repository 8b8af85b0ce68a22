"""The key of a captured call, and the keys of recent calls, looked up without describing the call again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..signature.argument_guard import CallGuard
from ..signature.tensors import is_channels_last
from ..signature.tree_spec import Spec

_MAX_VARIANTS = 8
"""Variants of a call that are recognised, the latest first."""

Replace = Callable[[dict], Any]


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


def buffer_specs(tensors: Sequence[torch.Tensor]) -> tuple[BufferSpec, ...]:
    """What a captured graph is specialised on in these tensors. Strides are not: buffers are dense."""
    return tuple(BufferSpec(t.shape, t.dtype, t.device, is_channels_last(t)) for t in tensors)


class CallVariant(CallGuard):
    """Calls with the arguments of one call but for the values of its tensors, which are plain.

    inputs: the tensors of that call, from `tree_spec.flatten`. Neither they nor the model are kept.
    device: of the first tensor that has elements; None where none has.
    """

    def __init__(
        self, args: tuple, kwargs: dict[str, Any], spec: Spec, inputs: Sequence[torch.Tensor], replace: Replace
    ):
        super().__init__(args, kwargs, spec, inputs, replace)
        self._specs = buffer_specs(inputs)
        self.device = next((tensor.device for tensor in inputs if tensor.numel()), None)
        self._key: CaptureKey | None = None

    def key(self, model: weakref.ref[torch.nn.Module], facts: Hashable) -> CaptureKey:
        """The key of such a call. model, facts: the same at every call of this method."""
        if self._key is None:
            self._key = CaptureKey(model, self.spec, self._specs, facts)
        return self._key


class CallCache:
    """The latest variants of a model's call."""

    def __init__(self, replace: Replace | None):
        self._replace = replace
        self._variants: tuple[CallVariant, ...] = ()

    def find(self, args: tuple, kwargs: dict[str, Any]) -> tuple[CallVariant, Sequence[torch.Tensor]] | None:
        """The variant and the tensors of a call; None for a new variant.

        Raises what `replace` and `tree_spec.flatten` do.
        """
        for variant in self._variants:
            inputs = variant.match(args, kwargs)
            if inputs is not None:
                return variant, inputs
        return None

    def add(self, args: tuple, kwargs: dict[str, Any], spec: Spec, inputs: Sequence[torch.Tensor]) -> CallVariant:
        """The new variant of a call that `tree_spec.flatten` has described."""
        variant = CallVariant(args, kwargs, spec, inputs, self._replace)
        self._variants = (variant, *self._variants[: _MAX_VARIANTS - 1])
        return variant
