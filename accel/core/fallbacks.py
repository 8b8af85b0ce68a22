"""Which blocks ran eagerly, and why: said once in the log, counted for the report."""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

from .events import emit

log = logging.getLogger("accel")

NOT_CAPTURED = "not captured as a CUDA graph: "
"""How reasons begin that are of a whole model's calls; their blocks may well have run compiled."""

_MOST = 500
"""Reasons kept; the oldest is forgotten for a new one beyond."""

_NUMBER = re.compile(r"\b\d[\w.+-]*")


class Fallbacks:
    """A count of calls by (block, reason); reasons that differ in numbers alone are one, told with its first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, str], dict[str, Any]] = {}

    def note(self, block: str, reason: str, how: str = "uncompiled") -> None:
        """One call of a block ran eagerly, or `how` else; the first of each reason goes to the log."""
        key = block, _NUMBER.sub("#", reason)
        with self._lock:
            row = self._calls.get(key)
            if row is not None:
                row["calls"] += 1
                return
            if len(self._calls) >= _MOST:
                del self._calls[next(iter(self._calls))]
            self._calls[key] = {"block": block, "reason": reason, "calls": 1}
        log.warning("%s runs %s: %s", block, how, reason)
        emit("fallback", block=block, reason=reason)

    def rows(self) -> list[dict[str, Any]]:
        """`{"block", "reason", "calls"}`, in the order in which they first happened."""
        with self._lock:
            return [dict(row) for row in self._calls.values()]

    def counts(self) -> dict[tuple[str, str], int]:
        """Calls so far by (block, reason), as in `rows`."""
        return {(row["block"], row["reason"]): row["calls"] for row in self.rows()}

    def clear(self) -> None:
        """Forget all; the next of each reason is logged again."""
        with self._lock:
            self._calls.clear()


fallbacks = Fallbacks()
"""Of this process; the report reads it."""
