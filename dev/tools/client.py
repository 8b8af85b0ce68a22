"""Talks to a running ComfyUI: queues API-format prompts, follows them over the WebSocket, fetches their images."""

import asyncio
import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from dev import Problem

Graph = dict[str, dict[str, Any]]
"""An API-format prompt: node id → {"class_type": ..., "inputs": ...}."""


class PromptRefused(Problem):
    """Validation failed. `node_errors` is the server's answer: node id → {"class_type", "errors", ...}."""

    def __init__(self, error: dict, node_errors: dict):
        self.error, self.node_errors = error, node_errors
        reasons = [
            f"{node['class_type']}: {reason['message']} ({reason['details']})"
            for node in node_errors.values()
            for reason in node["errors"]
        ]
        super().__init__("ComfyUI refused the prompt: " + ("; ".join(reasons) or error.get("message", str(error))))


class PromptFailed(Problem):
    """A node raised. `details` is the server's `execution_error` message."""

    def __init__(self, details: dict):
        self.details = details
        super().__init__(f"{details['node_type']} failed: {details['exception_message'].strip()}")


class PromptInterrupted(Problem):
    """Somebody interrupted the prompt while it ran."""


@dataclass
class Result:
    """What a prompt gave. `seconds` runs from its start to its end on the server, waiting in the queue excluded."""

    prompt_id: str
    seconds: float
    outputs: dict[str, dict] = field(default_factory=dict)
    """Node id → what the node reported to the page, such as {"images": [...]}."""
    images: list[bytes] = field(default_factory=list)
    """The saved images' files, in order."""


class Client:
    """One visitor of the server at `url`, such as "http://127.0.0.1:8188"."""

    def __init__(self, url: str):
        self.url = url
        self.client_id = uuid.uuid4().hex

    def get(self, path: str) -> Any:
        """The JSON that `GET path` answers."""
        return json.loads(self._request(path))

    def post(self, path: str, body: Any = None) -> Any:
        """The JSON that `POST path` answers to the JSON `body`; None for an empty answer."""
        answer = self._request(path, json.dumps({} if body is None else body).encode())
        return json.loads(answer) if answer else None

    def interrupt(self) -> None:
        """Stop the prompt that runs now. May be called from `on_event`."""
        self.post("/interrupt")

    def image(self, saved: dict) -> bytes:
        """The file behind an entry of a result's "images"."""
        return self._request("/view?" + urllib.parse.urlencode(saved))

    def run(
        self, graph: Graph, on_event: Callable[[str, dict], None] | None = None, timeout: float | None = None
    ) -> Result:
        """Queue `graph` and wait for its end.

        Args:
            on_event: called with the type and data of every message about this prompt, such as
                ("progress", {"value": 3, "max": 8, "node": "3", ...}).
            timeout: seconds, after which the prompt is interrupted; None waits as long as it takes.

        Raises:
            PromptRefused, PromptFailed, PromptInterrupted: as named.
            Problem: the server went away or the time is up.
        """
        try:
            result = asyncio.run(asyncio.wait_for(self._follow(graph, on_event), timeout))
        except asyncio.TimeoutError:
            self.interrupt()
            raise Problem(f"The prompt was not done after {timeout:.0f} s.") from None
        except aiohttp.ClientError as error:
            raise Problem(f"The server at {self.url} went away: {error}.") from None
        result.images = [self.image(saved) for out in result.outputs.values() for saved in out.get("images", [])]
        return result

    async def _follow(self, graph: Graph, on_event: Callable[[str, dict], None] | None) -> Result:
        socket = f"{self.url}/ws?clientId={self.client_id}"
        async with aiohttp.ClientSession() as session, session.ws_connect(socket, max_msg_size=0) as messages:
            async with session.post(
                f"{self.url}/prompt", json={"prompt": graph, "client_id": self.client_id}
            ) as response:
                answer = await response.json(content_type=None)
            if response.status != 200:
                raise PromptRefused(answer.get("error", {}), answer.get("node_errors", {}))
            result = Result(answer["prompt_id"], 0.0)
            started = time.perf_counter()
            async for message in messages:
                if message.type is not aiohttp.WSMsgType.TEXT:  # Previews are binary.
                    continue
                event = json.loads(message.data)
                kind, data = event["type"], event["data"]
                if data.get("prompt_id") != result.prompt_id:
                    continue
                if on_event:
                    on_event(kind, data)
                if kind == "execution_start":
                    started = time.perf_counter()
                elif kind == "executed":
                    result.outputs[data["node"]] = data["output"] or {}
                elif kind == "execution_error":
                    raise PromptFailed(data)
                elif kind == "execution_interrupted":
                    raise PromptInterrupted("The prompt was interrupted.")
                elif kind == "execution_success":
                    result.seconds = time.perf_counter() - started
                    return result
        raise Problem(f"The server at {self.url} closed the connection before the prompt was done.")

    def _request(self, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.url + path, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            raise Problem(f"{self.url}{path} answered {error.code} {error.reason}.") from None
        except OSError as error:
            raise Problem(f"The server at {self.url} does not answer: {error}.") from None
