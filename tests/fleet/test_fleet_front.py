"""What a fleet's front does with requests, around made-up replicas; its prompts run in test_fleet_router.py."""

import asyncio
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve.request_router", reason="an optional package of 200 MB")

# ruff: noqa: E402
from starlette.responses import Response

from fleet import front as fleet_front
from fleet import http as fleet_http
from fleet.comfyui_process import Gone, NotReached
from fleet.results import Results

GRAPH = {"1": {"class_type": "A", "inputs": {}}}

SUCCESS = {"prompt_id": "id", "timestamp": 5}
IMAGE = {"filename": "a.png", "subfolder": "id", "type": "output"}
ENTRY = {
    **{"prompt": [1, "id"], "outputs": {"1.0.2": {"images": [IMAGE]}}, "meta": {"1.0.2": {"display_node": "1"}}},
    "status": {"messages": [["execution_success", SUCCESS]]},
}
DONE, ENDED = ("done", {"met": None, "entry": ENTRY}), None
"""What a run says last; the second is no pair, so it raises, as the run of a replica that ended does."""


def message(kind, **data):
    return "message", json.dumps({"type": kind, "data": data})


def started(prompt_id):
    return message("execution_start", prompt_id=prompt_id)


class Run(asyncio.Queue):
    """What a replica tells of one prompt: the front waits for each event until the test says it."""

    is_cancelled = False
    __anext__ = asyncio.Queue.get

    def __aiter__(self):
        return self

    def cancel(self):
        self.is_cancelled = True


class Fleet:
    """A front without Serve. asked: what it asked of any replica; runs: of its prompts, by id; silent: no state; heard:
    by the client "page"."""

    def __init__(self, results):
        self.asked, self.runs, self.silent, self.heard = [], {}, False, []
        # Below the class that Serve makes of it, whose constructor belongs to a running Serve.
        plain = [kind for kind in fleet_front.Front.__mro__ if kind.__module__ == fleet_front.__name__][-1]
        alone = {"__del__": lambda front: None, "_ask": staticmethod(self._ask)}
        self.front = type("Alone", (plain,), alone)(self, {"results": str(results), "replicas": 2})
        self.front._sockets["page"] = self
        self._app = self.front.__serve_build_asgi_app__()
        self.state, self.run = SimpleNamespace(remote=self._state), SimpleNamespace(remote=self._run)

    def options(self, **options):
        return self

    async def _ask(self, replica, method, path, raw, kind):
        if replica["replica"] == "ended":
            raise NotReached("ComfyUI does not answer")
        self.asked.append((method, path, raw))
        if raw == b"kills":
            raise Gone("ComfyUI does not answer")
        return Response(b"{}")

    async def _state(self):
        """Through Serve, so it waits until a replica has room."""
        while self.front._prompts:
            await asyncio.sleep(0)
        if self.silent:
            raise Gone("ComfyUI does not answer")
        return {"replica": "a"}

    def _run(self, prompt_id, key, body):
        self.runs[prompt_id] = Run()
        return self.runs[prompt_id]

    async def post(self, prompt_id="id", *said, **more):
        """A task that posts a prompt, once its run has begun and was told what is `said`. more: of the body."""
        body = json.dumps({"prompt": GRAPH, "prompt_id": prompt_id, **more}).encode()
        posting = asyncio.create_task(self.request("POST", "/prompt", body))
        await self.begun(prompt_id)
        self.tell(prompt_id, *said)
        return posting

    async def begun(self, prompt_id="id"):
        """Its run, as soon as it has one."""
        while prompt_id not in self.runs:
            await asyncio.sleep(0)
        return self.runs[prompt_id]

    def tell(self, prompt_id, *events):
        """Let the prompt's run say these."""
        for event in events:
            self.runs[prompt_id].put_nowait(event)

    async def let_run_say(self, *events):
        """Wait until the only prompt's next run begins, and let it say these."""
        await self.begun()
        self.tell("id", *events)
        del self.runs["id"]

    async def send_text(self, text):
        self.heard.append(json.loads(text))

    async def close(self, code):
        self.heard.append(code)
        self.front._sockets.clear()

    async def idle(self):
        """No prompt is left."""
        while self.front._prompts:
            await asyncio.sleep(0.01)

    async def told(self):
        """What the front says of its replicas and prompts."""
        return json.loads((await self.front._get_state(None)).body)

    async def request(self, method, path, body=b"", parts=1, query=b"", headers=()):
        """(status, JSON or None) of the answer. path: decoded, as servers give it. parts: how often the body comes."""
        given = [{"type": "http.request", "body": body, "more_body": at < parts - 1} for at in range(parts)]
        answer = []

        async def receive():
            return given.pop(0) if given else await asyncio.Event().wait()

        async def send(message):
            answer.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": query, "root_path": ""}
        scope["headers"] = list(headers)
        await self._app(scope, receive, send)
        text = b"".join(message.get("body", b"") for message in answer[1:])
        return answer[0]["status"], json.loads(text) if text.startswith(b"{") else None


