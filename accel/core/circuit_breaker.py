"""When to stop trying what keeps failing, and for how long."""

from __future__ import annotations

import time


class CircuitBreaker:
    """Opens after `most` failures in a row, and stays open for `pause` seconds: meanwhile nothing should be tried.

    A network's timeout may be a minute long, and a model has dozens of kinds of blocks.
    """

    def __init__(self, most: int = 3, pause: float = 300.0):
        self._most = most
        self._pause = pause
        self._failures = 0
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= self._most and time.monotonic() < self._until

    def record_failure(self) -> None:
        self._failures += 1
        self._until = time.monotonic() + self._pause

    def record_success(self) -> None:
        self._failures = 0
