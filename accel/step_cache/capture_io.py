"""What a model call exchanges with its DeepCache run, so that the call itself can be captured as a CUDA graph.

A graph holds the device's work alone. What a full call stores and what a skipped one reads passes through here: during
the call where it runs eagerly, before and after the replay where it is captured.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .run import BranchKey, DeepCacheRun
from .split_points import Split


@dataclass
class CaptureIO:
    """Inputs and outputs of one call beside its arguments and result.

    features: what a skipped call reads, by part. tensors: what the call hands to its run, in order. parts: for each of
    them the part of the split that it is the feature of; None for shallow features, whose drift is measured.
    """

    features: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    parts: list[Hashable | None] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)

    def add(self, part: Hashable | None, tensor: torch.Tensor, owned: bool) -> None:
        """Append one output. owned: nobody writes to `tensor` any more, so it need not be copied."""
        self.parts.append(part)
        self.tensors.append(tensor if owned else tensor.clone())


class RunProxy:
    """Stands between a split's layers and their DeepCacheRun, with the methods that they call, for one call.

    keys: the call's branches. skips: whether it leaves the deep part out.
    """

    def __init__(self, run: DeepCacheRun, split: Split, keys: Sequence[BranchKey], skips: bool):
        self._run, self._split, self._keys, self._skips = run, split, keys, skips
        self._io: CaptureIO | None = None
        self._copies: CaptureIO | None = None

    @property
    def is_capturable(self) -> bool:
        """Whether the call does the same as every other call of its phase."""
        return self._split.is_stable and (self._skips or self._run.is_full)

    @property
    def phase(self) -> Hashable:
        """Part of the capture key: which part of the model the call runs, and what it hands out."""
        uses_drift = self._run.policy.uses_drift
        return "skipped" if self._skips else "full", self._split.layout, len(self._keys), uses_drift

    def features(self) -> dict[Hashable, torch.Tensor]:
        """What a skipped call reads, by part of the split; empty for a full one."""
        return {part: self._run.gather(self._keys, part) for part in self._split.parts} if self._skips else {}

    @contextmanager
    def captured(self, features: dict[Hashable, torch.Tensor]) -> Iterator[CaptureIO]:
        """Within the context the call exchanges features with the CaptureIO instead of the run."""
        self._io = CaptureIO(features)
        try:
            yield self._io
        finally:
            self._io = None

    @contextmanager
    def copied(self) -> Iterator[CaptureIO]:
        """Within the context the CaptureIO gets what the call hands to its run, too."""
        self._copies = CaptureIO()
        try:
            yield self._copies
        finally:
            self._copies = None

    def check(self, io: CaptureIO) -> None:
        """Raise as the split does where a skipped call's shallow features do not fit the stored ones."""
        for part, tensor in zip(io.parts, io.tensors, strict=True):
            if part is None and self._skips:
                self._split.check_skipped(self._keys, tensor)

    def deliver(self, parts: Sequence[Hashable | None], tensors: Sequence[torch.Tensor]) -> None:
        """Hand the outputs of a replay to the run, which copies them: the next replay overwrites them."""
        for part, tensor in zip(parts, tensors, strict=True):
            if part is None:
                if not self._skips:
                    self._split.note_full(self._keys, tensor)
                self._run.measure(self._keys, tensor)
            else:
                self._run.exchange(self._keys, tensor, part)

    def run_in_full(self, reason: str) -> None:
        self._run.run_in_full(reason)

    def cannot_keep(self, error: Exception) -> None:
        """As the run's; raises `error` within a capture, which would lack the feature ever after."""
        if self._io is not None:
            raise error
        self._run.cannot_keep(error)

    def measure(self, keys: Sequence[BranchKey], shallow: torch.Tensor, owned: bool = False) -> None:
        """As the run's; nothing where there is no shallow part, and the latent is measured around the call."""
        if self._split.depth == 0:
            return
        for io in (self._io, self._copies):
            if io is not None:
                io.add(None, shallow, owned)
        if self._io is None:
            self._run.measure(keys, shallow, owned)

    def exchange(
        self, keys: Sequence[BranchKey], feature: torch.Tensor, part: Hashable = 0, owned: bool = False
    ) -> torch.Tensor:
        for io in (self._io, self._copies):
            if io is not None:
                io.add(part, feature, owned)
        return feature if self._io is not None else self._run.exchange(keys, feature, part, owned)

    def gather(self, keys: Sequence[BranchKey], part: Hashable = 0) -> torch.Tensor:
        if self._io is None:
            return self._run.gather(keys, part)
        return self._io.features[part].clone()  # the model may go on in place
