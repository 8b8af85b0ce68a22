"""The routes of the pack: state and report, changes of cache and settings.

No route names a file, and none can make a saved graph be imported or trusted.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable
from typing import Any

from ....core.events import emit, log
from ....report import log as report_log
from .. import preferences
from . import panel, panel_messages, report

LARGEST_BODY = 64 << 10  # bytes; the longest sensible request has a few thousand


class Refused(Exception):
    """The request is invalid or cannot be served; the message is one sentence that says what is valid."""

    def __init__(self, sentence: str, status: int = 400):
        super().__init__(sentence)
        self.status = status


def register() -> None:
    """Add the routes to the running server; without one (nodes used as a library) do nothing."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None:
        return
    from aiohttp import web

    def answer_with(answer: Callable[[Any], Any]) -> Callable:
        """A route: what `answer` gives for a GET's query or a POST's body, as JSON; a refusal is one sentence."""

        async def respond(request: Any) -> web.Response:
            try:
                if request.method == "POST":
                    refuse_foreign_origin(request.headers)
                    return web.json_response(answer(await read_body(request)))
                return web.json_response(answer(request.query))
            except Refused as refused:
                return web.json_response({"error": str(refused)}, status=refused.status)

        return respond

    @server.routes.get("/accel/report")
    async def get_report(request):
        return web.Response(text=report.write_report())

    server.routes.get("/accel/state")(answer_with(lambda query: panel.state(read_rows(query))))
    server.routes.post("/accel/evict")(answer_with(lambda body: panel.evict(read_entry_id(body))))
    server.routes.post("/accel/settings")(answer_with(change_settings))
    server.routes.post("/accel/clear")(answer_with(clear))
    log.addFilter(report_log.add_name)
    panel_messages.start(server)


def read_rows(query: Any) -> int:
    """The number in `?rows=N`. Raises Refused where it is out of range."""
    rows = query.get("rows", str(panel.DEFAULT_ROWS))
    if not (rows.isascii() and rows.isdecimal() and len(rows) <= 6 and int(rows) <= panel.MOST_ROWS):
        raise Refused(f"rows must be a whole number from 0 to {panel.MOST_ROWS}.")
    return int(rows)


def read_entry_id(body: Any) -> str:
    """The id in {"id": "..."}. Raises Refused for anything else."""
    if not isinstance(body, dict) or set(body) != {"id"} or not isinstance(body["id"], str):
        raise Refused('The body must be {"id": "..."}, with an id of the table in GET /accel/state.')
    return body["id"]


def change_settings(body: Any) -> dict[str, Any]:
    """The settings after these changes. Raises Refused where one is invalid, or cannot be kept."""
    if not isinstance(body, dict) or not body:
        raise Refused(f"The body must be a JSON object with some of {', '.join(preferences.NAMES)}.")
    try:
        preferences.change(body)
    except ValueError as error:
        raise Refused(str(error)) from None
    except OSError as error:
        if "cuda_graphs" in body:
            raise Refused(f"It could not be saved: {error}. ACCEL_CUDA_GRAPHS=on or off does the same.", 500) from None
        raise Refused(f"The change is in force, but could not be saved: {error}.", 500) from None
    finally:
        emit("cache_changed")
    return {"settings": preferences.state()}


def clear(body: Any) -> dict[str, int]:
    """What was dropped of the cache. Raises Refused for a body."""
    if body not in (None, {}):
        raise Refused("This route takes no input: send an empty body.")
    return panel.clear()


def refuse_foreign_origin(headers: Any) -> None:
    """Raise Refused for a request from another site's page; core does so on loopback addresses alone."""
    from comfy.cli_args import args

    origin = headers.get("Origin")
    allowed = getattr(args, "enable_cors_header", None)
    if origin is None or allowed in ("*", origin):
        return
    if urllib.parse.urlsplit(origin).netloc.lower() != headers.get("Host", "").lower():
        raise Refused("Requests from other sites' pages are refused; see ComfyUI's --enable-cors-header.", 403)


async def read_body(request: Any) -> Any:
    """The body of a request as parsed JSON; None without a body. Raises Refused: it is too large, or is not JSON."""
    if not request.can_read_body:
        return None
    if request.content_length is None or request.content_length > LARGEST_BODY:
        raise Refused(f"The body must have at most {LARGEST_BODY} bytes, and say how many.", 413)
    # A form of another site can be sent without asking first, and is never of this type.
    if request.content_type != "application/json":
        raise Refused("The body must be JSON, with the content type application/json.", 415)
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError):
        raise Refused("The body is not JSON.") from None