@pytest.fixture
def fleet(tmp_path):
    return Fleet(tmp_path)


@pytest.mark.parametrize("path", ["/models/../manager/reboot", "/api/object_info/../history", "/view_metadata/a/.."])
async def test_path_that_leads_to_another_route_is_not_asked(fleet, path):
    assert await fleet.request("GET", path) == (404, None) and fleet.asked == []


@pytest.mark.parametrize(
    ("path", "query", "asked"),
    [
        ("/api/object_info/Some node?", b"", "/object_info/Some%20node%3F"),
        ("/models/%2e%2e/manager", b"", "/models/%252e%252e/manager"),
        # An image to start from, where the replicas share no folder.
        ("/view", b"type=input&filename=a.png", "/view?type=input&filename=a.png"),
    ],
)
async def test_path_is_quoted_again_for_the_replica(fleet, path, query, asked):
    assert await fleet.request("GET", path, query=query) == (200, {})
    assert fleet.asked == [("GET", asked, None)]


@pytest.mark.parametrize("said", [(), ("ended",), ("ended", "a")], ids=["nothing", "one that ended", "two"])
async def test_upload_waits_for_no_prompt(fleet, said):
    """said: replicas that were heard of before; the prompt says of its own when it begins."""
    for name in said:
        fleet.front._states.heard({"replica": name})
    posting = await fleet.post()
    uploading = asyncio.create_task(fleet.request("POST", "/upload/image", b"image"))
    fleet.tell("id", ("replica", {"replica": "a"}), ("accepted", {}))
    await posting
    assert await asyncio.wait_for(uploading, 10) == (200, {})
    assert fleet.asked == [("POST", "/upload/image", b"image")]
    fleet.tell("id", DONE)


@pytest.mark.parametrize("path", ["/upload/image", "/prompt"])
async def test_request_is_read_up_to_a_limit(fleet, monkeypatch, path):
    monkeypatch.setattr(fleet_http, "LARGEST_BODY", 100)
    assert (await fleet.request("POST", path, b" " * 60, parts=2))[0] == 413 and fleet.asked == []


NESTED = {"1": {"class_type": "A", "inputs": {"x": json.loads("[" * 300 + "]" * 300)}}}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/prompt", {"prompt": GRAPH, "extra_data": "text"}, 400),
        ("/prompt", {"prompt": NESTED}, 400),  # deeper than it can be shown again
        ("/queue", {"delete": None}, 200),
        ("/history", {"delete": 5}, 200),
        ("/interrupt", {"prompt_id": ["id"]}, 200),
    ],
)
async def test_value_of_another_type_or_depth_breaks_nothing(fleet, path, body, status):
    assert (await fleet.request("POST", path, json.dumps(body).encode()))[0] == status and fleet.runs == {}


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"', '{"\\ud800": [NaN]}'])
async def test_value_that_json_has_no_word_for_leaves_queue_and_history_readable(fleet, tmp_path, value):
    asked = '{"prompt": {"1": {"class_type": "A", "inputs": {"x": VALUE}}}, "prompt_id": "id"}'
    posting = asyncio.create_task(fleet.request("POST", "/prompt", asked.replace("VALUE", value).encode()))
    (await fleet.begun()).put_nowait(("accepted", {}))
    assert (await posting)[0] == 200
    queued, queue = await fleet.request("GET", "/queue")
    entry = {"prompt": fleet.front._prompts["id"].queued(), "outputs": {"1": {"text": [json.loads(value)]}}}
    Results(tmp_path).publish("id", entry, {})
    fleet.tell("id", DONE)
    await fleet.idle()
    (listed, history), (shown, one) = [await fleet.request("GET", path) for path in ("/history", "/history/id")]
    assert queued == listed == shown == 200 and history == one
    read = one["id"]["outputs"]["1"]["text"][0]
    assert queue["queue_pending"][0][2]["1"]["inputs"]["x"] == read
    assert read == json.loads(value, parse_constant=lambda name: None) or read is None and value == "1e999"


