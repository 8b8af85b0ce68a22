"""A headless ComfyUI on this machine, in a child process that ends when ours does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

_ENDS_WITH_US = """
import os, runpy, sys, threading

def wait():
    while os.read(0, 4096): pass  # holds no lock of Python, without which a script could not end by itself
    os._exit(1)

threading.Thread(target=wait, daemon=True).start()
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script until its standard input closes, which happens even if this process is killed."""

_ANSWER = aiohttp.ClientTimeout(total=60)
_SILENCE = 10.0
"""Seconds without a message before we ask whether the prompt is done."""


class Gone(Exception):
    """ComfyUI ended or does not answer; the message says what is known."""


class NotReached(Gone):
    """Nothing listens at the address, so ComfyUI never saw the request."""


async def ask(
    session: aiohttp.ClientSession,
    address: str,
    method: str,
    path: str,
    body: Any = None,
    raw: bytes | None = None,
    kind: str | None = None,
) -> tuple[int, bytes, str]:
    """(status, body, content type) of a ComfyUI's answer. Raises Gone, or NotReached.

    body: sent as JSON. raw, kind: the body and its content type, sent unchanged.
    """
    headers = {"Content-Type": kind} if kind else None
    try:
        async with session.request(
            method, address + path, json=body, data=raw, headers=headers, timeout=_ANSWER
        ) as answer:
            return answer.status, await answer.read(), answer.content_type
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        gone = NotReached if isinstance(error, aiohttp.ClientConnectorError) else Gone
        raise gone(f"ComfyUI does not answer: {type(error).__name__} {error}") from error


class ComfyUI:
    """A ComfyUI process that runs from the folder `tree` and writes to its own folder `work`.

    flags: further arguments of main.py. environment: variables in addition to this process's own.
    """

    def __init__(
        self,
        tree: Path,
        work: Path,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ):
        self.tree, self.work, self.flags = tree, work, flags
        self.made = {"output": work / "output", "temp": work / "temp"}
        """File type → the folder that files of this type are written to."""
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen | None = None
        self._session: aiohttp.ClientSession | None = None
        self.address = ""
        """Its URL, reachable from this machine only; set by `start`."""

    async def start(self, timeout: float) -> None:
        """Start it and wait until it answers. Raises Gone: it ended, or did not answer within `timeout` seconds."""
        self.work.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        arguments = [
            *("--listen", "127.0.0.1", "--port", str(port), "--disable-auto-launch"),
            # It adds "temp" to the folder that it is given for temporary files.
            *("--output-directory", str(self.made["output"]), "--temp-directory", str(self.work)),
            *("--database-url", f"sqlite:///{(self.work / 'comfyui.db').as_posix()}"),
        ]
        command = [sys.executable, "-c", _ENDS_WITH_US, str(self.tree / "main.py"), *arguments, *self.flags]
        with (self.work / "comfyui.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=self.tree, env=self._environment, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        self._session = aiohttp.ClientSession()
        end = time.monotonic() + timeout
        while True:
            try:
                await self.ask("GET", "/system_stats")
                return
            except Gone:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise Gone(f"ComfyUI did not start:\n{self.read_log()[-2000:]}") from None
                await asyncio.sleep(0.3)

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def read_log(self) -> str:
        return (self.work / "comfyui.log").read_text(encoding="utf-8", errors="replace")

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes, str]:
        """(status, body, content type). Raises Gone."""
        return await ask(self._session, self.address, method, path, body)

    async def state(self) -> dict[str, Any]:
        """This pack's `GET /accel/state`, without its table. Raises Gone, also if the pack is not installed there."""
        status, text, _ = await self.ask("GET", "/accel/state?rows=0")
        if status != 200:
            raise Gone(f"GET /accel/state answers {status}: this pack is not among ComfyUI's custom nodes")
        return json.loads(text)

    async def run(self, prompt_id: str, body: dict[str, Any]) -> AsyncGenerator[tuple[str, Any], None]:
        """Run a prompt and yield its events in order.

        ("sent", None) comes first: from then on ComfyUI may die of it. Then either ("refused", (status, answer)) alone;
        or ("accepted", answer), ("message", text or bytes) for each of ComfyUI's WebSocket messages about it, and
        finally ("history", its entry).

        prompt_id: also the WebSocket's client id, so each of several queued prompts receives its own messages.
        body: the body of POST /prompt; its "client_id" appears in the history.

        Raises Gone. Closing the iterator early removes or interrupts the prompt.
        """
        ended = False
        try:
            async with self._session.ws_connect(
                f"{self.address}/ws?clientId={prompt_id}", max_msg_size=0, heartbeat=None
            ) as messages:
                yield "sent", None
                status, text, _ = await self.ask(
                    "POST", "/prompt", {**body, "prompt_id": prompt_id, "client_id": prompt_id}
                )
                if status != 200:
                    ended = True
                    yield "refused", (status, _refusal(text))
                    return
                yield "accepted", json.loads(text)
                async for message in self._messages(prompt_id, messages):
                    yield "message", message
            entry = await self.history(prompt_id)
            if entry is None:
                raise Gone("ComfyUI knows nothing of a prompt that it has run")
            ended = True
            entry["prompt"][3]["client_id"] = body.get("client_id")
            yield "history", entry
        except (aiohttp.ClientError, OSError) as error:
            raise Gone(f"ComfyUI went away: {type(error).__name__} {error}") from error
        finally:
            if not ended and not self.ended:
                await self._take_back(prompt_id)

    async def _messages(self, prompt_id: str, socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[str | bytes]:
        """Yield the messages about the prompt, from its start to its end."""
        started = False
        while True:
            try:
                message = await socket.receive(timeout=_SILENCE)
            except asyncio.TimeoutError:
                if await self.history(prompt_id) is not None:
                    return
                continue
            if message.type is aiohttp.WSMsgType.BINARY:
                if started:
                    yield message.data
            elif message.type is aiohttp.WSMsgType.TEXT:
                kind, data = _event(message.data)
                if data.get("prompt_id") == prompt_id:
                    started = True
                    if kind == "executing" and data.get("node") is None:
                        return
                    yield message.data
                elif started and kind == "accel":  # sent to all, about what runs now
                    yield message.data
            else:
                raise Gone("ComfyUI closed the connection")

    async def history(self, prompt_id: str) -> dict[str, Any] | None:
        """The history entry of a finished prompt; None for any other. Raises Gone."""
        _, text, _ = await self.ask("GET", f"/history/{prompt_id}")
        return json.loads(text).get(prompt_id)

    async def _take_back(self, prompt_id: str) -> None:
        with contextlib.suppress(Gone):
            await self.ask("POST", "/queue", {"delete": [prompt_id]})
            await self.ask("POST", "/interrupt", {"prompt_id": prompt_id})

    async def stop(self) -> None:
        """End the process and remove its folder."""
        if self._session is not None:
            await self._session.close()
        if self._process is not None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, 10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
        shutil.rmtree(self.work, ignore_errors=True)


def _event(text: str) -> tuple[str | None, dict[str, Any]]:
    """A message's type and data; None and nothing for one of another form, since any node may send what it likes."""
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        event = None
    kind, data = (event.get("type"), event.get("data")) if isinstance(event, dict) else (None, None)
    return (kind, data) if isinstance(kind, str) and isinstance(data, dict) else (None, {})


def _refusal(text: bytes) -> dict[str, Any]:
    """ComfyUI's answer to a prompt it refuses; our own sentence where its validation crashed and gave no JSON."""
    with contextlib.suppress(ValueError):
        answer = json.loads(text)
        if isinstance(answer, dict):
            return answer
    message = f"ComfyUI cannot read the prompt: {text[:300].decode(errors='replace')}"
    return {"error": {"type": "refused", "message": message, "details": "", "extra_info": {}}, "node_errors": {}}
