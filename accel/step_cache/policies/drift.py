"""How far shallow features have drifted since the last refresh, and how far they are expected to at the next step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from ...core.host_copy import HostCopy


@dataclass(frozen=True)
class _Change:
    """amount: relative L1, 0-dim. span: the steps that it took."""

    amount: HostCopy
    span: int


class Drift:
    """The change of each CFG branch's shallow feature since its last refresh.

    Memory: one copy of the shallow feature for each branch.
    """

    def __init__(self) -> None:
        self._references: dict[Hashable, tuple[int, torch.Tensor]] = {}
        self._changes: dict[Hashable, _Change] = {}
        """Of the step that was measured last."""
        self._earlier: dict[Hashable, _Change] = {}
        """Of the one before."""
        self._step: int | None = None

    def measure(self, key: Hashable, shallow: torch.Tensor, step: int, renew: bool, owned: bool = False) -> None:
        """Compare `shallow` [B, ...] with the branch's reference.

        renew: it becomes the reference; so it does where the reference has another shape. owned: nobody writes to
        `shallow` any more, so it need not be copied.
        """
        if step != self._step:
            # A branch that has ended no longer counts.
            self._earlier, self._changes = self._changes, {}
            self._step = step
        known = self._references.get(key)
        if known is not None and (known[1].shape, known[1].device) != (shallow.shape, shallow.device):
            known, renew = None, True
        if known is not None and known[0] < step:
            since, reference = known
            self._changes[key] = _Change(HostCopy(relative_change(shallow, reference)), step - since)
        if renew:
            self._references[key] = (step, shallow if owned else shallow.clone())

    def predicted(self, step: int) -> float | None:
        """The largest relative change of any branch expected at `step`; None before two steps were measured.

        Assumes that the change grows linearly with the steps. Where the device would have to be waited for, the pace is
        that of one step earlier, whatever the device has done by then: equal runs decide equally. Only the first
        prediction, and one for which the host is more than a step ahead, waits.
        """
        changes = self._changes
        if self._earlier and any(change.amount.is_later for change in changes.values()):
            changes = self._earlier
        expected = [
            change.amount.read() * (abs(step - self._references[key][0]) / change.span)
            for key, change in changes.items()
            if key in self._references
        ]
        return torch.stack(expected).max().item() if expected else None

    def forget(self, before: int | None = None) -> None:
        """Drop the references from before that step, or everything."""
        if before is None:
            self._references.clear()
            self._changes.clear()
            self._earlier.clear()
            return
        self._references = {key: known for key, known in self._references.items() if known[0] >= before}


def relative_change(now: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
    """Sum of |now - then| over that of |then|, 0-dim in float32, of the values that changed: what never does, as the
    picture that an edit model is given, would only dilute it. 0 where none did."""
    change = (now - then).abs()
    size = (then.abs() * (change != 0)).sum(dtype=torch.float32)
    return change.sum(dtype=torch.float32) / size.clamp_min(torch.finfo(torch.float32).tiny)
