"""The engine's events as messages to the pages; none while no page is connected.

They are few (a kind is compiled, something falls back for the first time, a run ends), and the pages gather those that
come at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....core.events import Listener, subscribe
from ....core.reasons import Reason
from ....core.sentences import EXPECTED, OF_CUDA_GRAPHS, OF_THE_MACHINE
from ....report.run import Run
from ....report.run_record import records
from . import allocator

TYPE = "accel"
"""The type of our messages on ComfyUI's WebSocket."""


def sender(
    send: Callable[[dict[str, Any], str | None], None],
    is_heard: Callable[[], bool],
    asker: Callable[[], tuple[str | None, str | None]],
) -> Listener:
    """A listener for `events.subscribe` that sends messages.

    send: takes a message and the client that it is for, None for all. is_heard: whether there is anybody to send to.
    asker: the client that this thread runs a prompt of, and the prompt's id. Nobody else hears of its nodes, or of
        what it is warned.
    """

    def hear(name: str, data: dict[str, Any]) -> None:
        if not (name in _FOR_ALL or name in _FOR_ONE) or not is_heard():
            return
        client, prompt = asker()
        own = _FOR_ONE[name](data) if name in _FOR_ONE and client is not None else None
        if own is not None:
            send({**own, "prompt_id": prompt}, client)
        if name in _FOR_ALL:
            send(_FOR_ALL[name](data), None)

    return hear


_FOR_ALL: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "compiling": lambda data: {"event": "compiling", **(records.compiling() or data)},
    "compile_end": lambda data: {"event": "compiled", "name": data["name"], "seconds": data["seconds"]},
    "compile_failed": lambda data: {
        "event": "compiled",
        "name": data["name"],
        "seconds": data["seconds"],
        "failed": str(data["reason"]),
    },
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
    from ..running_prompt import running_prompt  # which needs ComfyUI; the rest of this module does not

    def asker() -> tuple[str | None, str | None]:
        prompt = running_prompt()
        return (None if prompt is None else server.client_id), prompt

    subscribe(
        sender(
            send=lambda message, client: server.send_sync(TYPE, message, client),
            is_heard=lambda: bool(getattr(server, "sockets", None)),
            asker=asker,
        )
    )