@pytest.mark.parametrize(("method", "path"), [("GET", "/object_info"), ("POST", "/upload/image")])
async def test_question_is_answered_in_words_while_no_replica_tells_its_state(fleet, method, path):
    fleet.silent = True
    status, answer = await fleet.request(method, path, b"image")
    assert status == 503 and answer["error"]["message"].startswith("No ComfyUI answers.")


async def test_upload_that_ends_comfyuis_is_tried_on_one_other_at_most(fleet):
    fleet.front._states.most = 4
    for name in ("a", "b", "c", "ended"):
        fleet.front._states.heard({"replica": name})
    status, answer = await fleet.request("POST", "/upload/image", b"kills")
    assert status == 502 and "2 ComfyUIs ended" in answer["error"]["message"]
    assert len(fleet.asked) == 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site", "host": "fleet:8000", "origin": "http://fleet:8000"}, 403),
        ({"host": "fleet:8000", "origin": "http://other"}, 403),
        ({"host": "fleet:8000", "origin": "http://["}, 403),
        ({"host": "fleet:8000", "origin": "null"}, 403),
        ({"sec-fetch-site": "same-origin", "host": "fleet:8000", "origin": "http://fleet:8000"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({}, 200),
    ],
)
async def test_request_of_another_sites_page_is_refused(fleet, headers, status):
    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert (await fleet.request("GET", "/queue", headers=given))[0] == status


async def test_prompt_is_pending_and_may_be_deleted_until_its_replica_has_begun_it(fleet):
    for prompt_id in ("runs", "waits"):
        posting = await fleet.post(prompt_id, ("accepted", {}))
        assert (await posting)[0] == 200
    fleet.tell("runs", started("runs"))
    await asyncio.sleep(0.01)
    _, queue = await fleet.request("GET", "/queue")
    await fleet.request("POST", "/queue", json.dumps({"delete": ["runs", "waits"]}).encode())
    await asyncio.sleep(0.01)
    fleet.tell("runs", DONE)
    assert [item[1] for item in queue["queue_running"]] == ["runs"]
    assert [item[1] for item in queue["queue_pending"]] == ["waits"]
    assert {prompt_id: run.is_cancelled for prompt_id, run in fleet.runs.items()} == {"runs": False, "waits": True}


async def test_replica_that_ended_under_a_prompt_has_no_state(fleet):
    posting = await fleet.post()
    for replica, ends in (("a", ENDED), ("b", DONE)):
        await fleet.let_run_say(("replica", {"replica": replica, "pid": 1}), ("accepted", {}), ends)
    await posting
    await asyncio.sleep(0.01)
    state = await fleet.told()
    assert [replica["replica"] for replica in state["replicas"]] == ["b"]
    assert state["prompts"]["runs"] == 2 and state["prompts"]["answered"] == 1


@pytest.mark.parametrize(("ended", "is_answered"), [(4, True), (5, True), (6, False)])
async def test_prompt_is_not_blamed_for_replicas_that_ended_before_they_saw_it(fleet, monkeypatch, ended, is_answered):
    """Of the attempts that count, it has two all the same."""
    monkeypatch.setattr("fleet.front._PAUSE", 0)

    async def answer_runs():
        for number in range(ended + 1):
            said = [("sent", None), ("accepted", {}), DONE] if number == ended else [ENDED]
            await fleet.let_run_say(("replica", {"replica": str(number), "pid": 1}), *said)

    posting = await fleet.post()
    answering = asyncio.create_task(answer_runs())
    await posting
    await fleet.idle()
    answering.cancel()
    prompts = (await fleet.told())["prompts"]
    assert (prompts.get("answered", 0), prompts.get("failed", 0)) == (is_answered, not is_answered)


