"""When to stop trying what keeps failing, and for how long."""

from __future__ import annotations

import time

_MOST, _PAUSE = 3, 300.0


class CircuitBreaker:
    """Opens after 3 failures in a row, and stays open for 5 minutes: meanwhile nothing should be tried.

    A network's timeout may be a minute long, and a model has dozens of kinds of blocks.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= _MOST and time.monotonic() < self._until

    def record_failure(self) -> None:
        self._failures += 1
        self._until = time.monotonic() + _PAUSE

    def record_success(self) -> None:
        self._failures = 0
