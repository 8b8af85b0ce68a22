"""Compile progress as a line of text on the node that asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...events import subscribe


class CompileProgress:
    """Tells, on the node `node_id` of the page, which kind of how many is being compiled, and the seconds spent.

    node_id None (a node outside a graph, a library call) tells nothing.
    """

    def __init__(self, node_id: str | None):
        self._node_id = node_id
        self._compiled = 0
        self._kinds = 0
        self._seconds = 0.0

    @contextmanager
    def during_call(self, kinds: int) -> Iterator[None]:
        """Listen during one call of a model with this many kinds of blocks."""
        self._kinds = kinds
        stop = subscribe(self._hear) if self._node_id is not None else None
        try:
            yield
        finally:
            if stop is not None:
                stop()

    def _hear(self, name: str, data: dict[str, Any]) -> None:
        if name == "compile_start":
            number = min(self._compiled + 1, max(self._kinds, 1))
            self._say(f"Compiling {data['name']}, kind {number} of {max(self._kinds, number)} …")
        elif name == "compile_end":
            self._compiled += 1
            self._seconds += data["seconds"]
            self._say(f"{self._compiled} kinds of blocks compiled in {self._seconds:.0f} s")

    def _say(self, text: str) -> None:
        from server import PromptServer

        server = getattr(PromptServer, "instance", None)
        if server is not None:
            server.send_progress_text(text, self._node_id)
