"""Whether a model is still what it was when the recordings of its calls were found right for it."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch

from ..modules.model_state import ModelState, Unrecordable, obstacle
from .capture_host import CaptureHost

_MAX_SURPRISES = 8
"""Times in a run that the model may turn out to be another than before; then there are no recordings any more."""


class ModelWatch:
    """Of one model during one run. state: of the model as it was looked at last; None before, and where it changed."""

    def __init__(self, model: torch.nn.Module, host: CaptureHost):
        self._model = weakref.ref(model)
        self._host = host
        self.state: ModelState | None = None
        self._token: Hashable = None
        self._surprises = 0

    def seems_same(self) -> bool:
        """Whether the model seems to be what it was when it was looked at; some microseconds."""
        return self.state is not None and self._host.token() == self._token and self.state.seems_same()

    def is_same(self, outline: int) -> bool:
        """Whether it is; some tenths of a millisecond. outline: as it was (`ModelState.outline`).

        Where it is not, it is to be looked at again.
        """
        if self.state.is_same() and self.state.outline() == outline:
            return True
        self.state = None
        self._surprises += 1
        return False

    def look(self) -> str | None:
        """Look at all of it, at the run's first call and whenever the weights have moved: what is against
        recordings of its calls, None where nothing is."""
        self._surprises += self.state is not None
        self.state = None
        model = self._model()
        reason = obstacle(model, self._host.of_module)
        if self._surprises >= _MAX_SURPRISES:
            reason = "its weights or its code change from call to call"
        if reason is not None:
            return reason
        try:
            self.state, self._token = ModelState(model), self._host.token()
        except Unrecordable as why:
            return str(why)
        return None
