"""The front: ComfyUI's API over the replicas that Ray Serve keeps. It tracks prompts and holds no images."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import json
import logging
import random
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import ray
from ray import serve
from ray.exceptions import TaskUnschedulableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.schema import ApplicationStatus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from .comfyui_process import NotReached, ask
from .counts import MET, States
from .http import Json, answering, read_body, read_json, refusal, refuse_foreign_origin
from .results import PROMPT_ID, Results, failed, inside, last_messages, published
from .routing import routing_key
from .settings import Settings

log = logging.getLogger("ray.serve")

_RUNS = 2
"""Most attempts at a prompt or an upload: one more after a replica ended under it."""

_MOST_UNSEEN = 4
"""Most attempts at a prompt that no ComfyUI saw, since its replica had ended of something else."""

_PAUSE = 1.0
"""Seconds between them."""

_VALIDATED_WITHIN = 2.0
"""Seconds to wait for a replica's validation of a prompt before answering that it is accepted."""

_WATCH = 2.0
"""Seconds between checks whether the application is being deleted."""

_FOUND_WITHIN = 30.0
"""Seconds to wait for any replica before a question or an upload is answered with 503."""

_NEVER_REACHED = (NotReached, TaskUnschedulableError)
"""Errors that mean no ComfyUI saw the request, so none died of it."""

_MOST_HISTORY = 200

_OF_ANY_REPLICA = {
    "GET": ("object_info", "object_info/{rest:path}", "system_stats", "features", "embeddings", "models")
    + ("models/{rest:path}", "view_metadata/{rest:path}"),
    "POST": ("upload/image", "upload/mask"),
}
"""Routes of ComfyUI that any replica may answer."""

_SECRETS = ("auth_token_comfy_org", "api_key_comfy_org")
"""Entries of `extra_data` that only the ComfyUI running the prompt may see."""

_HELD = ("executed", "execution_success", "execution_error", "execution_interrupted")
"""Messages after which clients fetch results: they are held until the results are published."""


@dataclass(eq=False)
class Prompt:
    """A prompt without a published result.

    body: of POST /prompt. runs: attempts so far. seen: whether the latest reached a ComfyUI.
    replica: the one that has it, or had it last.
    accepted: ComfyUI's (status, answer) to it. told: whether the client has its answer to POST /prompt.
    """

    prompt_id: str
    body: dict[str, Any]
    key: str
    accepted: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    running: bool = False
    runs: int = 0
    seen: bool = False
    replica: str = ""
    stopped: bool = False
    told: bool = False
    response: DeploymentResponseGenerator | None = None
    task: asyncio.Task | None = None

    @property
    def client_id(self) -> str | None:
        return self.body["client_id"]

    def queued(self) -> list:
        """The prompt as an item of ComfyUI's queue, without secrets."""
        extra = {name: value for name, value in self.body.get("extra_data", {}).items() if name not in _SECRETS}
        if self.client_id is not None:
            extra["client_id"] = self.client_id
        return [self.body["number"], self.prompt_id, self.body["prompt"], extra, []]


