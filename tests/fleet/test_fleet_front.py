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
from fleet.counts import States
from fleet.results import Results

GRAPH = {"1": {"class_type": "A", "inputs": {}}}


class Run:
    """What a replica tells of one prompt: the front waits for each event until the test says it."""

    def __init__(self):
        self.said, self.is_cancelled = asyncio.Queue(), False

    def __aiter__(self):
        return self

    async def __anext__(self):
        return await self.said.get()

    def cancel(self):
        self.is_cancelled = True


class Fleet:
    """A front without Serve. asked: what it asked of any replica; runs: of its prompts, by id; silent: no state."""

    def __init__(self, results):
        self.asked, self.runs, self.silent = [], {}, False
        # Below the class that Serve makes of it, whose constructor belongs to a running Serve.
        plain = [kind for kind in fleet_front.Front.__mro__ if kind.__module__ == fleet_front.__name__][-1]
        alone = {"__del__": lambda front: None, "_ask": staticmethod(self._ask)}
        self.front = type("Alone", (plain,), alone)(self, {"results": str(results), "replicas": 2})
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
        run = await self.begun(prompt_id)
        for event in said:
            run.said.put_nowait(event)
        return posting

    async def begun(self, prompt_id="id"):
        """Its run, as soon as it has one."""
        while prompt_id not in self.runs:
            await asyncio.sleep(0)
        return self.runs[prompt_id]

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


def with_fleet(tmp_path, scenario):
    async def run():
        return await asyncio.wait_for(scenario(Fleet(tmp_path)), 30)

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["/models/../manager/reboot", "/api/object_info/../history", "/view_metadata/a/.."])
def test_path_that_leads_to_another_route_is_not_asked(tmp_path, path):
    async def scenario(fleet):
        return await fleet.request("GET", path), fleet.asked

    assert with_fleet(tmp_path, scenario) == ((404, None), [])


@pytest.mark.parametrize(
    ("path", "query", "asked"),
    [
        ("/api/object_info/Some node?", b"", "/object_info/Some%20node%3F"),
        ("/models/%2e%2e/manager", b"", "/models/%252e%252e/manager"),
        # An image to start from, where the replicas share no folder.
        ("/view", b"type=input&filename=a.png", "/view?type=input&filename=a.png"),
    ],
)
def test_path_is_quoted_again_for_the_replica(tmp_path, path, query, asked):
    async def scenario(fleet):
        return await fleet.request("GET", path, query=query), fleet.asked

    assert with_fleet(tmp_path, scenario) == ((200, {}), [("GET", asked, None)])


@pytest.mark.parametrize("said", [(), ("ended",), ("ended", "a")], ids=["nothing", "one that ended", "two"])
def test_upload_waits_for_no_prompt(tmp_path, said):
    """said: replicas that were heard of before; the prompt says of its own when it begins."""

    async def scenario(fleet):
        for name in said:
            fleet.front._states.heard({"replica": name})
        posting = await fleet.post()
        uploading = asyncio.create_task(fleet.request("POST", "/upload/image", b"image"))
        fleet.runs["id"].said.put_nowait(("replica", {"replica": "a"}))
        fleet.runs["id"].said.put_nowait(("accepted", {}))
        await posting
        uploaded = await asyncio.wait_for(uploading, 10)
        fleet.runs["id"].said.put_nowait(("done", {"met": None}))
        return uploaded, fleet.asked

    assert with_fleet(tmp_path, scenario) == ((200, {}), [("POST", "/upload/image", b"image")])


@pytest.mark.parametrize("path", ["/upload/image", "/prompt"])
def test_request_is_read_up_to_a_limit(tmp_path, monkeypatch, path):
    monkeypatch.setattr(fleet_http, "LARGEST_BODY", 100)

    async def scenario(fleet):
        return await fleet.request("POST", path, b" " * 60, parts=2), fleet.asked

    (status, _), asked = with_fleet(tmp_path, scenario)
    assert status == 413 and asked == []


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/prompt", {"prompt": GRAPH, "extra_data": "text"}, 400),
        ("/queue", {"delete": None}, 200),
        ("/history", {"delete": 5}, 200),
        ("/interrupt", {"prompt_id": ["id"]}, 200),
    ],
)
def test_value_of_another_type_breaks_nothing(tmp_path, path, body, status):
    async def scenario(fleet):
        return (await fleet.request("POST", path, json.dumps(body).encode()))[0], fleet.runs

    assert with_fleet(tmp_path, scenario) == (status, {})


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"', '{"\\ud800": [NaN]}'])
def test_value_that_json_has_no_word_for_leaves_queue_and_history_readable(tmp_path, value):
    async def scenario(fleet):
        asked = '{"prompt": {"1": {"class_type": "A", "inputs": {"x": VALUE}}}, "prompt_id": "id"}'
        asked = asked.replace("VALUE", value)
        posting = asyncio.create_task(fleet.request("POST", "/prompt", asked.encode()))
        (await fleet.begun()).said.put_nowait(("accepted", {}))
        assert (await posting)[0] == 200
        queue = await fleet.request("GET", "/queue")
        entry = {"prompt": fleet.front._prompts["id"].queued(), "outputs": {"1": {"text": [json.loads(value)]}}}
        Results(tmp_path).publish("id", entry, {})
        fleet.runs["id"].said.put_nowait(("done", {"met": None}))
        while fleet.front._prompts:
            await asyncio.sleep(0)
        return queue, await fleet.request("GET", "/history"), await fleet.request("GET", "/history/id")

    (queued, queue), (listed, history), (shown, one) = with_fleet(tmp_path, scenario)
    assert queued == listed == shown == 200 and history == one
    read = one["id"]["outputs"]["1"]["text"][0]
    assert queue["queue_pending"][0][2]["1"]["inputs"]["x"] == read
    assert read == json.loads(value, parse_constant=lambda name: None) or read is None and value == "1e999"


