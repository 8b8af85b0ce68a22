"""What the server tells of the engine: `GET /accel/state`. Read-only."""

from __future__ import annotations

from ...fallbacks import fallbacks
from ...graph_cache import shared
from . import deep_cache


def state() -> dict:
    """The graph cache's statistics and DeepCache's last run, as JSON."""
    return {
        "graph_cache": {**shared.statistics(), "fallbacks": fallbacks.rows()},
        "graph_store": None if shared.store is None else shared.store.statistics(),
        "deep_cache": {"last_run": deep_cache.last_run()},
    }


def register() -> None:
    """Add the routes to the running server; without one (nodes used as a library) do nothing."""
    from server import PromptServer

    instance = getattr(PromptServer, "instance", None)
    if instance is None:
        return
    from aiohttp import web

    @instance.routes.get("/accel/state")
    async def get_state(request):
        return web.json_response(state())
