"""Compile progress on the node that asked for it: a line of text, and the node's own bar."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...core.events import emit, subscribe
from . import node_text
from .versions import finish_node_progress, show_node_progress

log = logging.getLogger("accel")


class CompileProgress:
    """Tells which kind of how many is being compiled: by the event `compiling`, and on a node of the page.

    node_id: of that node; None (a node outside a graph, a library call) shows it nowhere.
    """

    def __init__(self, node_id: str | None):
        self._node_id = node_id
        self._compiled = 0
        self._loaded = 0
        self._kinds = 0
        self._seconds = 0.0
        self._thread: int | None = None

    @contextmanager
    def during_call(self, kinds: int) -> Iterator[None]:
        """Listen during one call of a model with this many kinds of blocks."""
        self._kinds = kinds
        self._thread = threading.get_ident()
        done = self._compiled
        stop = subscribe(self._hear)
        try:
            yield
        finally:
            stop()
            if self._compiled > done and self._node_id is not None:
                finish_node_progress(self._node_id)

    def _hear(self, name: str, data: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        if name == "graph_loaded":
            self._loaded += 1
        elif name == "compile_start":
            number = self._compiled + self._loaded + 1
            of = max(self._kinds, number)
            emit("compiling", name=data["name"], number=number, of=of, node=self._node_id)
            self._show(f"Compiling {data['name']}, kind {number} of {of} …", number - 1, of)
        elif name == "compile_end":
            self._compiled += 1
            self._seconds += data["seconds"]
            done = self._compiled + self._loaded
            self._show(f"{self._compiled} kinds of blocks compiled in {self._seconds:.0f} s", done, self._kinds)

    def _show(self, text: str, done: int, of: int) -> None:
        if self._node_id is None:
            return
        node_text.show(text, self._node_id)
        show_node_progress(self._node_id, done, max(done, of, 1))
