"""The engine's events as messages to the pages: a few a second, none while no page is connected."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ....core.events import subscribe
from ....core.reasons import Reason
from ....core.sentences import EXPECTED, OF_CUDA_GRAPHS, OF_THE_MACHINE
from ....report.run import Run
from ....report.run_record import records
from . import allocator

TYPE = "accel"
"""The type of our messages on ComfyUI's WebSocket."""

SPACING = 0.2
"""Seconds between two messages."""

_MOST_WAITING = 32
"""Messages in the queue, the oldest of which makes room. It has the latest of each event and prompt, of fallbacks one a
reason."""


class PanelMessages:
    """Sends the events that it hears, in order and at least `SPACING` apart.

    send: takes a message and the client that it is for, None for all; called on the thread of `later`. later: has a
    function called after seconds, from any thread. is_heard: whether there is anybody to send to. asker: the client
        that this thread runs a prompt of, and the prompt's id. Nobody else hears of its nodes, or of what it is warned.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any], str | None], None],
        later: Callable[[float, Callable[[], None]], None],
        is_heard: Callable[[], bool],
        asker: Callable[[], tuple[str | None, str | None]],
    ):
        self._send = send
        self._later = later
        self._is_heard = is_heard
        self._asker = asker
        self._lock = threading.Lock()
        self._waiting: dict[tuple, tuple[dict[str, Any], str | None]] = {}
        self._is_due = False
        self._sent = -SPACING

    def hear(self, name: str, data: dict[str, Any]) -> None:
        """A listener for `events.subscribe`."""
        if not (name in _FOR_ALL or name in _FOR_ONE) or not self._is_heard():
            return
        client, prompt = self._asker()
        own = _FOR_ONE[name](data) if name in _FOR_ONE and client is not None else None
        if own is not None:
            self._add({**own, "prompt_id": prompt}, client)
        if name in _FOR_ALL:
            self._add(_FOR_ALL[name](data), None)

    def _add(self, message: dict[str, Any], client: str | None) -> None:
        slot = (message["event"], message.get("prompt_id"), message.get("reason"), message.get("block"))
        with self._lock:
            earlier, _ = self._waiting.pop(slot, ({}, None))
            if "lines" in message:  # of another run of this prompt
                for of_nodes in ("lines", "offers"):
                    message[of_nodes] = {**earlier.get(of_nodes, {}), **message[of_nodes]}
            self._waiting[slot] = message, client
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
            self._send(*message)


_FOR_ALL: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "compiling": lambda data: {"event": "compiling", **(records.compiling() or data)},
    "compile_end": lambda data: {"event": "compiled", "name": data["name"], "seconds": data["seconds"]},
    "compile_failed": lambda data: {
        "event": "compiled",
        "name": data["name"],
        "seconds": data["seconds"],
        "failed": str(data["reason"]),
    },
    "graph_loaded": lambda data: {"event": "loaded", "name": data["name"], "seconds": data["seconds"]},
    "run_over": lambda data: {"event": "run_end"},
    "cache_changed": lambda data: {"event": "cache_changed"},
}


def _warning(block: str, reason: Reason) -> dict[str, Any] | None:
    """None where nobody needs one: most machines have no CUDA graphs, and the model is compiled all the same."""
    if reason.code in OF_CUDA_GRAPHS | EXPECTED:
        return None
    return {"event": "fallback", "block": block, "of_all": reason.code in OF_THE_MACHINE, **reason.as_json()}


def _lines(run: Run) -> dict[str, Any]:
    """What its nodes say, and by node an offer of CUDA graphs, where they are what the run lacked."""
    node, offers = (run.compiling or {}).get("node"), {}
    if node is not None and run.graphs_would_give is not None and allocator.is_offered():
        offers[node] = {"times": f"{run.graphs_would_give:.1f}"}
    return {"event": "node_lines", "lines": run.lines_as_json(), "offers": offers}


_FOR_ONE: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "compiling": lambda data: {"event": "node_compiling", **data},
    "fallback": lambda data: _warning(data["block"], data["reason"]),
    "run_over": lambda data: _lines(data["run"]),
}


def start(server: Any) -> None:
    """Send events to the pages of this server from now on."""
    from ..versions import running_prompt  # which needs ComfyUI; the rest of this module does not

    def asker() -> tuple[str | None, str | None]:
        prompt = running_prompt()
        return (None if prompt is None else server.client_id), prompt

    def later(seconds: float, act: Callable[[], None]) -> None:
        server.loop.call_soon_threadsafe(server.loop.call_later, seconds, act)

    messages = PanelMessages(
        lambda message, client: server.send_sync(TYPE, message, client),
        later,
        lambda: bool(getattr(server, "sockets", None)),
        asker,
    )
    subscribe(messages.hear)
