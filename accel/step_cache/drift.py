"""How far the shallow features have moved since the last refresh, and how far they will have at the next step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Change:
    """amount: relative L1, 0-dim, on the features' device. span: the steps that it took. since: the step
    that the next change counts from."""

    amount: torch.Tensor
    span: int
    since: int


class ChangeMeter:
    """For each stream a copy of its shallow feature at its last refresh, and the change since, left on the device."""

    def __init__(self) -> None:
        self._references: dict[Hashable, tuple[int, torch.Tensor]] = {}
        self._changes: dict[Hashable, _Change] = {}
        self._step: int | None = None

    def watch(self, key: Hashable, shallow: torch.Tensor, step: int, renew: bool) -> None:
        """Measure `shallow` [B, ...] against the stream's reference; with `renew`, or where that is of another
        shape, it becomes the reference."""
        if step != self._step:
            self._changes.clear()  # streams that come no more have no say
            self._step = step
        known = self._references.get(key)
        if known is not None and not _is_like(known[1], shallow):
            known, renew = None, True
        if known is not None and known[0] < step:
            since, reference = known
            amount = relative_change(shallow, reference)
            self._changes[key] = _Change(amount, step - since, step if renew else since)
        if renew:
            self._references[key] = (step, shallow.clone())

    def predicted(self, step: int) -> float | None:
        """The largest change of a stream that is expected at `step`; None without a measure.

        The change is taken to grow evenly with the steps. Waits for the device, once.
        """
        expected = [change.amount * (abs(step - change.since) / change.span) for change in self._changes.values()]
        if not expected:
            return None
        return torch.stack([amount.to(expected[0].device) for amount in expected]).max().item()

    def forget(self, before: int | None = None) -> None:
        """Drop the references from before that step, or everything."""
        if before is None:
            self._references.clear()
            self._changes.clear()
            return
        self._references = {key: known for key, known in self._references.items() if known[0] >= before}


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.device == other.device


def relative_change(now: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
    """Mean |now - then| over mean |then|, 0-dim in float32; not finite where `then` is nothing but zeros."""
    return (now - then).abs().mean(dtype=torch.float32) / then.abs().mean(dtype=torch.float32)
