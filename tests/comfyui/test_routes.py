"""The routes, over HTTP: what they do, and that what is wrong is refused with a sentence and harms nothing."""

import asyncio
import http.client
import json
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest

from dev.tools import synthetic
from dev.tools.client import Client

NOBODY = {"id": "0" * 16}
"""An entry that there is not."""


@pytest.fixture(scope="module", autouse=True)
def no_traceback(server):
    """Nothing that these tests ask for ends in one."""
    before = len(server.read_log())
    yield
    assert "Traceback" not in server.read_log()[before:]


def request(server, path, body=None, method="POST", **headers):
    """(status, JSON or None)"""
    host = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(host.hostname, host.port, timeout=60)
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    try:
        return response.status, json.loads(content)
    except ValueError:
        return response.status, None


def wanted(**changes):
    return {"checkpoint": synthetic.FILE_NAME, "sizes": ["80x72", "72x88"], "backend": "eager", **changes}


def wait_until_idle(client):
    deadline = time.monotonic() + 120
    while client.get("/prompt")["exec_info"]["queue_remaining"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


async def text_of(socket, seconds=None):
    """The next message that is not binary; one of the type "nothing" after so many seconds without any."""
    while True:
        try:
            message = await asyncio.wait_for(socket.receive(), seconds)
        except asyncio.TimeoutError:
            return {"type": "nothing", "data": {}}
        if message.type is aiohttp.WSMsgType.TEXT:
            return json.loads(message.data)
        assert message.type is aiohttp.WSMsgType.BINARY, message


def refused(answer, status=400):
    assert answer[0] == status, answer
    sentence = answer[1]["error"]
    assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 300
    return sentence


def test_warm_up_compiles(server):
    client = Client(server.url)
    status, answer = request(server, "/accel/warm_up", wanted(batches=[1, 2]))
    assert status == 200
    busy = refused(request(server, "/accel/warm_up", wanted()), 409)
    assert "busy" in busy
    wait_until_idle(client)
    history = client.get(f"/history/{answer['prompt_id']}")[answer["prompt_id"]]
    assert history["status"]["status_str"] == "success"
    assert "4 runs" in history["outputs"]["report"]["text"][0]
    state = client.get("/accel/state")
    assert state["graph_cache"]["compilations"] > 0
    assert state["graph_store"]["saved"] == 0  # graphs of this backend do not leave the process


def test_of_ten_asked_at_once_one_is_queued(server):
    client = Client(server.url)
    before = len(client.get("/history"))
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: request(server, "/accel/warm_up", wanted()), range(10)))
    assert sorted(status for status, _ in answers) == [200] + [409] * 9
    assert all("busy" in refused(answer, 409) for answer in answers if answer[0] != 200)
    wait_until_idle(client)
    assert len(client.get("/history")) == before + 1


def test_progress_is_told_to_the_client_that_asked(server):
    """From the prompt's start over each run to its end; nobody else's WebSocket hears of it."""
    asked = wanted(sizes=["80x72", "72x88", "96x64"], client_id="asked")

    async def listen():
        told, overheard = [], []
        async with aiohttp.ClientSession(server.url) as session:
            async with session.ws_connect("/ws?clientId=asked") as mine, session.ws_connect("/ws?clientId=x") as other:
                async with session.post("/accel/warm_up", json=asked) as response:
                    prompt_id = (await response.json())["prompt_id"]
                while not told or told[-1]["type"] not in ("execution_success", "execution_error"):
                    told += [event for event in [await text_of(mine)] if event["data"].get("prompt_id") == prompt_id]
                while not overheard or overheard[-1]["type"] != "nothing":
                    overheard.append(await text_of(other, seconds=0.5))
        return told, [event for event in overheard if event["data"].get("prompt_id") == prompt_id]

    told, overheard = asyncio.run(asyncio.wait_for(listen(), 120))
    assert overheard == []
    kinds = [event["type"] for event in told]
    assert kinds[0] == "execution_start" and kinds[-1] == "execution_success"
    progress = [event["data"] for event in told if event["type"] == "progress" and event["data"]["node"] == "warm_up"]
    assert progress[-1]["value"] == progress[-1]["max"] == 3
    assert [row["value"] for row in progress] == sorted(row["value"] for row in progress)
    executing = [event["data"]["node"] for event in told if event["type"] == "executing"]
    assert "warm_up" in executing
    (report,) = [event["data"]["output"] for event in told if event["type"] == "executed"]
    assert "3 runs" in report["text"][0]


