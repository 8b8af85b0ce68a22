"""What must be equal for two calls of a model to be replays of one recording."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..signature.tensors import is_channels_last

if TYPE_CHECKING:
    from ..signature.tree_spec import Spec


@dataclass(frozen=True)
class BufferSpec:
    """A tensor as it is put into its buffer: everything about it but its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    channels_last: bool


@dataclass(frozen=True)
class CaptureKey:
    """The key of one recorded model call.

    model: whose weights' addresses are in the recording; a key of its own for each model, which keeps none alive.
    call: how the call is made of tensors, with the numbers and texts in it, since recordings have them inside:
        how many conditioning chunks are joined, which residuals of a ControlNet there are.
    inputs: of the call, with what a skipped step takes: the latent's shape, batch and context length.
    phase: which part of the model runs (`feature_taps.Taps.phase`); None where all of it does.
    facts: what else a recording has inside and the call does not say: the code of the model and what it looks at
        (the attention implementation), how its blocks are compiled, torch's switches for arithmetic.
    Not part of it, because only values depend on them: sigma, seeds, uuids, LoRA strength. Where the weights lie
    is not either: a recording is asked, and dropped when they have moved (`WeightSnapshot`).
    """

    model: weakref.ref
    call: Spec
    inputs: tuple[BufferSpec, ...]
    phase: Hashable
    facts: Hashable

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # It has many parts, and is asked for several times in each call.
        return hash((self.model, self.call, self.inputs, self.phase, self.facts))

    @property
    def sizes(self) -> tuple[torch.Size, ...]:
        """Of the tensors, as a `GraphKey` for exact sizes has them."""
        return tuple(spec.shape for spec in self.inputs)


def buffer_specs(tensors: Sequence[torch.Tensor]) -> tuple[BufferSpec, ...]:
    """What a recording is specialised on in these tensors. Odd strides are none of it: buffers are dense."""
    return tuple(BufferSpec(t.shape, t.dtype, t.device, is_channels_last(t)) for t in tensors)