@pytest.mark.parametrize("count", [b"9" * 5000, b"-1", b"x", b"%d9%a3"], ids=["5000 digits", "less", "word", "arabic"])
def test_any_number_of_items_may_be_asked_for(tmp_path, count):
    async def scenario(fleet):
        return await fleet.request("GET", "/history", query=b"max_items=" + count)

    assert with_fleet(tmp_path, scenario) == (200, {})


@pytest.mark.parametrize(("method", "path"), [("GET", "/object_info"), ("POST", "/upload/image")])
def test_question_is_answered_in_words_while_no_replica_tells_its_state(tmp_path, method, path):
    async def scenario(fleet):
        fleet.silent = True
        return await fleet.request(method, path, b"image")

    status, answer = with_fleet(tmp_path, scenario)
    assert status == 503 and answer["error"]["message"].startswith("No ComfyUI answers.")


def test_upload_that_ends_comfyuis_is_tried_on_one_other_at_most(tmp_path):
    async def scenario(fleet):
        fleet.front._states.most = 4
        for name in ("a", "b", "c", "ended"):
            fleet.front._states.heard({"replica": name})
        answered = await fleet.request("POST", "/upload/image", b"kills")
        return answered, fleet.asked

    (status, answer), asked = with_fleet(tmp_path, scenario)
    assert status == 502 and "2 ComfyUIs ended" in answer["error"]["message"]
    assert len(asked) == 2


def test_prompt_is_nested_no_deeper_than_it_can_be_shown_again(tmp_path):
    async def scenario(fleet):
        deep = "[" * 300 + "]" * 300
        asked = '{"prompt": {"1": {"class_type": "A", "inputs": {"x": DEEP}}}}'.replace("DEEP", deep)
        return (await fleet.request("POST", "/prompt", asked.encode()))[0], fleet.runs

    assert with_fleet(tmp_path, scenario) == (400, {})


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
def test_request_of_another_sites_page_is_refused(tmp_path, headers, status):
    async def scenario(fleet):
        given = [(name.encode(), value.encode()) for name, value in headers.items()]
        return (await fleet.request("GET", "/queue", headers=given))[0]

    assert with_fleet(tmp_path, scenario) == status


def test_prompt_is_pending_and_may_be_deleted_until_its_replica_has_begun_it(tmp_path):
    async def scenario(fleet):
        for prompt_id in ("runs", "waits"):
            posting = await fleet.post(prompt_id, ("accepted", {}))
            assert (await posting)[0] == 200
        started = json.dumps({"type": "execution_start", "data": {"prompt_id": "runs"}})
        fleet.runs["runs"].said.put_nowait(("message", started))
        await asyncio.sleep(0.01)
        _, queue = await fleet.request("GET", "/queue")
        await fleet.request("POST", "/queue", json.dumps({"delete": ["runs", "waits"]}).encode())
        await asyncio.sleep(0.01)
        fleet.runs["runs"].said.put_nowait(("done", {"met": None}))
        return queue, {prompt_id: run.is_cancelled for prompt_id, run in fleet.runs.items()}

    queue, cancelled = with_fleet(tmp_path, scenario)
    assert [item[1] for item in queue["queue_running"]] == ["runs"]
    assert [item[1] for item in queue["queue_pending"]] == ["waits"]
    assert cancelled == {"runs": False, "waits": True}


def test_state_is_of_the_replicas_that_there_are():
    states = States(2)
    for name in "ab":
        states.heard({"replica": name, "prompts": 1})
    states.heard({"replica": "a"})  # has begun another prompt
    assert states.known == [{"replica": "b", "prompts": 1}, {"replica": "a", "prompts": 1}]
    states.heard({"replica": "c"})  # in place of one that ended
    assert [state["replica"] for state in states.known] == ["a", "c"]
    states.forget("a")
    assert [state["replica"] for state in states.known] == ["c"]


