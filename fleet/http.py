"""HTTP shared by both fronts: limits on requests, refusals, and JSON that every client can read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

LARGEST_BODY = 100 << 20
"""Most bytes of a request, which is held in memory. ComfyUI's default."""

DEEPEST = 100
"""Most levels of nesting in a request: far more than workflows have, and few enough to serialize again."""


class Json(JSONResponse):
    """JSON that every client can read, whatever a prompt holds: NaN and infinities become null, all text is ASCII."""

    def render(self, content: Any) -> bytes:
        try:
            return json.dumps(content, allow_nan=False).encode()
        except ValueError:
            return json.dumps(json.loads(json.dumps(content), parse_constant=lambda name: None)).encode()


class TooLarge(Exception):
    """A request has more than `LARGEST_BODY` bytes."""


def answering(answer: Callable) -> Callable:
    """A route's endpoint that refuses requests from other sites' pages and requests that are too large."""

    async def endpoint(request: Request) -> Response:
        refuse = refuse_foreign_origin(request.headers)
        try:
            return refuse or await answer(request)
        except TooLarge:
            return refusal(f"A request may have {LARGEST_BODY >> 20} MB.", 413)

    return endpoint


async def read_body(request: Request) -> bytes:
    """The request's body. Raises TooLarge before more than `LARGEST_BODY` is in memory."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LARGEST_BODY:
            raise TooLarge
        parts.append(part)
    return b"".join(parts)


async def read_json(request: Request) -> Any:
    """The body as JSON, whatever type its header names. None if it is no JSON, or nested deeper than `DEEPEST`.

    Raises TooLarge.
    """
    body = await read_body(request)
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return asked if _depth(asked) <= DEEPEST else None


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def refusal(sentence: str, status: int = 400) -> Response:
    error = {"type": "refused", "message": sentence, "details": sentence, "extra_info": {}}
    return Json({"error": error, "node_errors": {}}, status)


def refuse_foreign_origin(headers: Any) -> Response | None:
    """A refusal for a request from another site's page in the visitor's browser."""
    origin = headers.get("origin")
    ours = origin is None or origin.lower().partition("://")[2] == headers.get("host", "").lower()
    if ours and headers.get("sec-fetch-site") != "cross-site":  # links, images and forms may send no origin
        return None
    return refusal("Requests from other sites' pages are refused.", 403)
