"""Compile progress, for the page's messages and on the node's own bar."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...core.events import emit, subscribe
from .versions import finish_node_progress, show_node_progress


class CompileProgress:
    """Reports which of how many kinds is being compiled: by the event "compiling", and on a node of the page.

    node_id: of that node; None (a node outside of a graph, a library call) shows it nowhere.
    """

    def __init__(self, node_id: str | None):
        self._node_id = node_id
        self._compiled = 0
        self._loaded = 0
        self._kinds = 0

    @contextmanager
    def during_call(self, kinds: int) -> Iterator[None]:
        """Report what this thread compiles during one call of a model with this many kinds of blocks."""
        self._kinds = kinds
        done, thread = self._compiled, threading.get_ident()

        def listen(name: str, data: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                self._report(name, data)

        stop = subscribe(listen)
        try:
            yield
        finally:
            stop()
            if self._compiled > done and self._node_id is not None:
                finish_node_progress(self._node_id)

    def _report(self, name: str, data: dict[str, Any]) -> None:
        if name == "graph_loaded":
            self._loaded += 1
        elif name == "compile_start":
            number = self._compiled + self._loaded + 1
            of = max(self._kinds, number)
            emit("compiling", name=data["name"], number=number, of=of, node=self._node_id)
            self._show(number - 1, of)
        elif name == "compile_end":
            self._compiled += 1
            self._show(self._compiled + self._loaded, self._kinds)

    def _show(self, done: int, of: int) -> None:
        if self._node_id is not None:
            show_node_progress(self._node_id, done, max(done, of, 1))
