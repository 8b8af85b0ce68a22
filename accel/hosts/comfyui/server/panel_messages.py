"""The engine's events as messages to the pages; none while no page is connected.

They are few (a kind is compiled, something falls back for the first time, a run ends), and the pages gather those that
come at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ....core.events import subscribe
from ....core.reasons import Reason
from ....core.sentences import EXPECTED, OF_CUDA_GRAPHS, OF_THE_MACHINE
from ....report.run import Run
from ....report.run_record import records
from . import allocator

TYPE = "accel"  # the type of our messages on ComfyUI's WebSocket
LONGEST_SILENCE = 5.0  # seconds after which it is said again what is being compiled
Message = dict[str, Any]


class Messages:
    """Sends messages to the pages; a listener for `events.subscribe`.

    send: takes a message and the client that it is for, None for all. is_heard: whether there is anybody to send to.
    asker: the client that this thread runs a prompt of, and the prompt's id. Nobody else hears of its nodes, or of
        what it is warned.
    stops: whether somebody has asked for the prompt to be stopped.
    """

    def __init__(
        self,
        send: Callable[[Message, str | None], None],
        is_heard: Callable[[], bool],
        asker: Callable[[], tuple[str | None, str | None]],
        stops: Callable[[], bool] = lambda: False,
    ):
        self._send, self._is_heard, self._asker, self._stops = send, is_heard, asker, stops
        self._of_compiling: tuple[str | None, str | None] = None, None
        self._said = False, 0.0  # of what is compiled: whether it stops, and when

    def __call__(self, name: str, data: Message) -> None:
        if name == "compiling":
            self._of_compiling = self._asker()
            self._tell_compiling()
        elif name in _MESSAGES and self._is_heard():
            self._tell(*_MESSAGES[name](data), self._asker())

    def repeat(self) -> bool:
        """Say what is being compiled, where it is to stop since or nothing was said for long; whether anything is."""
        stops, at = self._said
        if stops != self._stops() or time.monotonic() - at >= LONGEST_SILENCE - 1:
            self._tell_compiling()
        return records.get_compilation() is not None

    def _tell_compiling(self) -> None:
        now = records.get_compilation()
        if now is not None and self._is_heard():
            self._said = self._stops(), time.monotonic()
            now["stops"] = self._said[0]
            self._tell({"event": "node_compiling", **now}, {"event": "compiling", **now}, self._of_compiling)

    def _tell(self, own: Message | None, of_all: Message | None, asker: tuple[str | None, str | None]) -> None:
        client, prompt = asker
        if own is not None and client is not None:
            self._send({**own, "prompt_id": prompt}, client)
        if of_all is not None:
            self._send(of_all, None)


def _show_compiled(data: Message) -> tuple[Message, Message]:
    failed = {"failed": str(data["reason"])} if "reason" in data else {}
    return {"event": "node_compiled"}, {"event": "compiled", "name": data["name"], "seconds": data["seconds"], **failed}


def _show_warning(data: Message) -> tuple[Message | None, None]:
    """Nobody needs one where the model is compiled all the same: most machines have no CUDA graphs."""
    reason: Reason = data["reason"]
    if reason.code in OF_CUDA_GRAPHS | EXPECTED:
        return None, None
    of_all = reason.code in OF_THE_MACHINE
    return {"event": "fallback", "block": data["block"], "of_all": of_all, **reason.to_json()}, None


def _show_lines(data: Message) -> tuple[Message, Message]:
    """What its nodes say, and by node an offer of CUDA graphs, where they are what the run lacked."""
    run: Run = data["run"]
    node, offers = (run.compiling or {}).get("node"), {}
    if node is not None and run.graphs_would_give is not None and allocator.is_offered():
        offers[node] = {"times": f"{run.graphs_would_give:.1f}"}
    return {"event": "node_lines", "lines": run.lines_as_json(), "offers": offers}, {"event": "run_end"}


_MESSAGES: dict[str, Callable[[Message], tuple[Message | None, Message | None]]] = {
    "compile_end": _show_compiled,
    "compile_failed": _show_compiled,
    "code_ready": lambda data: ({"event": "node_code_ready"}, {"event": "code_ready"}),
    "fallback": _show_warning,
    "run_over": _show_lines,
    "cache_changed": lambda data: (None, {"event": "cache_changed"}),
}
"""Event → what the prompt's client hears, and what everybody does."""


def start(server: Any) -> None:
    """Send events to the pages of this server from now on."""
    import comfy.model_management

    from ..running_prompt import get_prompt_id

    def asker() -> tuple[str | None, str | None]:
        prompt = get_prompt_id()
        return (None if prompt is None else server.client_id), prompt

    messages = Messages(
        send=lambda message, client: server.send_sync(TYPE, message, client),
        is_heard=lambda: bool(getattr(server, "sockets", None)),
        asker=asker,
        stops=comfy.model_management.processing_interrupted,
    )
    timers = set()  # in the loop's thread alone: one serves all block types that follow each other

    def wait() -> None:
        if not timers:
            timers.add(server.loop.call_later(1.0, repeat))

    def repeat() -> None:
        timers.clear()
        if messages.repeat():
            wait()

    subscribe(messages)
    subscribe(lambda name, data: name == "compile_start" and server.loop.call_soon_threadsafe(wait))
