"""What both fronts do with requests: how much of one is read, whose are refused, and how."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

LARGEST_BODY = 100 << 20
"""Bytes of a request, which is held in memory: ComfyUI's own default."""


class TooLarge(Exception):
    """A request has more than `LARGEST_BODY` bytes."""


def answering(answer: Callable) -> Callable:
    """The endpoint of a route: requests of another site's pages, and those that are too large, are refused."""

    async def endpoint(request: Request) -> Response:
        refuse = refuse_foreign_origin(request.headers)
        try:
            return refuse or await answer(request)
        except TooLarge:
            return refusal(f"A request may have {LARGEST_BODY >> 20} MB.", 413)

    return endpoint


async def read_body(request: Request) -> bytes:
    """Raises TooLarge, before more than that is in memory."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LARGEST_BODY:
            raise TooLarge
        parts.append(part)
    return b"".join(parts)


async def read_json(request: Request) -> Any:
    """The body, of whatever type it says to be: clients of ComfyUI name none, or any. None where it is no JSON.

    Raises TooLarge.
    """
    body = await read_body(request)
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def refusal(sentence: str, status: int = 400) -> Response:
    error = {"type": "refused", "message": sentence, "details": sentence, "extra_info": {}}
    return JSONResponse({"error": error, "node_errors": {}}, status)


def refuse_foreign_origin(headers: Any) -> Response | None:
    """A refusal for a request from another site's page in the visitor's browser."""
    origin = headers.get("origin")
    if origin is None or urlsplit(origin).netloc.lower() == headers.get("host", "").lower():
        return None
    return refusal("Requests from other sites' pages are refused.", 403)
