"""What the server answers for the engine: its state, warming up without a workflow, and dropping what is compiled.

No route names a file, and none can make a saved graph be imported or trusted.
"""

from __future__ import annotations

import json
import urllib.parse
from typing import Any

from ...fallbacks import fallbacks
from ...graph_cache import shared
from . import deep_cache
from .versions import queue_prompt
from .warm_up_request import Refused, read

LARGEST_BODY = 64 << 10
"""Bytes; the longest request that makes sense has a few thousand."""


def state() -> dict:
    """The graph cache's and the store's statistics and DeepCache's last run, as JSON."""
    return {
        "graph_cache": {**shared.statistics(), "fallbacks": fallbacks.rows()},
        "graph_store": None if shared.store is None else shared.store.statistics(),
        "deep_cache": {"last_run": deep_cache.last_run()},
    }


def register() -> None:
    """Add the routes to the running server; without one (nodes used as a library) do nothing."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None:
        return
    from aiohttp import web

    def answering(handler):
        """A POST route that answers in JSON, a refusal with one sentence."""

        async def answer(request):
            try:
                refuse_foreign_origin(request.headers)
                return web.json_response(await handler(await read_body(request)))
            except Refused as refused:
                return web.json_response({"error": str(refused)}, status=refused.status)

        return answer

    @server.routes.get("/accel/state")
    async def get_state(request):
        return web.json_response(state())

    @server.routes.post("/accel/warm_up")
    @answering
    async def post_warm_up(body):
        return await warm_up(server, body)

    @server.routes.post("/accel/clear")
    @answering
    async def post_clear(body):
        if body not in (None, {}):
            raise Refused("This takes nothing: send an empty body.")
        return clear()


async def warm_up(server: Any, body: Any) -> dict:
    """Queue a warm-up as a prompt; its id. Refused while another prompt runs or waits."""
    import folder_paths

    def refuse_when_busy():
        waiting = server.prompt_queue.get_tasks_remaining()
        if waiting:
            raise Refused(f"ComfyUI is busy, {waiting} prompts run or wait: warm up when it is idle.", 409)

    wanted = read(body, lambda: folder_paths.get_filename_list("checkpoints"))
    refuse_when_busy()
    # A node may take its time to validate, and others are served meanwhile: asked again where nothing comes between.
    prompt_id, error = await queue_prompt(server, wanted.graph(), wanted.client_id, refuse_when_busy)
    if error is not None:
        raise Refused(f"ComfyUI refuses it: {error}.")
    return {"prompt_id": prompt_id}


def clear() -> dict:
    """Drop all compiled graphs of this process; what is saved on disk stays."""
    freed = shared.statistics()["bytes"]
    dropped = shared.clear()
    fallbacks.clear()
    return {"dropped": dropped, "bytes": freed}


def refuse_foreign_origin(headers: Any) -> None:
    """Raises Refused for a request that a page of another site makes in the visitor's browser.

    Core does so for servers on the loopback address alone, and not where the person allows other origins.
    """
    from comfy.cli_args import args

    origin = headers.get("Origin")
    allowed = getattr(args, "enable_cors_header", None)
    if origin is None or allowed in ("*", origin):
        return
    if urllib.parse.urlsplit(origin).netloc.lower() != headers.get("Host", "").lower():
        raise Refused("Pages of another site may not ask this; see ComfyUI's --enable-cors-header.", 403)


async def read_body(request: Any) -> Any:
    """The request's JSON; None where it has no body.

    Raises:
        Refused: it is too large or no JSON.
    """
    too_large = Refused(f"The body must have at most {LARGEST_BODY} bytes.", 413)
    if (request.content_length or 0) > LARGEST_BODY:
        raise too_large
    body = bytearray()
    async for chunk in request.content.iter_chunked(8192):
        body += chunk
        if len(body) > LARGEST_BODY:
            raise too_large
    if not body:
        return None
    # A form of another site can be sent without asking first, and is never of this type.
    if request.content_type != "application/json":
        raise Refused("The body must be JSON, with the content type application/json.", 415)
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Refused("The body is not JSON.") from None
