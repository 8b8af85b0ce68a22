"""The features of every CFG branch of a run, and their extrapolation from the last full steps.

In the spirit of TaylorSeer (Liu et al., arXiv 2503.06923) and Spectrum (arXiv 2603.01623): features move along smooth
curves from step to step, so a line through the last two is closer than the last one alone. On the trained test networks
curves of degree 2 are worse by 1 to 4 dB (docs/deepcache.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.errors import one_line


def weights(points: Sequence[float], at: float) -> list[float]:
    """Weights of the values at `points` for the one at `at`: a single one fully, two as on the line through them.

    points: newest first, different. The weights add up to 1.
    """
    if len(points) == 1:
        return [1.0]
    newest, older = points
    return [(at - older) / (newest - older), (at - newest) / (older - newest)]


class History:
    """The last point of one feature, or the last two, newest first, each with a copy of the feature."""

    def __init__(self, keep: int):
        self._keep = keep
        self._points: list[tuple[int, float, torch.Tensor]] = []

    @property
    def newest(self) -> int:
        """The step that was recorded last."""
        return self._points[0][0]

    @property
    def bytes(self) -> int:
        return sum(known.nbytes for _, _, known in self._points)

    def fits(self, feature: torch.Tensor) -> bool:
        """Whether all points have the shape and dtype of `feature`."""
        return all(known.shape == feature.shape and known.dtype == feature.dtype for _, _, known in self._points)

    def record(self, step: int, at: float, feature: torch.Tensor, owned: bool = False) -> None:
        """Add the feature at the place `at` on the curve.

        Another evaluation of the same step, or at the same place, replaces its point; a feature of another shape or
        dtype replaces all points. owned: nobody writes to `feature` any more, so it need not be copied.
        """
        if not self.fits(feature):
            self._points.clear()
        self._points = [point for point in self._points if point[0] != step and not _is_same(point[1], at)]
        del self._points[self._keep - 1 :]
        self._points.insert(0, (step, at, feature if owned else feature.clone()))

    def value(self, at: float) -> torch.Tensor:
        """The feature at the place `at`, in memory of its own: the forecast, or the point where it is the only one."""
        newest = self._points[0][2]
        result = newest.clone()
        if len(self._points) > 1:
            (_, place, _), (_, before, older) = self._points
            # The weights add up to 1. Differences of neighbours keep their digits in half precision.
            result.add_(older - newest, alpha=weights((place, before), at)[1])
        return result


def _is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


class OutdatedFeature(Exception):
    """A stored feature does not fit this call, as when Kohya's Deep Shrink ends; a full call renews it."""


@dataclass(frozen=True)
class BranchKey:
    """What tells one CFG branch of a run, a sequence of model inputs, from every other.

    uuid and cond_index: the conditioning and the list that it is in (an area's copy in the negative list may have the
    uuid of the positive one). variant: the rest that tells calls apart, such as the frame indices of a context window
    or the blocks that a patch replaces. occurrence: how many equal ones came before it within one evaluation. shape:
    one chunk of the latent, [B, C, ...].
    """

    uuid: Hashable
    cond_index: int
    variant: Hashable
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    occurrence: int