def test_replica_that_ended_under_a_prompt_has_no_state(tmp_path):
    async def scenario(fleet):
        posting = await fleet.post()
        for replica in "ab":
            run = await fleet.begun()
            del fleet.runs["id"]
            run.said.put_nowait(("replica", {"replica": replica, "pid": 1}))
            run.said.put_nowait(("accepted", {}))
            if replica == "a":
                run.said.put_nowait(None)  # no pair, so it raises, as a replica that ended does
        await posting
        run.said.put_nowait(("done", {"met": None}))
        await asyncio.sleep(0.01)
        return json.loads((await fleet.front._get_state(None)).body)

    state = with_fleet(tmp_path, scenario)
    assert [replica["replica"] for replica in state["replicas"]] == ["b"]
    assert state["prompts"]["runs"] == 2 and state["prompts"]["answered"] == 1


@pytest.mark.parametrize(("ended", "is_answered"), [(4, True), (5, True), (6, False)])
def test_prompt_is_not_blamed_for_replicas_that_ended_before_they_saw_it(tmp_path, monkeypatch, ended, is_answered):
    """Of the attempts that count, it has two all the same."""
    monkeypatch.setattr("fleet.front._PAUSE", 0)

    async def scenario(fleet):
        posting = await fleet.post()
        for number in range(ended + 1):
            for _ in range(50):
                await asyncio.sleep(0)
            run = fleet.runs.pop("id", None)
            if run is None:
                break
            said = [("replica", {"replica": str(number), "pid": 1})]
            said += [("sent", None), ("accepted", {}), ("done", {"met": None})] if number == ended else [None]
            for event in said:
                run.said.put_nowait(event)
        await posting
        await asyncio.sleep(0.01)
        return json.loads((await fleet.front._get_state(None)).body)["prompts"]

    prompts = with_fleet(tmp_path, scenario)
    assert (prompts.get("answered", 0), prompts.get("failed", 0)) == (is_answered, not is_answered)


def test_prompt_that_is_interrupted_has_a_history_and_its_replica_a_state(tmp_path):
    async def scenario(fleet):
        await (await fleet.post("id", ("replica", {"replica": "a", "pid": 1}), ("accepted", {})))
        run = fleet.runs["id"]
        run.said.put_nowait(("message", json.dumps({"type": "execution_start", "data": {"prompt_id": "id"}})))
        await asyncio.sleep(0.01)
        await fleet.request("POST", "/interrupt", json.dumps({"prompt_id": "id"}).encode())
        assert run.is_cancelled
        run.said.put_nowait(None)  # it raises, as a run that was cancelled does
        while fleet.front._prompts:
            await asyncio.sleep(0.01)
        _, history = await fleet.request("GET", "/history/id")
        return history["id"], json.loads((await fleet.front._get_state(None)).body)

    entry, state = with_fleet(tmp_path, scenario)
    assert entry["status"]["messages"][-1][0] == "execution_interrupted"
    assert [replica["replica"] for replica in state["replicas"]] == ["a"]
    assert state["prompts"]["interrupted"] == 1 and state["prompts"]["runs"] == 1


def test_secrets_of_a_prompt_are_in_neither_queue_nor_history(tmp_path):
    async def scenario(fleet):
        extra = {"api_key_comfy_org": "secret", "auth_token_comfy_org": "secret", "extra_pnginfo": {"workflow": 1}}
        posting = await fleet.post("id", client_id="page", extra_data=extra)
        _, queue = await fleet.request("GET", "/queue")
        for _ in range(2):  # both replicas end under it
            run = await fleet.begun()
            del fleet.runs["id"]
            run.said.put_nowait(("sent", None))
            run.said.put_nowait(None)
        await posting
        while fleet.front._prompts:
            await asyncio.sleep(0.01)
        return queue["queue_pending"][0], (await fleet.request("GET", "/history/id"))[1]["id"]["prompt"]

    for item in with_fleet(tmp_path, scenario):
        assert item[3] == {"extra_pnginfo": {"workflow": 1}, "client_id": "page"}


@pytest.mark.parametrize("status", ["DELETING", "gone", "RUNNING"])
def test_open_websocket_is_closed_when_the_fleet_ends_and_what_runs_is_finished(tmp_path, monkeypatch, status):
    """Or Serve waits for it until drain_s is over."""
    applications = {} if status == "gone" else {"fleet": SimpleNamespace(status=status)}
    serve = SimpleNamespace(
        status=lambda: SimpleNamespace(applications=applications),
        get_replica_context=lambda: SimpleNamespace(app_name="fleet"),
    )
    monkeypatch.setattr(fleet_front, "serve", serve)
    monkeypatch.setattr(fleet_front, "_WATCH", 0.01)
    closed = []

    class Socket:
        async def close(self, code):
            closed.append(code)
            fleet_sockets.clear()

    async def scenario(fleet):
        nonlocal fleet_sockets
        fleet_sockets = fleet.front._sockets
        fleet_sockets["page"] = Socket()
        fleet.front._prompts["id"] = SimpleNamespace(running=True)
        watching = asyncio.create_task(fleet.front._watch())
        await asyncio.sleep(0.1)
        assert closed == []
        del fleet.front._prompts["id"]
        await asyncio.sleep(0.2)
        watching.cancel()

    fleet_sockets = None
    with_fleet(tmp_path, scenario)
    assert closed == ([] if status == "RUNNING" else [1001])
