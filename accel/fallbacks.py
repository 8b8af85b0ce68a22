"""Which blocks ran eagerly, and why: said once in the log, counted for the report."""

from __future__ import annotations

import logging
import threading
from typing import Any

from .events import emit

log = logging.getLogger("accel")


class Fallbacks:
    """A count of calls by (block, reason)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, str], int] = {}

    def note(self, block: str, reason: str) -> None:
        """One call of a block ran eagerly; the first of each reason goes to the log."""
        with self._lock:
            calls = self._calls[block, reason] = self._calls.get((block, reason), 0) + 1
        if calls == 1:
            log.warning("%s runs uncompiled: %s", block, reason)
            emit("fallback", block=block, reason=reason)

    def rows(self) -> list[dict[str, Any]]:
        """`{"block", "reason", "calls"}`, in the order in which they first happened."""
        with self._lock:
            return [{"block": block, "reason": reason, "calls": n} for (block, reason), n in self._calls.items()]

    def clear(self) -> None:
        """Forget all; the next of each reason is logged again."""
        with self._lock:
            self._calls.clear()


fallbacks = Fallbacks()
"""Of this process; the report reads it."""