@pytest.mark.parametrize(
    "body",
    [
        [],
        "text",
        7,
        None,
        {},
        {"sizes": ["64x64"]},
        wanted(checkpoint=7),
        wanted(checkpoint=""),
        wanted(checkpoint="x" * 10**4),
        wanted(sizes="64x64"),
        wanted(sizes=[]),
        wanted(sizes=[64]),
        wanted(sizes=["64"]),
        wanted(sizes=["0x64"]),
        wanted(sizes=["64x64, 72x72"]),
        wanted(sizes=["999999x64"]),
        wanted(sizes=["64x64"] * 1000),
        wanted(sizes=[f"{side}x64" for side in range(64, 8064, 8)]),
        wanted(sizes=["64x64"] * 65),
        wanted(sizes=[["64x64"]]),
        wanted(sizes={"64x64": 1}),
        wanted(sizes=[None]),
        wanted(sizes=["9" * 33 + "x64"]),
        wanted(sizes=["64x64\n72x72"]),
        wanted(batches=1),
        wanted(batches=[True]),
        wanted(batches=[0]),
        wanted(batches=[1.5]),
        wanted(batches=[10**30]),
        wanted(batches=[1] * 501),
        wanted(batches=[None]),
        wanted(batches={}),
        wanted(prompt_lengths=[4097]),
        wanted(prompt_lengths=list(range(1, 502))),
        wanted(prompt_lengths=77),
        wanted(prompt_lengths=[-1]),
        wanted(prompt_lengths=["77"]),
        wanted(backend="other"),
        wanted(backend=None),
        wanted(backend=["eager"]),
        wanted(client_id=[]),
        wanted(client_id=None),
        wanted(client_id="x" * 1025),
        wanted(trust=True),
    ],
)
def test_wrong_request_is_refused_with_a_sentence(server, body):
    refused(request(server, "/accel/warm_up", b"null" if body is None else body))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sizes": ["16384x16384"]}, "256 megapixels"),
        ({"sizes": ["64x64", "8192x4096"], "batches": [1, 3]}, "96 megapixels"),
        ({"sizes": ["1024x1025"], "batches": [64]}, "65 megapixels"),
        ({"sizes": ["4096x4096"] * 5, "batches": [4, 3, 2, 1] * 3}, "2400 megapixels"),
        ({"sizes": ["1024x1024"], "batches": [64], "prompt_lengths": list(range(77, 94))}, "1088 megapixels"),
    ],
)
def test_more_pixels_than_any_machine_has_room_for_are_refused(server, changes, said):
    sentence = refused(request(server, "/accel/warm_up", wanted(**changes)))
    assert said in sentence and "at most" in sentence


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "..\\x", "sub/../../x", "x\0y", "%2e%2e/x", "unknown.safetensors"],
)
def test_name_that_comfyui_does_not_list_is_refused(server, name):
    refused(request(server, "/accel/warm_up", wanted(checkpoint=name)), 404)


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[" * 60_000, b"NaN-"])
@pytest.mark.parametrize("path", ["/accel/warm_up", "/accel/clear", "/accel/evict", "/accel/settings"])
def test_body_that_is_no_json_is_refused(server, path, body):
    refused(request(server, path, body))


@pytest.mark.parametrize("path", ["/accel/warm_up", "/accel/clear"])
def test_body_of_ten_megabytes_is_refused(server, path):
    refused(request(server, path, b" " * 10_000_000), 413)


def test_body_of_unknown_length_is_refused_once_it_is_too_long(server):
    host = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(host.hostname, host.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/accel/warm_up", (b" " * 8192 for _ in range(9)), headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_form_of_a_page_is_refused(server, kind):
    refused(request(server, "/accel/warm_up", wanted(), **{"Content-Type": kind}), 415)


@pytest.mark.parametrize("path", ["/accel/warm_up", "/accel/clear", "/accel/evict", "/accel/settings"])
@pytest.mark.parametrize("origin", ["https://example.org", "null", "http://my-server:9999", "http://my-server.x.org"])
def test_foreign_origin_is_refused_on_any_address(server, path, origin):
    body = wanted() if "warm" in path else None
    answer = request(server, path, body, Origin=origin, Host="my-server:8188")  # core looks at loopback addresses alone
    assert "other sites" in refused(answer, 403)


def test_own_origin_is_served_on_any_address(server):
    assert request(server, "/accel/evict", NOBODY, Origin="http://my-server:8188", Host="my-server:8188")[0] == 200


def test_own_origin_is_served(server):
    assert request(server, "/accel/evict", NOBODY, Origin=server.url)[0] == 200


@pytest.mark.parametrize("path", ["/accel/warm_up", "/accel/clear", "/accel/evict", "/accel/settings"])
def test_get_changes_nothing(server, path):
    assert request(server, path, method="GET")[0] in (404, 405)


def test_clear_takes_nothing(server):
    refused(request(server, "/accel/clear", {"store": "all"}))


def filled(server):
    """The state once the cache has what two sizes need."""
    request(server, "/accel/warm_up", wanted())
    client = Client(server.url)
    wait_until_idle(client)
    return client.get("/accel/state")


def test_state_has_the_run_and_its_rows_are_bounded_and_filtered(server):
    state = filled(server)
    cache, client = state["graph_cache"], Client(server.url)
    assert state["last_run"]["model"] == "SD15" and state["last_run"]["compiled_calls"] > 0
    assert state["last_run"]["steps"] == state["last_run"]["samplings"] == 2 and len(state["last_run"]["latent"]) == 4
    assert state["compiling"] is None and state["version"]
    assert cache["rows_total"] == cache["entries"] == len(cache["table"]) > 2
    assert [row["last_used"] for row in cache["table"]] == sorted(
        (r["last_used"] for r in cache["table"]), reverse=True
    )
    row = cache["table"][0]
    assert row["model"] == "SD15" and row["sizes"] == "any" and row["source"] == "compiled"
    assert row["used_at"][0] == {"latent": [11, 9], "batch": 1, "context": 77} and row["backend"] == "eager"
    few = client.get("/accel/state?rows=2")["graph_cache"]
    assert len(few["table"]) == 2 and few["rows_total"] == cache["entries"] and few["bytes"] == cache["bytes"]
    found = client.get("/accel/state?filter=resBLOCK")["graph_cache"]
    assert {row["name"] for row in found["table"]} == {"ResBlock"} and found["rows_total"] < cache["entries"]


@pytest.mark.parametrize(
    "query", ["rows=-1", "rows=5001", "rows=x", "rows=", "rows=%C2%B2", "rows=1e3", "filter=" + "x" * 201]
)
def test_query_out_of_range_is_refused(server, query):
    refused(request(server, f"/accel/state?{query}", method="GET"))


def test_evict_drops_the_one_that_is_named(server):
    entry = filled(server)["graph_cache"]["table"][0]
    assert request(server, "/accel/evict", {"id": entry["id"]}) == (200, {"dropped": 1, "bytes": entry["bytes"]})
    assert request(server, "/accel/evict", {"id": entry["id"]}) == (200, {"dropped": 0, "bytes": 0})
    left = Client(server.url).get("/accel/state")["graph_cache"]["table"]
    assert left and entry["id"] not in {row["id"] for row in left}


@pytest.mark.parametrize("body", [None, [], {}, {"id": 7}, {"id": ""}, {"id": "../x"}, {"id": "g0"}, {"id": "0" * 65}])
def test_wrong_entry_is_refused(server, body):
    refused(request(server, "/accel/evict", body))


def test_settings_are_put_into_force_and_kept(server):
    before = Client(server.url).get("/accel/state")["settings"]
    changed = {"max_mb": 321, "max_entries": 99, "store_mb": 77, "verbosity": "quiet", "weights_in_place": True}
    changed["cuda_graphs"] = "off"
    try:
        assert request(server, "/accel/settings", changed) == (200, {"settings": changed})
        state = Client(server.url).get("/accel/state")
        assert state["settings"] == changed
        assert (state["graph_cache"]["max_bytes"], state["graph_cache"]["max_entries"]) == (321 << 20, 99)
        assert state["graph_store"] is None or state["graph_store"]["limit_bytes"] == 77 << 20
        kept = [json.loads(path.read_text()) for path in sorted((server.base / "user" / "__accel").glob("*s.json"))]
        assert kept == [changed]
        assert request(server, "/accel/settings", {"max_mb": 322})[1]["settings"] == {**changed, "max_mb": 322}
    finally:
        assert request(server, "/accel/settings", before)[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        *(None, [], {}, "text", {"max_mb": -1}, {"max_mb": 2**21}, {"max_mb": "5"}, {"max_mb": None}, {"max_mb": True}),
        *(
            {"max_entries": 10**9},
            {"store_mb": -5},
            {"store_mb": None},
            {"verbosity": "loud"},
            {"verbosity": ["quiet"]},
        ),
        *({"folder": "/etc"}, {"max_mb": 5, "other": 1}, {"x" * 1000: 1}),
    ],
)
def test_wrong_setting_is_refused_and_none_is_changed(server, body):
    before = Client(server.url).get("/accel/state")["settings"]
    refused(request(server, "/accel/settings", body))
    assert Client(server.url).get("/accel/state")["settings"] == before


def test_report_comes_as_text_and_as_json(server):
    filled(server)
    with urllib.request.urlopen(f"{server.url}/accel/report?format=text", timeout=60) as response:
        assert response.headers.get_content_type() == "text/plain"
        text = response.read().decode()
    assert text.startswith("Accel Report") and "Last image: SD15" in text and "choose inductor" in text
    answer = Client(server.url).get("/accel/report?format=json")
    assert answer["state"]["last_run"]["model"] == "SD15" and any("inductor" in line for line in answer["diagnosis"])
    refused(request(server, "/accel/report?format=pdf", method="GET"))


def test_report_node_runs_in_a_prompt(server):
    inputs = {name: ["empty", 0] for name in ("anything", "image", "reference")}
    graph = {
        "empty": {"class_type": "EmptyImage", "inputs": {"width": 32, "height": 32, "batch_size": 1, "color": 7}},
        "report": {"class_type": "AccelReport", "inputs": inputs},
    }
    client = Client(server.url)
    result = client.run(graph, timeout=60)
    deadline = time.monotonic() + 30
    while not client.get(f"/history/{result.prompt_id}"):  # it is written after the prompt is told to have ended
        assert time.monotonic() < deadline
        time.sleep(0.1)
    outputs = client.get(f"/history/{result.prompt_id}")[result.prompt_id]["outputs"]["report"]
    assert "reference: equal" in outputs["text"][0] and outputs["images"][0]["type"] == "temp"
    assert "Nothing in this workflow speeds the model up" in outputs["text"][0]
    assert "choose inductor" not in outputs["text"][0], "advice for the earlier run"


def test_clear_drops_everything_and_pages_are_told_what_happens_and_not_too_often(server):
    """Of a cleared cache, compiling, its end, and the run's end, at most about five times a second."""
    before = filled(server)["graph_cache"]["entries"]

    async def listen():
        told = []
        async with aiohttp.ClientSession(server.url) as session, session.ws_connect("/ws?clientId=page") as page:

            async def hear(last):
                while not told or told[-1]["event"] != last:
                    message = await text_of(page)
                    told.extend([message["data"]] if message["type"] == "accel" else [])

            async with session.post("/accel/clear", json={}) as response:
                assert (await response.json())["dropped"] == before > 0
            assert Client(server.url).get("/accel/state")["graph_cache"]["entries"] == 0
            await hear("cache_changed")
            told.clear()
            async with session.post("/accel/warm_up", json=wanted()) as response:
                assert response.status == 200
            started = time.monotonic()
            await hear("run_end")
            return told, time.monotonic() - started

    told, seconds = asyncio.run(asyncio.wait_for(listen(), 120))
    wait_until_idle(Client(server.url))
    events = [message["event"] for message in told]
    assert {"compiling", "compiled"} <= set(events)
    assert len(events) / (seconds + 0.2) < 6
    first = told[events.index("compiling")]
    assert first["name"] and 1 <= first["number"] <= first["of"] and first["node"] == "model"