@serve.ingress()
class Front:
    """Answers clients. There is one front, since a client's WebSocket and its prompts must meet."""

    def __init__(self, replicas: DeploymentHandle, given: dict[str, Any]):
        settings = Settings(**given)
        self._replicas = replicas
        self._by_graph = settings.route == "graph"
        self._results = Results(Path(settings.results))
        self._input = Path(settings.input) if settings.input else None
        self._prompts: dict[str, Prompt] = {}
        self._sockets: dict[str | None, WebSocket] = {}
        self._watching: asyncio.Task | None = None
        self._numbers = itertools.count(1)
        self._counts: Counter[str] = Counter()
        self._states = States(settings.replicas)

    def __serve_build_asgi_app__(self) -> Starlette:
        routes: list = []
        for path, method, answer in (
            ("prompt", "POST", self._post_prompt),
            ("prompt", "GET", self._get_prompt),
            ("queue", "GET", self._get_queue),
            ("queue", "POST", self._post_queue),
            ("interrupt", "POST", self._post_interrupt),
            ("history", "GET", self._get_history),
            ("history", "POST", self._post_history),
            ("history/{prompt_id}", "GET", self._get_history_of),
            ("view", "GET", self._view),
            ("accel/state", "GET", self._get_state),
            *((path, method, self._ask_any) for method, paths in _OF_ANY_REPLICA.items() for path in paths),
        ):
            for prefix in ("/", "/api/"):
                routes.append(Route(prefix + path, answering(answer), methods=[method]))
        routes += [WebSocketRoute(path, self._listen) for path in ("/ws", "/api/ws")]
        return Starlette(routes=routes)

    async def __del__(self) -> None:
        """Wait until running prompts are published; waiting ones are lost, as in a ComfyUI that ends."""
        for prompt in self._prompts.values():
            if not prompt.running:
                prompt.task.cancel()
        running = [prompt.task for prompt in self._prompts.values() if prompt.running and prompt.task]
        if running:
            await asyncio.wait(running)

    async def _post_prompt(self, request: Request) -> Response:
        body = await read_json(request)
        if not isinstance(body, dict) or not isinstance(body.get("prompt"), dict):
            error = {"type": "no_prompt", "message": "No prompt provided", "details": "No prompt provided"}
            return Json({"error": {**error, "extra_info": {}}, "node_errors": {}}, 400)
        if not isinstance(body.get("extra_data", {}), dict):
            return refusal("extra_data must be an object.")
        prompt_id = str(body.get("prompt_id") or uuid.uuid4())
        if not PROMPT_ID.fullmatch(prompt_id):
            return refusal("prompt_id must be 1 to 64 letters, digits, - or _.")
        if prompt_id in self._prompts or self._results.entry(prompt_id) is not None:
            return refusal(f"There is a prompt {prompt_id} already.", 409)
        known = {name: body[name] for name in ("prompt", "extra_data", "partial_execution_targets") if name in body}
        known["client_id"] = body["client_id"] if isinstance(body.get("client_id"), str) else None
        known["number"] = next(self._numbers)
        prompt = Prompt(prompt_id, known, routing_key(body["prompt"]))
        nobody_waits = all(other.accepted.done() for other in self._prompts.values())
        self._prompts[prompt_id] = prompt
        # In a context of its own: a request that is given up takes back the calls that were made for it.
        prompt.task = contextvars.Context().run(asyncio.create_task, self._follow(prompt))
        await self._tell_status()
        if nobody_waits:
            await asyncio.wait({prompt.accepted}, timeout=_VALIDATED_WITHIN)
        prompt.told = True
        status, answer = prompt.accepted.result() if prompt.accepted.done() else (200, {})
        if status == 200:
            answer = {"node_errors": {}, **answer, "prompt_id": prompt_id, "number": known["number"]}
        return Json(answer, status)

    async def _follow(self, prompt: Prompt) -> None:
        """Run the prompt, once more if its replica ended, and publish a result either way."""
        reason, unseen = "The prompt was taken back.", 0
        try:
            while prompt.runs < _RUNS and not prompt.stopped:
                prompt.runs += 1
                self._counts["runs"] += 1
                try:
                    if await self._run(prompt):
                        return
                    reason = "No replica finished the prompt."
                except Exception as error:
                    # Serve and Ray have a dozen exceptions for a replica that ended; all mean that it did not answer.
                    log.warning("prompt %s, run %d: %s: %s", prompt.prompt_id, prompt.runs, type(error).__name__, error)
                    if not prompt.stopped:
                        self._states.forget(prompt.replica)
                    if not prompt.seen and unseen < _MOST_UNSEEN:  # the replica ended of something else
                        unseen, prompt.runs = unseen + 1, prompt.runs - 1
                        await asyncio.sleep(_PAUSE)
                    when = "while" if prompt.seen else "before"
                    ended = prompt.runs + unseen
                    reason = f"{ended} replicas ended, the last one {when} it ran the prompt, with: {error}"
                prompt.running = False
            if prompt.stopped:
                reason = "The prompt was interrupted."
            self._counts["interrupted" if prompt.stopped else "failed"] += 1
            await self._fail(prompt, reason)
        except asyncio.CancelledError:
            if prompt.response is not None:
                prompt.response.cancel()
            self._counts["taken_back"] += 1
        finally:
            if not prompt.accepted.done():
                prompt.accepted.set_result((200, {}))
            await self._end(prompt)

    async def _run(self, prompt: Prompt) -> bool:
        """Run the prompt once; whether it has a result. Raises Ray's error if the replica ended."""
        handle = self._replicas.options(stream=True, multiplexed_model_id=prompt.key if self._by_graph else "")
        prompt.response, prompt.seen = handle.run.remote(prompt.prompt_id, prompt.key, prompt.body), False
        held: list[dict[str, Any]] = []
        async for kind, value in prompt.response:
            prompt.seen |= kind != "replica"
            if kind == "sent":
                continue
            if kind == "refused":
                await self._refuse(prompt, *value)
                return True
            if kind == "accepted":
                if not prompt.accepted.done():
                    prompt.accepted.set_result((200, value))
                await self._tell_status()
            elif kind == "replica":
                prompt.replica = value["replica"]
                self._states.heard(value)
            elif kind == "message":
                prompt.running = True  # ComfyUI tells nothing of a prompt that waits in its own queue
                event = to_hold(value, prompt.prompt_id) if isinstance(value, str) else None
                if event is not None:
                    held.append(event)
                else:
                    await self._tell(prompt.client_id, value)
            else:
                self._counts.update(("answered", MET[value["met"]]))
                if "replica" in value:
                    self._states.heard(value["replica"])
                said = last_messages(value["entry"])
                # Not all came if an earlier run was published, or if ComfyUI fell silent near the end of this one.
                await self._end(prompt, *(held if said[-1] in held else said))
                return True
        return False

    async def _refuse(self, prompt: Prompt, status: int, answer: dict[str, Any]) -> None:
        """Pass ComfyUI's refusal to the client, or into the history if the prompt was already accepted."""
        self._counts["refused"] += 1
        if not prompt.told:
            prompt.accepted.set_result((status, answer))
            return
        error = answer.get("error") or {}
        await self._fail(prompt, str(error.get("message", error)), node_errors=answer.get("node_errors", {}))

    async def _fail(self, prompt: Prompt, reason: str, **details: Any) -> None:
        kind = "execution_interrupted" if prompt.stopped else "execution_error"
        entry = failed(kind, prompt.queued(), exception_message=reason, exception_type="Fleet", traceback=[], **details)
        with contextlib.suppress(OSError):  # without a history its client still hears of the end
            entry = await asyncio.to_thread(self._results.publish, prompt.prompt_id, entry, {})
        await self._end(prompt, *last_messages(entry))

    async def _end(self, prompt: Prompt, *messages: dict[str, Any]) -> None:
        """Forget a prompt whose result is published, once, and notify its client, which then asks for the history."""
        if self._prompts.pop(prompt.prompt_id, None) is None:
            return
        last = {"type": "executing", "data": {"node": None, "display_node": None, "prompt_id": prompt.prompt_id}}
        for message in (*messages, last):
            await self._tell(prompt.client_id, json.dumps(message))
        await self._tell_status()

    async def _get_prompt(self, request: Request) -> Response:
        return Json(self._exec_info())

    async def _get_queue(self, request: Request) -> Response:
        lists: dict[bool, list] = {True: [], False: []}
        for prompt in self._prompts.values():
            lists[prompt.running].append(prompt.queued())
        return Json({"queue_running": lists[True], "queue_pending": lists[False]})

    async def _post_queue(self, request: Request) -> Response:
        body = await read_json(request)
        if not isinstance(body, dict):
            return refusal('Send {"clear": true}, or {"delete": [prompt ids]}.')
        for prompt in list(self._prompts.values()):
            if not prompt.running and (body.get("clear") or prompt.prompt_id in ids_to_delete(body)):
                prompt.task.cancel()
        return Response()

    async def _post_interrupt(self, request: Request) -> Response:
        body = await read_json(request)
        prompt_id = body.get("prompt_id") if isinstance(body, dict) else None
        if prompt_id is None:
            return refusal("Name the prompt_id: others have prompts running here too.")
        prompt = self._prompts.get(prompt_id) if isinstance(prompt_id, str) else None
        if prompt is not None and prompt.running:
            prompt.stopped = True
            prompt.response.cancel()
        return Response()

    async def _get_history(self, request: Request) -> Response:
        given = request.query_params.get("max_items", "")
        # Of long numbers the length is enough, and Python reads none of more than 4300 digits.
        count = min(int(given), _MOST_HISTORY) if given.isdecimal() and len(given) < 10 else _MOST_HISTORY

        def read() -> dict[str, Any]:
            entries = {prompt_id: self._results.entry(prompt_id) for prompt_id in self._results.latest(count)}
            return {prompt_id: entry for prompt_id, entry in entries.items() if entry is not None}

        return Json(await asyncio.to_thread(read))

    async def _get_history_of(self, request: Request) -> Response:
        prompt_id = request.path_params["prompt_id"]
        # Of one that is not answered yet nothing is known, as in ComfyUI, though its files may be there.
        entry = None if prompt_id in self._prompts else self._results.entry(prompt_id)
        return Json({} if entry is None else {prompt_id: entry})

    async def _post_history(self, request: Request) -> Response:
        body = await read_json(request)
        if not isinstance(body, dict) or body.get("clear"):
            return refusal('Send {"delete": [prompt ids]}: the history of all is not cleared at once.')
        for prompt_id in ids_to_delete(body):
            await asyncio.to_thread(self._results.remove, prompt_id)
        return Response()

    async def _view(self, request: Request) -> Response:
        asked = request.query_params
        kind, names = asked.get("type", "output"), (asked.get("subfolder", ""), asked.get("filename", ""))
        if kind == "input" and self._input is None:
            return await self._ask_any(request)
        path = inside(self._input, *names) if kind == "input" else self._results.file(kind, *names)  # type: ignore[arg-type]  # None: above
        if path is None:
            return Response(status_code=404)
        # As ComfyUI does: a page that somebody made must not run in the visitor's browser.
        page = path.suffix.lower() in (".html", ".htm", ".js", ".css", ".svg", ".xml", ".xhtml")
        kind, shown = ("application/octet-stream", "attachment") if page else (None, "inline")
        return FileResponse(path, media_type=kind, filename=path.name, content_disposition_type=shown)

    async def _get_state(self, request: Request) -> Response:
        """The front's counters, and each replica's state as of its last prompt."""
        waiting = sum(not prompt.running for prompt in self._prompts.values())
        counts = {**self._counts, "waiting": waiting, "running": len(self._prompts) - waiting}
        running = Counter(prompt.replica for prompt in self._prompts.values() if prompt.running)
        replicas = [{**state, "running": running[state["replica"]]} for state in self._states.known]
        return Json({"prompts": counts, "replicas": replicas})

    async def _ask_any(self, request: Request) -> Response:
        path = path_of_any(request.scope["path"])
        if path is None:
            return Response(status_code=404)
        path += f"?{request.url.query}" if request.url.query else ""
        raw = await read_body(request) if request.method == "POST" else None
        asked = (request.method, path, raw, request.headers.get("content-type"))
        reached = 0
        for _ in range(_RUNS + self._states.most):
            try:
                replica = await asyncio.wait_for(self._any(), _FOUND_WITHIN)
            except Exception as error:  # Ray's, or the time is over
                log.warning("%s: %s: %s", path, type(error).__name__, error)
                break
            try:
                return await self._ask(replica, *asked)
            except Exception as error:  # Ray's, or `Gone`: it ended, and nobody has said so yet
                log.warning("%s: %s: %s", path, type(error).__name__, error)
                self._states.forget(replica["replica"])
                reached += not isinstance(error, _NEVER_REACHED)
            if reached == _RUNS:
                return refusal(f"{_RUNS} ComfyUIs ended, or did not answer, when they were asked this.", 502)
        return refusal("No ComfyUI answers. Try again later.", 503)

    async def _any(self) -> dict[str, Any]:
        """A replica whose address is known."""
        while self._prompts and not self._states.known:
            await asyncio.sleep(0.05)  # the one that takes a prompt will
        if not self._states.known:
            self._states.heard(await self._replicas.state.remote())
        return random.choice(self._states.known)

    async def _ask(self, replica: dict[str, Any], *asked: Any) -> Response:
        """Its ComfyUI's answer, through a task on its machine: through Serve it would wait for running prompts."""
        there = NodeAffinitySchedulingStrategy(replica["node"], soft=False)
        status, text, kind = await _ask_here.options(scheduling_strategy=there).remote(replica["address"], *asked)
        return Response(text, status, media_type=kind)

    async def _listen(self, socket: WebSocket) -> None:
        if refuse_foreign_origin(socket.headers):
            await socket.close()
            return
        await socket.accept()
        client_id = socket.query_params.get("clientId") or uuid.uuid4().hex
        self._sockets[client_id] = socket
        if self._watching is None or self._watching.done():
            self._watching = contextvars.Context().run(asyncio.create_task, self._watch())
        try:
            await self._tell(client_id, json.dumps(self._status(sid=client_id)))
            while True:
                await socket.receive_text()
        except (WebSocketDisconnect, RuntimeError, KeyError):
            pass
        finally:
            if self._sockets.get(client_id) is socket:
                del self._sockets[client_id]

    async def _watch(self) -> None:
        """Close all WebSockets once the application is being deleted and running prompts are finished.

        Serve does not notify us before all requests have ended, and a WebSocket never ends by itself.
        """
        name = serve.get_replica_context().app_name
        while self._sockets:
            await asyncio.sleep(_WATCH)
            try:
                app = (await asyncio.to_thread(serve.status)).applications.get(name)
            except Exception:  # of Ray's, such as while Serve's controller is started again
                continue
            is_ending = app is None or app.status == ApplicationStatus.DELETING
            if is_ending and not any(prompt.running for prompt in self._prompts.values()):
                for socket in list(self._sockets.values()):
                    with contextlib.suppress(Exception):  # as in `_tell`
                        await socket.close(1001)

    async def _tell(self, client_id: str | None, message: str | bytes) -> None:
        socket = self._sockets.get(client_id)
        if socket is None:
            return
        try:
            await (socket.send_bytes(message) if isinstance(message, bytes) else socket.send_text(message))
        except Exception:  # whatever the server raises for a client that has left: the prompt goes on without it
            self._sockets.pop(client_id, None)

    async def _tell_status(self) -> None:
        for client_id in list(self._sockets):
            await self._tell(client_id, json.dumps(self._status()))

    def _status(self, **more: str) -> dict[str, Any]:
        return {"type": "status", "data": {"status": self._exec_info(), **more}}

    def _exec_info(self) -> dict[str, Any]:
        return {"exec_info": {"queue_remaining": len(self._prompts)}}


@ray.remote(num_cpus=0, max_retries=0)
def _ask_here(address: str, method: str, path: str, raw: bytes | None, kind: str | None) -> tuple[int, bytes, str]:
    async def answer() -> tuple[int, bytes, str]:
        async with aiohttp.ClientSession() as session:
            return await ask(session, address, method, path, raw=raw, kind=kind)

    return asyncio.run(answer())


def to_hold(message: str, prompt_id: str) -> dict[str, Any] | None:
    """The message with its files' published paths, if it must wait for publication; None for any other."""
    event = json.loads(message)
    if event["type"] == "executed":
        event["data"]["output"] = published(event["data"].get("output"), prompt_id)
    return event if event["type"] in _HELD else None


def path_of_any(path: str) -> str | None:
    """The request's path for a replica's ComfyUI, quoted; None if it leads out of `_OF_ANY_REPLICA`."""
    return None if ".." in path.split("/") else quote(path.removeprefix("/api"))


def ids_to_delete(body: dict[str, Any]) -> list[str]:
    asked = body.get("delete")
    return [prompt_id for prompt_id in asked if isinstance(prompt_id, str)] if isinstance(asked, list) else []
