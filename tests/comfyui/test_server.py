"""The pack in a ComfyUI server of its own, over HTTP and WebSocket, with a checkpoint that core's loader takes."""

import asyncio
import copy
import io
import json
import os
from pathlib import Path

import aiohttp
import pytest
from PIL import Image

from dev.tools import synthetic, workflow
from dev.tools.client import Client, PromptFailed, PromptInterrupted

SNAPSHOT = Path(__file__).with_name("object_info.json")
FIELDS = ("name", "display_name", "category", "description", "input", "input_order", "output", "output_name")
LATER = {"advanced", "search_aliases"}
"""Of the description of an input: what newer cores add to it."""

SIZES = [(88, 72, 1), (96, 64, 2)]


@pytest.fixture(scope="module")
def client(server):
    return Client(server.url)


def text_to_image(width=64, height=64, batch_size=1, steps=2, skips=False, **changes):
    """The example workflow at this size; graphs are captured and run as they are, so that bits stay the same."""
    return workflow.change(
        workflow.load(),
        {
            "CheckpointLoaderSimple": {"ckpt_name": synthetic.FILE_NAME},
            "AccelModel": {"backend": "eager"},
            "AccelDeepCache": {"quality": "30 dB", "end_percent": float(skips)},
            "EmptyLatentImage": {"width": width, "height": height, "batch_size": batch_size},
            "KSampler": {"steps": steps},
            **changes,
        },
    )


def images(client, graph):
    return [Image.open(io.BytesIO(data)).convert("RGB") for data in client.run(graph, timeout=300).images]


def same(one, other):
    return [image.tobytes() for image in one] == [image.tobytes() for image in other]


def described(node):
    """What the snapshot holds of a node, without what only newer cores tell."""
    kept = {field: node[field] for field in FIELDS}
    for group in kept["input"].values():
        for declared in group.values():
            if isinstance(declared[0], list):  # cores such as 0.3.75 are given a combo in its older form
                declared[0] = "COMBO"
            for later in LATER.intersection(declared[1] if len(declared) > 1 else ()):
                del declared[1][later]
    return kept


def test_server_starts_without_a_word_of_complaint_about_us(server):
    lines = server.read_log().partition("To see the GUI go to")[0].splitlines()
    assert len(lines) > 5
    assert not [line for line in lines if "IMPORT FAILED" in line]
    assert not [line for line in lines if "warn" in line.lower() and "accel" in line.lower()]


