"""Where a prompt is, on one line."""

import sys
from typing import TextIO

from tools.client import Graph


class ProgressLine:
    """A line such as "160x240 plain: KSampler 3/8", rewritten in place; pass it to `Client.run` as `on_event`.

    Where the output is no terminal only the last state, given to `finish`, is written.
    """

    def __init__(self, label: str, graph: Graph, out: TextIO | None = None):
        self.label = label
        self.graph = graph
        self.out = out or sys.stderr
        self.length = 0

    def __call__(self, kind: str, data: dict) -> None:
        node = self.graph.get(str(data.get("node")), {}).get("class_type")
        if kind == "executing" and node:
            self._show(node)
        elif kind == "progress" and node:
            self._show(f"{node} {data['value']}/{data['max']}")

    def finish(self, state: str) -> None:
        """Write the last state and end the line."""
        self._write(state, end="\n")

    def _show(self, state: str) -> None:
        if self.out.isatty():
            self._write(state, end="")

    def _write(self, state: str, end: str) -> None:
        text = f"{self.label}: {state}"
        start = "\r" if self.out.isatty() else ""
        self.out.write(start + text.ljust(self.length) + end)
        self.out.flush()
        self.length = len(text)
