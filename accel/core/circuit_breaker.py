"""How long to go on trying what keeps failing."""

from __future__ import annotations

import time


class Patience:
    """Failures in a row: after `most` of them nothing is to be tried for `pause` seconds.

    A network's timeout may be a minute long, and a model has dozens of kinds of blocks.
    """

    def __init__(self, most: int = 3, pause: float = 300.0):
        self._most = most
        self._pause = pause
        self._failures = 0
        self._until = 0.0

    @property
    def is_out(self) -> bool:
        return self._failures >= self._most and time.monotonic() < self._until

    def failed(self) -> None:
        self._failures += 1
        self._until = time.monotonic() + self._pause

    def succeeded(self) -> None:
        self._failures = 0