async def test_prompt_that_is_interrupted_has_a_history_and_its_replica_a_state(fleet):
    await (await fleet.post("id", ("replica", {"replica": "a", "pid": 1}), ("accepted", {})))
    fleet.tell("id", started("id"))
    await asyncio.sleep(0.01)
    await fleet.request("POST", "/interrupt", json.dumps({"prompt_id": "id"}).encode())
    assert fleet.runs["id"].is_cancelled
    fleet.tell("id", ENDED)  # as a run that was cancelled does
    await fleet.idle()
    _, history = await fleet.request("GET", "/history/id")
    state = await fleet.told()
    assert history["id"]["status"]["messages"][-1][0] == "execution_interrupted"
    assert [replica["replica"] for replica in state["replicas"]] == ["a"]
    assert state["prompts"]["interrupted"] == 1 and state["prompts"]["runs"] == 1


MADE = {"node": "1.0.2", "display_node": "1", "output": {"images": [{**IMAGE, "subfolder": ""}]}, "prompt_id": "id"}
SAVED, ENDS = message("executed", **MADE), message("execution_success", **SUCCESS)


@pytest.mark.parametrize(
    "runs",
    [
        [[SAVED, ENDS, DONE]],
        [[SAVED, ENDS, ENDED], [DONE]],
        [[SAVED, DONE]],
        [[SAVED, message("execution_success", prompt_id="id", timestamp=6), DONE]],
    ],
    ids=["all", "published, then ended", "silent at the end", "published by another run"],
)
async def test_client_hears_once_of_each_output_and_of_the_end_whichever_run_said_so(fleet, runs):
    """A client that waits for `execution_success` would otherwise wait for ever."""
    posting = await fleet.post("id", client_id="page")
    for events in runs:
        await fleet.let_run_say(*events)
    await posting
    await fleet.idle()
    *_, made, success, end, _ = fleet.heard
    assert (made["type"], made["data"]) == ("executed", {**MADE, "output": {"images": [IMAGE]}})
    assert (success["type"], success["data"]) == ("execution_success", SUCCESS) and end["data"]["node"] is None
    assert sum(event["type"].startswith("exec") for event in fleet.heard) == 3


async def test_client_hears_of_a_failure_that_cannot_be_published(fleet, tmp_path):
    (tmp_path / ".unfinished-id").touch()
    posting = await fleet.post("id", client_id="page")
    for _ in range(2):
        await fleet.let_run_say(("sent", None), ENDED)
    await posting
    await fleet.idle()
    assert [event["type"] for event in fleet.heard[-3:]] == ["execution_error", "executing", "status"]


async def test_secrets_of_a_prompt_are_in_neither_queue_nor_history(fleet):
    extra = {"api_key_comfy_org": "secret", "auth_token_comfy_org": "secret", "extra_pnginfo": {"workflow": 1}}
    posting = await fleet.post("id", client_id="page", extra_data=extra)
    _, queue = await fleet.request("GET", "/queue")
    for _ in range(2):  # both replicas end under it
        await fleet.let_run_say(("sent", None), ENDED)
    await posting
    await fleet.idle()
    _, history = await fleet.request("GET", "/history/id")
    for item in (queue["queue_pending"][0], history["id"]["prompt"]):
        assert item[3] == {"extra_pnginfo": {"workflow": 1}, "client_id": "page"}


@pytest.mark.parametrize("status", ["DELETING", "gone", "RUNNING"])
async def test_open_websocket_is_closed_when_the_fleet_ends_and_what_runs_is_finished(fleet, monkeypatch, status):
    """Or Serve waits for it until drain_s is over."""
    applications = {} if status == "gone" else {"fleet": SimpleNamespace(status=status)}
    serve = SimpleNamespace(
        status=lambda: SimpleNamespace(applications=applications),
        get_replica_context=lambda: SimpleNamespace(app_name="fleet"),
    )
    monkeypatch.setattr(fleet_front, "serve", serve)
    monkeypatch.setattr(fleet_front, "_WATCH", 0.01)
    fleet.front._prompts["id"] = SimpleNamespace(running=True)
    watching = asyncio.create_task(fleet.front._watch())
    await asyncio.sleep(0.1)
    assert fleet.heard == []
    del fleet.front._prompts["id"]
    await asyncio.sleep(0.2)
    watching.cancel()
    assert fleet.heard == ([] if status == "RUNNING" else [1001])
