"""A fleet's prompts, without Ray: the key that one is routed by, and its results, published once."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dev.tools import workflow
from fleet import results as fleet_results
from fleet.results import Results, failed
from fleet.routing import LONGEST, routing_key
from fleet.settings import Settings

PACK = Path(__file__).resolve().parents[2]


def prompt(width=512, height=768, batch_size=1, checkpoint="a.safetensors", **more):
    return {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": checkpoint}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "words"}},
        "3": {
            "class_type": "EmptyLatentImage",
            "inputs": {"width": width, "height": height, "batch_size": batch_size, **more},
        },
    }


def test_key_is_the_model_and_the_shape_alone():
    asked = prompt()
    asked["2"]["inputs"]["text"] = "other words"
    in_another_order = dict(reversed(prompt().items()))
    assert routing_key(asked) == routing_key(in_another_order) == routing_key(prompt()) == "a.safetensors 512x768x1"
    others = [prompt(768, 512), prompt(batch_size=2), prompt(checkpoint="b.safetensors"), prompt(length=9)]
    assert len({routing_key(other) for other in [prompt(), *others]}) == 5


@pytest.mark.parametrize(
    "unknown",
    [
        prompt(width=["9", 0]),
        prompt(checkpoint=["9", 0]),
        {"1": prompt()["1"]},
        {},
        None,
        ["1"],
        {"1": None, "2": {"inputs": None}, "3": {"inputs": {"width": 1, "height": 1, "batch_size": True}}},
    ],
    ids=["size from a node", "model from a node", "no latent", "empty", "nothing", "a list", "nonsense"],
)
def test_prompt_that_does_not_say_what_it_runs_has_no_key(unknown):
    assert routing_key(unknown) == ""


def test_key_can_be_sent_whatever_the_model_is_called():
    assert routing_key(prompt(checkpoint="\ud800.safetensors")).encode() == b"?.safetensors 512x768x1"
    assert len(routing_key(prompt(checkpoint="x" * 9999))) == LONGEST


@pytest.mark.parametrize(
    "path", sorted((PACK / "example_workflows" / "api").glob("*.json")), ids=lambda path: path.stem
)
def test_example_workflow_that_begins_empty_has_a_key(path):
    graph = workflow.load(path)
    sizes = [node["inputs"].get("width") for node in graph.values() if node["class_type"].startswith("Empty")]
    assert routing_key(graph) or not sizes or any(isinstance(size, list) for size in sizes)


def entry(filename="a_00001_.png", subfolder="", kind="output"):
    files = [{"filename": filename, "subfolder": subfolder, "type": kind}]
    return {"prompt": [1, "id", {}, {}, []], "outputs": {"9": {"images": files, "animated": [False]}}, "status": {}}


@pytest.fixture
def made(tmp_path):
    """Where a ComfyUI puts its files, with one image in it."""
    folder = tmp_path / "comfyui"
    (folder / "sub").mkdir(parents=True)
    (folder / "a_00001_.png").write_bytes(b"first")
    (folder / "sub" / "b.png").write_bytes(b"below")
    return {"output": folder}


def test_published_file_is_where_its_history_says(tmp_path, made):
    results = Results(tmp_path / "results")
    for number, asked in enumerate((entry(), entry("b.png", "sub"))):
        (file,) = results.publish(f"id{number}", asked, made)["outputs"]["9"]["images"]
        assert results.entry(f"id{number}")["outputs"]["9"]["images"] == [file]
        path = results.file(file["type"], file["subfolder"], file["filename"])
        assert path.read_bytes() == (b"first", b"below")[number]
    assert (made["output"] / "a_00001_.png").exists()  # ComfyUI names it again where the same prompt runs again
    assert results.latest(10) == ["id0", "id1"] and results.latest(1) == ["id1"] and results.latest(0) == []


def test_second_run_of_a_prompt_publishes_nothing_and_has_the_first_ones_history(tmp_path, made):
    results = Results(tmp_path / "results")
    first = results.publish("id", entry(), made)
    (made["output"] / "a_00002_.png").write_bytes(b"second")
    assert results.publish("id", entry("a_00002_.png"), made) == first == results.entry("id")
    assert results.publish("id", failed("execution_error", [1, "id", {}, {}, []]), {}) == first
    files = [path.name for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert sorted(files) == ["a_00001_.png", "history.json"]


def test_of_runs_that_end_at_once_one_is_published(tmp_path, made):
    begin = threading.Barrier(6)

    def run(_):
        begin.wait()
        return Results(tmp_path / "results").publish("id", entry(), made)

    with ThreadPoolExecutor(6) as threads:
        got = list(threads.map(run, range(6)))
    assert all(one == got[0] for one in got)
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["id"]


def test_what_a_killed_run_left_half_published_goes_when_the_prompt_is_published(tmp_path, made):
    half = tmp_path / "results" / ".unfinished-id" / "0123" / "output"
    half.mkdir(parents=True)
    (half / "a_00001_.png").write_bytes(b"fir")
    results = Results(tmp_path / "results")
    assert results.latest(10) == []
    results.publish("other", entry(), made)
    assert half.exists()  # another prompt's may still be running
    results.publish("id", entry(), made)
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["id", "other"]


def test_run_whose_files_are_taken_by_the_first_ones_end_has_its_history(tmp_path, made, monkeypatch):
    results, link = Results(tmp_path / "results"), os.link

    def late(source, place):
        monkeypatch.setattr(fleet_results.os, "link", link)
        results.publish("id", entry(), made)
        link(source, place)

    monkeypatch.setattr(fleet_results.os, "link", late)
    (made["output"] / "a_00002_.png").write_bytes(b"second")
    late_entry = results.publish("id", entry("a_00002_.png"), made)
    assert late_entry["outputs"]["9"]["images"][0]["filename"] == "a_00001_.png"
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["id"]


def test_file_that_vanished_leaves_nothing_half_published(tmp_path, made):
    results = Results(tmp_path / "results")
    with pytest.raises(OSError):
        results.publish("id", entry("gone.png"), made)
    assert results.entry("id") is None and list((tmp_path / "results").iterdir()) == []


@pytest.mark.parametrize("name", ["a\0b.png", "\ud800.png"])
def test_name_that_no_file_can_have_is_in_the_history_alone(tmp_path, made, name):
    results = Results(tmp_path / "results")
    published = results.publish("id", entry(name), made)
    assert published == results.entry("id") and published["outputs"]["9"]["images"][0]["filename"] == name
    assert results.file("output", "id", name) is None


@pytest.mark.parametrize(("subfolder", "filename"), [("..", "secret"), ("sub/../..", "secret"), ("", "../secret")])
def test_file_that_a_node_has_put_elsewhere_stays_there(tmp_path, made, subfolder, filename):
    (tmp_path / "secret").write_text("s")
    results = Results(tmp_path / "results")
    results.publish("id", entry(filename, subfolder), made)
    assert [path.name for path in (tmp_path / "results").rglob("*")] == ["id", "history.json"]


def test_without_links_files_are_copied(tmp_path, made, monkeypatch):
    def refuse(*arguments):
        raise OSError("no links here")

    monkeypatch.setattr(fleet_results.os, "link", refuse)
    results = Results(tmp_path / "results")
    results.publish("id", entry(), made)
    assert results.file("output", "id", "a_00001_.png").read_bytes() == b"first"


@pytest.mark.parametrize(
    "names",
    [
        ("output", "id", "../history.json"),
        ("output", "id/../..", "secret"),
        ("output", "id", "../../../secret"),
        ("output", "..", "secret"),
        ("output", "", "secret"),
        ("input", "id", "a_00001_.png"),
        ("output", "id", "link.png"),
        ("output", "id", "a\0.png"),
    ],
)
def test_nothing_but_published_files_is_shown(tmp_path, made, names):
    (tmp_path / "secret").write_text("s")
    (tmp_path / "results" / "x").mkdir(parents=True)
    (tmp_path / "results" / "secret").write_text("s")
    results = Results(tmp_path / "results")
    results.publish("id", entry(), made)
    os.symlink(tmp_path / "secret", tmp_path / "results" / "id" / "output" / "link.png")
    assert results.file(*names) is None


@pytest.mark.parametrize("prompt_id", ["../x", "", ".unfinished-1", "a/b", "a" * 65, "a\n"])
def test_id_that_is_no_name_is_no_prompt(tmp_path, prompt_id):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "history.json").write_text("{}")
    results = Results(tmp_path / "results")
    assert results.entry(prompt_id) is None
    results.remove(prompt_id)
    assert (tmp_path / "x" / "history.json").exists()


def test_history_that_is_damaged_is_no_history(tmp_path):
    results = Results(tmp_path)
    (tmp_path / "id").mkdir()
    for text in ("{", "[" * 100_000):
        (tmp_path / "id" / "history.json").write_text(text)
        assert results.entry("id") is None


def test_settings_say_which_comfyui_and_when_it_has_no_gpu(tmp_path, monkeypatch):
    (tmp_path / "main.py").touch()
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    settings = Settings(results="/results", input="/in", flags=["--lowvram"])
    assert settings.tree() == tmp_path
    assert settings.all_flags() == ["--lowvram", "--input-directory", "/in", "--cpu"]
    assert Settings(results="/results", gpus=1).all_flags() == []
    with pytest.raises(ValueError, match="name its folder"):
        Settings(results="/results", comfyui=str(tmp_path / "none")).tree()
    with pytest.raises(ValueError, match="replica"):
        Settings(results="/results", replica=3)
    assert json.loads(settings.model_dump_json())["route"] == "graph"
