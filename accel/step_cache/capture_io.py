"""What a model call exchanges with the features of its run, so that the call itself can be captured as a CUDA graph.

A graph holds the device's work alone. What a full call stores and what a skipped one reads passes through here: during
the call where it runs eagerly, before and after the replay where it is captured.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .features import BranchKey, Features


@dataclass
class CaptureIO:
    """Inputs and outputs of one call beside its arguments and result.

    features: what a skipped call reads, by part. tensors: the features that the call stores, in order. parts: which
    part of the split each of them is of.
    """

    features: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    parts: list[Hashable] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)

    def add(self, part: Hashable, tensor: torch.Tensor, owned: bool) -> None:
        """Append one output. owned: nobody writes to `tensor` any more, so it need not be copied."""
        self.parts.append(part)
        self.tensors.append(tensor if owned else tensor.clone())


class FeaturesProxy:
    """Stands between a split's layers and the Features, with the methods that they call, for one call.

    keys: the call's branches. skips: whether it is a skipped one.
    """

    def __init__(self, features: Features, keys: Sequence[BranchKey], skips: bool):
        self.run, self._features, self._keys, self._skips = features.run, features, keys, skips
        self._io: CaptureIO | None = None
        self._copies: CaptureIO | None = None

    @property
    def is_capturable(self) -> bool:
        """Whether the call does the same as every other call of its phase."""
        return self._features.split.is_stable and (self._skips or self.run.is_full)

    @property
    def phase(self) -> Hashable:
        """Part of the capture key: which part of the model the call runs, and what it hands out."""
        return "skipped" if self._skips else "full", self._features.split.layout, len(self._keys)

    def features(self) -> dict[Hashable, torch.Tensor]:
        """What a skipped call reads, by part of the split; empty for a full one."""
        parts = self._features.split.parts if self._skips else ()
        return {part: self._features.gather(self._keys, part) for part in parts}

    @contextmanager
    def captured(self, features: dict[Hashable, torch.Tensor] | None = None) -> Iterator[CaptureIO]:
        """Within the context the call exchanges features with the CaptureIO instead of the run; None: with the run, and
        the CaptureIO gets what it stores, too."""
        io = CaptureIO(features or {})
        self._io, self._copies = (None, io) if features is None else (io, None)
        try:
            yield io
        finally:
            self._io = self._copies = None

    def deliver(self, io: CaptureIO, tensors: Sequence[torch.Tensor]) -> None:
        """Store the outputs of a replay, which are copied: the next replay overwrites them."""
        for part, tensor in zip(io.parts, tensors, strict=True):
            self._features.exchange(self._keys, tensor, part)

    def cannot_keep(self, error: Exception) -> None:
        """See `Features.cannot_keep`; raises `error` within a capture, which would lack the feature ever after."""
        if self._io is not None:
            raise error
        self._features.cannot_keep(error)

    def exchange(
        self, keys: Sequence[BranchKey], feature: torch.Tensor, part: Hashable = 0, owned: bool = False
    ) -> torch.Tensor:
        for io in (self._io, self._copies):
            if io is not None:
                io.add(part, feature, owned)
        return feature if self._io is not None else self._features.exchange(keys, feature, part, owned)

    def gather(self, keys: Sequence[BranchKey], part: Hashable = 0) -> torch.Tensor:
        if self._io is None:
            return self._features.gather(keys, part)
        return self._io.features[part].clone()  # the model may go on in place