class Features:
    """Those of one model in a run, a `DeepCacheRun`.

    A step is full or skipped for all branches alike; a branch without a feature from the last full step (new in
    mid-run, or left out there by another cache) is computed in full.

    Memory for each branch (two with cond and uncond) and part of the split: `QualityPlan.points` copies of the feature.
    SD1.5 at 1024² in half precision: 10 MiB for each copy and image.
    """

    def __init__(self, run: Any, split: Any):
        self.run, self.split = run, split
        self._histories: dict[tuple[BranchKey, Hashable], History] = {}
        self._parts: set[Hashable] = set()
        self._occurrences: Counter[Hashable] = Counter()

    @property
    def bytes(self) -> int:
        """The size of all that is stored."""
        return sum(history.bytes for history in self._histories.values())

    def begin_evaluation(self) -> None:
        self._occurrences.clear()

    def start_cycle(self, last: int) -> None:
        """A step is full: drop what is not of `last`, the full step before, or later."""
        self._histories = {key: known for key, known in self._histories.items() if known.newest >= last}

    def forget(self) -> None:
        self._histories.clear()

    def branches(
        self, x: torch.Tensor, uuids: Sequence[Hashable], cond_indices: Sequence[int], variant: Hashable
    ) -> list[BranchKey] | None:
        """One key for each chunk of the batch `x` [len(uuids) * B, C, ...]; None when the call must be plain.

        To be called once for each model call.
        """
        chunks = len(uuids or ())
        if not self.run.caches or not chunks or len(cond_indices) != chunks or x.shape[0] % chunks:
            return None
        shape = (x.shape[0] // chunks, *x.shape[1:])
        keys = []
        for uuid, cond_index in zip(uuids, cond_indices, strict=True):
            branch = uuid, cond_index, variant, shape, x.dtype, x.device
            keys.append(BranchKey(*branch, self._occurrences[branch]))
            self._occurrences[branch] += 1
        return keys

    def _has_all(self, key: BranchKey) -> bool:
        """Whether every part that was ever exchanged is there for the branch, from the last full step on."""
        known = [self._histories.get((key, part)) for part in self._parts]
        return bool(known) and all(history is not None and history.newest >= self.run.last_full for history in known)

    def can_skip(self, keys: Sequence[BranchKey]) -> bool:
        """Whether the current step is skipped and every branch of the call has its features."""
        return not self.run.is_full and all(self._has_all(key) for key in keys)

    def gather(self, keys: Sequence[BranchKey], part: Hashable = 0) -> torch.Tensor:
        """The branches' features for the current evaluation as one batch, in memory of its own."""
        features = [self._histories[key, part].value(self.run.angle) for key in keys]
        return torch.cat(features) if len(features) > 1 else features[0]

    def exchange(
        self, keys: Sequence[BranchKey], feature: torch.Tensor, part: Hashable = 0, owned: bool = False
    ) -> torch.Tensor:
        """Store each branch's chunk of `feature` [len(keys) * B, ...], and return what the model goes on with.

        On a full step that is `feature` itself. Between full steps, where some branches of a joined batch had no
        feature, the others go on with theirs, as they would in a call of their own.

        part: which of the split's features this is. owned: nobody writes to `feature` any more, so it need not be
        copied. Where that fails, as for lack of memory, nothing is skipped any more.
        """
        if not self.run.caches:
            return feature
        try:
            return self._exchanged(keys, feature, part, owned)
        except Exception as error:
            self.cannot_keep(error)
            return feature

    def cannot_keep(self, error: Exception) -> None:
        """Note that a feature could not be stored, as for lack of memory: nothing is skipped any more."""
        self.run.run_in_full(f"a feature could not be kept ({one_line(error)})", error)

    def _exchanged(self, keys: Sequence[BranchKey], feature: torch.Tensor, part: Hashable, owned: bool) -> torch.Tensor:
        self._parts.add(part)
        if not isinstance(feature, torch.Tensor) or feature.shape[0] % len(keys):
            return feature
        chunks = list(feature.chunk(len(keys)))
        histories = [self._histories.get((key, part)) for key in keys]
        is_known = [
            not self.run.is_full and self._has_all(key) and history is not None and history.fits(chunk)
            for key, history, chunk in zip(keys, histories, chunks, strict=True)
        ]
        # A chunk of a shared tensor keeps all of it in memory.
        owned = owned and not any(is_known)
        for index, (key, history) in enumerate(zip(keys, histories, strict=True)):
            if is_known[index]:
                chunks[index] = history.value(self.run.angle)
                continue
            if history is None:
                history = self._histories[key, part] = History(self.run.plan.points)
            history.record(self.run.step, self.run.angle, chunks[index], owned)
        return torch.cat(chunks) if any(is_known) else feature