def test_object_info_is_as_stored(client):
    info = client.get("/object_info")
    ours = {name: described(node) for name, node in sorted(info.items()) if name.startswith("Accel")}
    if os.environ.get("ACCEL_UPDATE"):
        SNAPSHOT.write_text(json.dumps(ours, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    stored = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    assert ours == stored, f"Saved workflows rely on node ids, inputs and defaults; ACCEL_UPDATE=1 writes {SNAPSHOT}."


@pytest.fixture(scope="module")
def before(client):
    """The cache before these images; tests of another file may have filled it."""
    return client.get("/accel/state")["graph_cache"]


@pytest.mark.parametrize(("width", "height", "batch"), SIZES)
def test_text_to_image_is_exactly_the_size_asked_for(client, before, width, height, batch):
    made = images(client, text_to_image(width, height, batch))
    assert [image.size for image in made] == [(width, height)] * batch


def test_after_all_these_sizes_each_kind_was_compiled_once(client, before):
    state = client.get("/accel/state")["graph_cache"]
    assert state["fallbacks"] == []
    assert state["compilations"] - before["compilations"] == state["entries"] - before["entries"]
    assert state["graphs"] == state["entries"] > 0
    assert state["hits"] - before["hits"] > state["compilations"] - before["compilations"]


def test_compiled_full_steps_are_bit_identical_to_plain(client):
    graph = text_to_image(72, 72)
    assert same(images(client, graph), images(client, workflow.bypass(graph)))


def test_deep_cache_skips_and_changes_the_image(client):
    # Another seed than elsewhere: the server would hand out the image of an equal prompt without running it.
    graph = text_to_image(64, 72, skips=True, KSampler={"seed": 11, "steps": 20})
    cached = images(client, graph)
    told = client.get("/accel/state")["last_run"]
    taken = told["steps_taken"]
    assert (told["full_steps"], told["skipped_steps"]) == (taken.count("F"), taken.count("S"))
    assert told["skipped_steps"] > 3 and told["target_db"] == 30.0 and 0 < told["skipped_work"] < 1
    assert not same(cached, images(client, workflow.bypass(graph)))


def test_interrupt_in_mid_run_leaves_model_and_cache_clean(client):
    graph = text_to_image(72, 72, KSampler={"seed": 5, "steps": 2})
    expected = images(client, workflow.bypass(graph))

    def interrupt(kind, data):
        if kind == "progress" and data["value"] >= 2:  # newer cores leave out some
            client.interrupt()

    with pytest.raises(PromptInterrupted):
        client.run(text_to_image(72, 72, steps=20), interrupt, timeout=300)
    told = client.get("/accel/state")["last_run"]
    assert 2 <= told["steps_done"] < 20 and told["account"]["gain"] == []
    assert {line[-1]["code"] for line in told["lines"].values()} == {"line_stopped"}
    assert same(images(client, graph), expected)
    assert client.get("/accel/state")["graph_cache"]["fallbacks"] == []


def test_text_encoder_is_compiled_once_for_prompts_of_every_length(client):
    graph = text_to_image(64, 64, KSampler={"seed": 60, "steps": 1})
    encodes = [node["inputs"] for node in graph.values() if node["class_type"] == "CLIPTextEncode"]
    how = {"shapes": "any size", "backend": "eager", "on_trouble": "run eagerly", "check_gain": False}
    graph["encoder"] = {"class_type": "AccelTextEncoder", "inputs": {"clip": encodes[0]["clip"], **how}}
    encodes[1]["text"] = "words " * 100
    for inputs in encodes:
        inputs["clip"] = ["encoder", 0]
    assert same(images(client, graph), images(client, workflow.bypass(graph)))
    rows = [row for row in client.get("/accel/state")["graph_cache"]["table"] if row["name"] == "CLIPLayer"]
    assert [(row["model"], row["graphs"]) for row in rows] == [("CLIPTextModel", 1)]
    assert {(used["batch"], used["context"]) for used in rows[0]["used_at"]} == {(1, 77), (2, 77)}


def test_value_out_of_range_ends_in_one_sentence_with_the_range(client):
    with pytest.raises(PromptFailed, match=r"start_percent \(0.8\) must not be above end_percent \(0.0\)"):
        client.run(text_to_image(AccelDeepCache={"start_percent": 0.8, "end_percent": 0.0}), timeout=60)


def test_lines_go_to_who_asked_for_the_prompt_and_to_the_node_that_ran(client):
    """Another visitor of the server hears that something ran; the node has other numbers than in prompts before."""
    graph = text_to_image(64, 64, KSampler={"seed": 60, "steps": 1})
    speeds_up = next(number for number, node in graph.items() if node["class_type"] == "AccelModel")
    moved = copy.deepcopy(graph)
    moved["12:2"] = moved.pop(speeds_up)
    for node in moved.values():
        node["inputs"].update((name, ["12:2", 0]) for name, at in node["inputs"].items() if at == [speeds_up, 0])
    next(node for node in moved.values() if node["class_type"] == "KSampler")["inputs"]["seed"] = 61

    async def two_visitors():
        """The second prompt's id, and what this pack says to each of them in it."""
        told = [], []
        async with aiohttp.ClientSession() as session:
            sockets = [await session.ws_connect(f"{client.url}/ws?clientId={name}") for name in ("asks", "watches")]
            hearing = [asyncio.create_task(hear(*each)) for each in zip(sockets, told, strict=True)]
            for prompt in (graph, moved):
                body = {"prompt": prompt, "client_id": "asks"}
                async with session.post(f"{client.url}/prompt", json=body) as answer:
                    prompt_id = (await answer.json())["prompt_id"]
                for said in told:
                    said.clear()
                while not await asyncio.to_thread(client.get, f"/history/{prompt_id}"):
                    await asyncio.sleep(0.1)
                await asyncio.sleep(2)  # messages are spaced
            for socket in sockets:
                await socket.close()
            await asyncio.gather(*hearing)
        return prompt_id, told

    async def hear(socket, said):
        async for message in socket:
            data = json.loads(message.data) if message.type is aiohttp.WSMsgType.TEXT else {}
            if data.get("type") == "accel":
                said.append(data["data"])

    prompt_id, (asking, watching) = asyncio.run(asyncio.wait_for(two_visitors(), 300))
    told = [message for message in asking if message["event"] == "node_lines" and message["prompt_id"] == prompt_id]
    assert ["12:2" in message["lines"] for message in told] == [True]
    assert any(message["event"] == "run_end" for message in watching)
    assert speeds_up not in told[0]["lines"]
    assert not [message for message in watching if {"lines", "node", "prompt_id"} & set(message)]
