"""Which blocks ran eagerly, and why: logged once a reason, counted for the report."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from logging import INFO, WARNING
from typing import Any

from .events import emit, log
from .reasons import Reason
from .sentences import EXPECTED, OF_THE_MACHINE

_MOST = 500
"""Reasons kept; beyond, a new one replaces the oldest."""

_NUMBER = re.compile(r"\b\d[\w.+-]*")


def rows_of(counts: Mapping[tuple[str, Reason], int]) -> list[dict[str, Any]]:
    """Calls by (block, reason) for pages: {"block", "code", "fields", "reason", "calls"} each."""
    return [{"block": block, **why.to_json(), "calls": calls} for (block, why), calls in counts.items()]


def _key(block: str, reason: Reason) -> tuple[str, str]:
    return block, _NUMBER.sub("#", str(reason))


class Fallbacks:
    """Counts calls by (block, reason); of reasons that differ only in numbers, the latest stands for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, str], tuple[Reason, int]] = {}

    def note(self, block: str, reason: Reason, how: str = "uncompiled", calls: int = 1) -> None:
        """Count calls of a block that ran eagerly, and log the first of each reason with `how` the block ran. A reason
        that holds for all blocks is logged once."""
        key = _key(block, reason)
        with self._lock:
            if key in self._calls:
                _, before = self._calls[key]
                self._calls[key] = reason, before + calls
                return
            is_known = any(reason == known for known, _ in self._calls.values())
            if len(self._calls) >= _MOST:
                del self._calls[next(iter(self._calls))]
            self._calls[key] = reason, calls
        if reason.code not in OF_THE_MACHINE:
            codes = {reason.code, *(part.code for _, part in reason.fields if isinstance(part, Reason))}
            log.log(INFO if codes & EXPECTED else WARNING, "%s runs %s: %s", block, how, reason)
        elif not is_known:
            log.warning("Nothing is compiled: %s", reason)
        emit("fallback", block=block, reason=reason)

    def counts(self) -> dict[tuple[str, Reason], int]:
        """Calls so far by (block, reason), in the order in which they first happened."""
        with self._lock:
            return {(block, reason): calls for (block, _), (reason, calls) in self._calls.items()}

    def subtract(self, before: Mapping[tuple[str, Reason], int]) -> dict[tuple[str, Reason], int]:
        """`counts` without those of an earlier `counts`."""
        earlier = {_key(*key): calls for key, calls in before.items()}
        more = {key: calls - earlier.get(_key(*key), 0) for key, calls in self.counts().items()}
        return {key: calls for key, calls in more.items() if calls > 0}

    def rows(self) -> list[dict[str, Any]]:
        """`rows_of` what was counted so far."""
        return rows_of(self.counts())

    def clear(self) -> None:
        """Forget all; the next of each reason is logged again."""
        with self._lock:
            self._calls.clear()


fallbacks = Fallbacks()
"""The process' own, which the report reads."""
