"""What a captured call assumes of its model, and whether that still holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from ..core.reasons import Reason
from ..modules.snapshot import UnsupportedWeights, WeightSnapshot
from .conditions import check_model

_MAX_CHANGES = 8
"""Changes of the model within one run after which nothing more is captured in it."""


@dataclass(frozen=True)
class CaptureHost:
    """What only the host knows about a model whose calls are captured.

    facts: part of the key, beside what the call itself says. simplify: replaces a dict among the arguments; raises
        `RunEagerly` where something in it must run in each call. token: changes whenever the host moves or patches
        weights; cheap. why_not: why nothing can be captured or replayed now; cheap. of_module: why a module cannot be
        captured. interrupts: exceptions that mean "stop the run". snapshot: of the model's weights.
    unchanged: whether the blocks' settings and parts are those that the run began with; some tenths of a millisecond.
    hold: where the host streams weights, keep all on the device until `release`; which of them have the values that
        they are to have, the others being brought by the calls that need them. None, and nothing is held: not all can
        be there at once. Held already, they are asked about anew. cheap.
    """

    facts: Hashable = None
    simplify: Callable[[dict], dict] | None = None
    token: Callable[[], Hashable] = lambda: None
    why_not: Callable[[], Reason | None] = lambda: None
    of_module: Callable[[torch.nn.Module], Reason | None] = lambda module: None
    interrupts: tuple[type[BaseException], ...] = ()
    snapshot: Callable[[torch.nn.Module], WeightSnapshot] = WeightSnapshot
    unchanged: Callable[[], bool] = lambda: True
    hold: Callable[[], frozenset | None] = frozenset
    release: Callable[[], None] = lambda: None


class ModelGuard:
    """Notices during one run that the model is no longer the one whose calls were captured. weights: the newest
    snapshot; None before the first, and once the model has changed."""

    def __init__(self, model: torch.nn.Module, host: CaptureHost):
        self._model = weakref.ref(model)
        self._host = host
        self.weights: WeightSnapshot | None = None
        self._token: Hashable = None
        self._changes = 0

    def seems_current(self) -> bool:
        """Whether the model seems unchanged since the snapshot; a few microseconds."""
        return self.weights is not None and self._host.token() == self._token and self.weights.seems_current()

    def is_current(self, outline: int) -> bool:
        """Whether the model is unchanged and its weights have this `WeightSnapshot.outline`; some tenths of a
        millisecond. If not, a new snapshot is due."""
        if self.weights.is_current() and self.weights.outline() == outline and self._host.unchanged():
            return True
        self.weights = None
        self._changes += 1
        return False

    def snapshot(self) -> Reason | None:
        """Why calls of the model cannot be captured; None after a new snapshot."""
        self._changes += self.weights is not None
        self.weights = None
        if self._changes >= _MAX_CHANGES:
            return Reason("model_changes")
        model = self._model()
        reason = check_model(model, self._host.of_module)
        if reason is not None:
            return reason
        try:
            self.weights, self._token = self._host.snapshot(model), self._host.token()
        except UnsupportedWeights as why:
            return why.reason
        return None
