"""What a model call under DeepCache and its run hand each other, so that the call itself can be recorded.

A recording does the device's work alone. So what a full call remembers and a skipped one is given passes through
here: with each call as it is made, or, of a recorded one, before and after it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .run import BranchKey, DeepCacheRun


@dataclass
class Tape:
    """What one call handed out in its course, in order.

    features: what a skipped call takes, by part. parts: for each tensor of `tensors` the part of the boundary that
        it is the feature of; None for shallow features, which are watched.
    """

    features: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    parts: list[Hashable | None] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)

    def add(self, part: Hashable | None, tensor: torch.Tensor, owned: bool) -> None:
        """owned: nobody writes to `tensor` any more, so it need not be copied."""
        self.parts.append(part)
        self.tensors.append(tensor if owned else tensor.clone())


class Taps:
    """Stands for a DeepCacheRun before a boundary's stand-ins, for one call.

    keys: the call's streams. skips: whether it leaves the deep part out.
    """

    def __init__(self, run: DeepCacheRun, boundary: Any, keys: Sequence[BranchKey], skips: bool):
        self._run, self._boundary, self._keys, self._skips = run, boundary, keys, skips
        self._tape: Tape | None = None
        self._copies: Tape | None = None

    @property
    def failed(self) -> bool:
        """As `DeepCacheRun.failed`."""
        return self._run.failed

    @failed.setter
    def failed(self, failed: bool) -> None:
        self._run.failed = failed

    @property
    def is_recordable(self) -> bool:
        """Whether the call does what every one of its phase does."""
        return self._boundary.is_settled and (self._skips or self._run.is_full)

    @property
    def phase(self) -> Hashable:
        """Which part of the model the call runs, and what it hands out."""
        uses_drift = self._run.policy.uses_drift
        return "skipped" if self._skips else "full", self._boundary.layout, len(self._keys), uses_drift

    def features(self) -> dict[Hashable, torch.Tensor]:
        """What a skipped call takes, by part of the boundary; nothing for a full one."""
        return {part: self._run.gather(self._keys, part) for part in self._boundary.parts} if self._skips else {}

    @contextmanager
    def taped(self, features: dict[Hashable, torch.Tensor]) -> Iterator[Tape]:
        """While it lasts, the run neither learns nor gives anything: the tape does."""
        self._tape = Tape(features)
        try:
            yield self._tape
        finally:
            self._tape = None

    @contextmanager
    def copied(self) -> Iterator[Tape]:
        """While it lasts, what the call hands to its run is on the tape too."""
        self._copies = Tape()
        try:
            yield self._copies
        finally:
            self._copies = None

    def require(self, tape: Tape) -> None:
        """Raise what the boundary does for a skipped call whose shallow features are not like the remembered ones."""
        for part, tensor in zip(tape.parts, tape.tensors, strict=True):
            if part is None and self._skips:
                self._boundary.require(self._keys, tensor)

    def hand_over(self, parts: Sequence[Hashable | None], tensors: Sequence[torch.Tensor]) -> None:
        """Give the run what a recorded call has handed out."""
        for part, tensor in zip(parts, tensors, strict=True):
            if part is None:
                if not self._skips:
                    self._boundary.note(self._keys, tensor)
                self._run.measure(self._keys, tensor)
            else:
                self._run.exchange(self._keys, tensor, part)

    def measure(self, keys: Sequence[BranchKey], shallow: torch.Tensor, owned: bool = False) -> None:
        """As `DeepCacheRun.measure`."""
        for tape in (self._tape, self._copies):
            if tape is not None:
                tape.add(None, shallow, owned)
        if self._tape is None:
            self._run.measure(keys, shallow, owned)

    def exchange(
        self, keys: Sequence[BranchKey], feature: torch.Tensor, part: Hashable = 0, owned: bool = False
    ) -> torch.Tensor:
        """As `DeepCacheRun.exchange`."""
        for tape in (self._tape, self._copies):
            if tape is not None:
                tape.add(part, feature, owned)
        return feature if self._tape is not None else self._run.exchange(keys, feature, part, owned)

    def gather(self, keys: Sequence[BranchKey], part: Hashable = 0) -> torch.Tensor:
        """As `DeepCacheRun.gather`."""
        if self._tape is None:
            return self._run.gather(keys, part)
        return self._tape.features[part].clone()  # what follows may work in place
