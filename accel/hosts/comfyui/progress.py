"""Compile progress, for the page's messages and on the node's own bar."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...compile.generated_code import STAGES, TRACE
from ...core.events import emit, subscribe
from .versions import finish_node_progress, show_node_progress


class CompileProgress:
    """Reports which of how many kinds is being compiled, and how far: by the event "compiling", and on a node's bar."""

    def __init__(self) -> None:
        self._node_id: str | None = None
        self._name = ""
        self._compiled = 0
        self._loaded = 0
        self._kinds = 0

    @contextmanager
    def during_call(self, kinds: int, node_id: str | None) -> Iterator[None]:
        """Report what this thread compiles during one call of a model with this many kinds of blocks.

        node_id: of the node with the bar; None (a node outside of a graph, a library call) shows it nowhere.
        """
        self._kinds, self._node_id = kinds, node_id
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
            self._name = data["name"]
            self._tell(TRACE)
        elif name == "compile_stage":
            self._tell(data["stage"])
        elif name == "compile_end":
            self._compiled += 1
            self._show(self._compiled + self._loaded)

    def _tell(self, stage: str) -> None:
        done = self._compiled + self._loaded
        of = max(self._kinds, done + 1)
        emit("compiling", name=self._name, number=done + 1, of=of, stage=stage, node=self._node_id)
        self._show(done, STAGES.index(stage))

    def _show(self, done: int, stages: int = 0) -> None:
        """done: kinds. stages: of the next one."""
        if self._node_id is not None:
            value = done * len(STAGES) + stages
            show_node_progress(self._node_id, value, max(value, self._kinds * len(STAGES), 1))
