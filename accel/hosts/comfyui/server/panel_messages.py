"""The engine's events as messages to the pages: a few a second, none while no page is connected."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ....core.events import subscribe
from ....report.run_record import records

TYPE = "accel"
"""The type of our messages on ComfyUI's WebSocket."""

SPACING = 0.2
"""Seconds between two messages."""

_MOST_WAITING = 32
"""Messages in the queue, the oldest of which makes room. It has the latest of each event, of fallbacks one a reason."""


class PanelMessages:
    """Sends the events that it hears, in order and at least `SPACING` apart.

    send: takes a message; called on the thread of `later`. later: has a function called after seconds, from any
    thread. is_heard: whether there is anybody to send to. workflow: the id of the workflow that runs, for messages
        that are for one of its nodes.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any]], None],
        later: Callable[[float, Callable[[], None]], None],
        is_heard: Callable[[], bool],
        workflow: Callable[[], str | None] = lambda: None,
    ):
        self._send = send
        self._later = later
        self._is_heard = is_heard
        self._workflow = workflow
        self._lock = threading.Lock()
        self._waiting: dict[tuple, dict[str, Any]] = {}
        self._is_due = False
        self._sent = -SPACING

    def hear(self, name: str, data: dict[str, Any]) -> None:
        """A listener for `events.subscribe`."""
        if name not in _MESSAGES or not self._is_heard():
            return
        message = _MESSAGES[name](data)
        if "lines" in message or "node" in message:
            message["workflow"] = self._workflow()
        slot = (name, message["block"], message["reason"]) if name == "fallback" else (message["event"],)
        slot += (message.get("workflow"),)
        with self._lock:
            earlier = self._waiting.pop(slot, {})
            if "lines" in message:  # of another run of this prompt
                message["lines"] = {**earlier.get("lines", {}), **message["lines"]}
            self._waiting[slot] = message
            if len(self._waiting) > _MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
            if self._is_due:
                return
            self._is_due = True
            delay = max(0.0, self._sent + SPACING - time.monotonic())
        self._later(delay, self._send_one)

    def _send_one(self) -> None:
        with self._lock:
            message = self._waiting.pop(next(iter(self._waiting))) if self._waiting else None
            self._sent = time.monotonic()
            self._is_due = bool(self._waiting)
            is_more = self._is_due
        if is_more:
            self._later(SPACING, self._send_one)
        if message is not None:
            self._send(message)


_MESSAGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "compiling": lambda data: {"event": "compiling", **(records.compiling() or data)},
    "compile_end": lambda data: {"event": "compiled", "name": data["name"], "seconds": data["seconds"]},
    "compile_failed": lambda data: {
        "event": "compiled",
        "name": data["name"],
        "seconds": data["seconds"],
        "failed": str(data["reason"]),
    },
    "graph_loaded": lambda data: {"event": "loaded", "name": data["name"], "seconds": data["seconds"]},
    "fallback": lambda data: {"event": "fallback", "block": data["block"], **data["reason"].as_json()},
    "run_over": lambda data: {"event": "run_end", "lines": data["run"].lines_as_json()},
    "cache_changed": lambda data: {"event": "cache_changed"},
}


def start(server: Any) -> None:
    """Send events to the pages of this server from now on."""
    from ..versions import running_workflow  # which needs ComfyUI; the rest of this module does not

    def later(seconds: float, act: Callable[[], None]) -> None:
        server.loop.call_soon_threadsafe(server.loop.call_later, seconds, act)

    messages = PanelMessages(
        lambda message: server.send_sync(TYPE, message),
        later,
        lambda: bool(getattr(server, "sockets", None)),
        lambda: running_workflow(server),
    )
    subscribe(messages.hear)
