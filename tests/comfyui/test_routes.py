"""The routes, over HTTP: what they do, and that what is wrong is refused with a sentence and harms nothing."""

import asyncio
import http.client
import json
import urllib.parse
import urllib.request
import uuid

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


def prompt(words):
    """Two runs of the warm-up; a server runs none again whose words it knows."""
    model = {"model": ["checkpoint", 0], "shapes": "any size", "backend": "eager", "on_trouble": "run eagerly"}
    runs = {"model": ["model", 0], "conditioning": ["text", 0], "sizes": "80x72, 72x88", "batches": "1"}
    return {
        "checkpoint": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": synthetic.FILE_NAME}},
        "text": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["checkpoint", 1], "text": words}},
        "model": {"class_type": "AccelModel", "inputs": model},
        "warm_up": {"class_type": "AccelWarmUpGraphs", "inputs": {**runs, "prompt_lengths": ""}},
        "report": {"class_type": "PreviewAny", "inputs": {"source": ["warm_up", 1]}},
    }


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


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[" * 60_000, b"NaN-"])
@pytest.mark.parametrize("path", ["/accel/clear", "/accel/evict", "/accel/settings"])
def test_body_that_is_no_json_is_refused(server, path, body):
    refused(request(server, path, body))


def test_body_of_ten_megabytes_is_refused(server):
    refused(request(server, "/accel/clear", b" " * 10_000_000), 413)


def test_body_of_unknown_length_is_refused(server):
    host = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(host.hostname, host.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/accel/clear", (b" " * 8192 for _ in range(9)), headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_form_of_a_page_is_refused(server, kind):
    refused(request(server, "/accel/evict", NOBODY, **{"Content-Type": kind}), 415)


@pytest.mark.parametrize("path", ["/accel/clear", "/accel/evict", "/accel/settings"])
@pytest.mark.parametrize("origin", ["https://example.org", "null", "http://my-server:9999", "http://my-server.x.org"])
def test_foreign_origin_is_refused_on_any_address(server, path, origin):
    answer = request(server, path, Origin=origin, Host="my-server:8188")  # core looks at loopback addresses alone
    assert "other sites" in refused(answer, 403)


def test_own_origin_is_served_on_any_address(server):
    assert request(server, "/accel/evict", NOBODY, Origin="http://my-server:8188", Host="my-server:8188")[0] == 200
    assert request(server, "/accel/evict", NOBODY, Origin=server.url)[0] == 200


@pytest.mark.parametrize("path", ["/accel/clear", "/accel/evict", "/accel/settings"])
def test_get_changes_nothing(server, path):
    assert request(server, path, method="GET")[0] in (404, 405)


def test_clear_takes_nothing(server):
    refused(request(server, "/accel/clear", {"store": "all"}))


def filled(server):
    """The state once the cache has what two sizes need."""
    client = Client(server.url)
    client.run(prompt(uuid.uuid4().hex), timeout=120)
    return client.get("/accel/state")


def test_state_has_the_run_and_its_rows_are_bounded(server):
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


@pytest.mark.parametrize("query", ["rows=-1", "rows=5001", "rows=x", "rows=", "rows=%C2%B2", "rows=1e3"])
def test_query_out_of_range_is_refused(server, query):
    refused(request(server, f"/accel/state?{query}", method="GET"))


def test_evict_drops_the_one_that_is_named(server):
    entry = filled(server)["graph_cache"]["table"][0]
    assert request(server, "/accel/evict", {"id": entry["id"]}) == (200, {"dropped": 1, "bytes": entry["bytes"]})
    assert request(server, "/accel/evict", {"id": entry["id"]}) == (200, {"dropped": 0, "bytes": 0})
    left = Client(server.url).get("/accel/state")["graph_cache"]["table"]
    assert left and entry["id"] not in {row["id"] for row in left}


@pytest.mark.parametrize("body", [None, [], {}, {"id": 7}, {"id": "0", "more": 1}])
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


def test_report_comes_as_text(server):
    filled(server)
    with urllib.request.urlopen(f"{server.url}/accel/report", timeout=60) as response:
        assert response.headers.get_content_type() == "text/plain"
        text = response.read().decode()
    assert text.startswith("Accel Report") and "Last image: SD15" in text and "Choose the backend inductor" in text


def test_clear_drops_everything_and_pages_are_told_what_happens(server):
    """Of a cleared cache, compiling, its end, and the run's end."""
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
            body = {"prompt": prompt("other words"), "client_id": "page"}
            async with session.post("/prompt", json=body) as response:
                assert response.status == 200
            await hear("run_end")
            return told

    told = asyncio.run(asyncio.wait_for(listen(), 120))
    events = [message["event"] for message in told]
    assert {"compiling", "compiled"} <= set(events)
    first = told[events.index("compiling")]
    assert first["name"] and 1 <= first["number"] <= first["of"] and first["node"] == "model"
