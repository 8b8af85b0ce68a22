"""Prompts run in this process by core's own validation and executor, with sources and sinks for what a test needs.

Imported by tests that have put a ComfyUI tree on the path.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from dev.tools.inprocess import boot

boot(cpu=True)  # again: core's nodes.py puts a folder ahead whose `utils` hides the one that the server needs
import utils.install_util  # noqa: E402, F401  # isort: skip
import execution  # noqa: E402
import folder_paths  # noqa: E402
import server  # noqa: E402

import nodes  # noqa: E402

ANY = type("Any", (str,), {"__ne__": lambda self, other: False})("*")


class Give:
    """A node that gives the test's object of a name."""

    things: dict[str, Any] = {}
    FUNCTION, CATEGORY, RETURN_TYPES = "run", "test", (ANY,)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"name": ("STRING", {})}}

    @classmethod
    def IS_CHANGED(cls, name):  # noqa: N802
        return float("nan")

    def run(self, name):
        return (self.things[name],)


class Keep:
    """A node at the end that keeps what it is given under a name."""

    kept: dict[str, Any] = {}
    FUNCTION, CATEGORY, RETURN_TYPES, OUTPUT_NODE = "run", "test", (), True

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"value": (ANY, {}), "name": ("STRING", {})}}

    def run(self, value, name):
        self.kept[name] = value
        return {}


def give(name: str) -> dict:
    """The `Give` node of a prompt."""
    return {"class_type": "Give", "inputs": {"name": name}}


def keep(name: str, node: str, slot: int = 0) -> dict:
    """The `Keep` node of a prompt for an output of another."""
    return {"class_type": "Keep", "inputs": {"name": name, "value": [node, slot]}}


class Failed(Exception):
    """The prompt ended with an error; the message is what ComfyUI shows."""


class Prompts:
    """A server that nobody is connected to, and its executor."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.server = server.PromptServer(self.loop)
        self.executor = execution.PromptExecutor(
            self.server, execution.CacheType.CLASSIC, cache_args={"lru": 0, "ram": 0, "ram_inactive": 0}
        )
        self._ids = itertools.count()

    def refused(self, prompt: dict) -> str | None:
        """Core's reasons for not taking the prompt; None where it takes it."""
        valid, _, _, node_errors = asyncio.run(execution.validate_prompt("test", prompt, None))
        said = [error["details"] or error["message"] for node in node_errors.values() for error in node["errors"]]
        return None if valid else "\n".join(said) or "refused"

    def run(self, prompt: dict, **things: Any) -> dict[str, Any]:
        """What the `Keep` nodes of the prompt were given; things: for its `Give` nodes."""
        Give.things, Keep.kept = things, {}
        valid, error, outputs, node_errors = asyncio.run(execution.validate_prompt("test", prompt, None))
        assert valid, (error, node_errors)
        self.executor.execute(prompt, f"test {next(self._ids)}", execute_outputs=outputs)
        failures = [data for event, data in self.executor.status_messages if event == "execution_error"]
        if failures:
            raise Failed(failures[0]["exception_message"].strip())
        return dict(Keep.kept)

    def text(self, node_id: str) -> str:
        """The text among the node's outputs, as the history of the server has it."""
        (text,) = self.executor.history_result["outputs"][node_id]["text"]
        return text

    def blocked(self) -> list[str]:
        """What pages were told of nodes that did not run since an input of theirs was withheld, if not read yet."""
        return [data["exception_message"] for event, data in self._sent() if event == "execution_error"]

    def _sent(self) -> list[tuple]:
        self.loop.run_until_complete(asyncio.sleep(0))
        return [self.server.messages.get_nowait()[:2] for _ in range(self.server.messages.qsize())]


def prompts(monkeypatch: pytest.MonkeyPatch, user_directory: Path) -> Prompts:
    """An executor, with this pack's nodes, `Give` and `Keep` known to core as long as the test runs.

    user_directory: where the server keeps what it keeps.
    """
    from comfy_accel.nodes import NODES

    monkeypatch.setattr(folder_paths, "user_directory", str(user_directory))

    for node in NODES:
        node.GET_SCHEMA()
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, node.define_schema().node_id, node)
    for node in (Give, Keep):
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, node.__name__, node)
    monkeypatch.setattr(server.PromptServer, "instance", None, raising=False)
    return Prompts()
