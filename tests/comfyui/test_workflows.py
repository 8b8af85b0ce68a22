"""The example workflows: both formats describe one graph, and ComfyUI's own validation accepts it."""

import asyncio
import copy
import json
from pathlib import Path

import pytest
from comfy_api.latest import io

FOLDER = Path(__file__).resolve().parents[2] / "example_workflows"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
CHECKPOINT = "v1-5-pruned-emaonly-fp16.safetensors"
CONTROL = "control_v11p_sd15_scribble_fp16.safetensors"
PICTURE = "example.png"
NOTES = {"Note", "MarkdownNote"}  # exist in the editor alone


def opened(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def graph(name: str) -> dict:
    return json.loads((FOLDER / "api" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def core_nodes(monkeypatch, tmp_path):
    """Core's nodes and ours in core's registry, and folders that hold the models and the picture."""
    import folder_paths
    from comfy_accel.nodes import NODES

    import nodes

    for name in (CHECKPOINT, CONTROL, PICTURE):
        (tmp_path / name).touch()
    for node in NODES:
        node.GET_SCHEMA()
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, node.define_schema().node_id, node)
    for folder in ("checkpoints", "controlnet"):
        _, extensions = folder_paths.folder_names_and_paths[folder]
        monkeypatch.setitem(folder_paths.folder_names_and_paths, folder, ([str(tmp_path)], extensions))
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    monkeypatch.setattr(folder_paths, "input_directory", str(tmp_path))
    return nodes.NODE_CLASS_MAPPINGS


def validate(prompt: dict) -> tuple[bool, dict]:
    """Whether core takes the prompt, and what it says about each node that it does not take."""
    import execution

    valid, _error, _outputs, node_errors = asyncio.run(execution.validate_prompt("test", prompt, None))
    return valid, node_errors


def test_there_are_workflows_for_text_and_for_images():
    assert {"text_to_image", "image_to_image"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_both_formats_name_the_same_nodes_and_links(name):
    nodes = {str(node["id"]): node for node in opened(name)["nodes"] if node["type"] not in NOTES}
    api = graph(name)
    assert {key: node["class_type"] for key, node in api.items()} == {key: node["type"] for key, node in nodes.items()}
    links = {link[0]: [str(link[1]), link[2]] for link in opened(name)["links"]}
    for key, node in nodes.items():
        linked = {slot["name"]: links[slot["link"]] for slot in node["inputs"] if slot["link"] is not None}
        assert linked == {slot: value for slot, value in api[key]["inputs"].items() if isinstance(value, list)}


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_has_a_thumbnail(name):
    assert (FOLDER / f"{name}.jpg").read_bytes()[:3] == b"\xff\xd8\xff"


@pytest.mark.parametrize("name", NAMES)
def test_core_accepts_the_graph(name, core_nodes):
    assert validate(graph(name)) == (True, {})


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_names_every_widget_of_our_nodes_and_no_other_input(name, core_nodes):
    ours = {key: node for key, node in graph(name).items() if node["class_type"].startswith("Accel")}
    assert ours
    for node in ours.values():
        inputs = core_nodes[node["class_type"]].define_schema().inputs
        # What is optional and has no widget is named only where it is connected.
        needed = {declared.id for declared in inputs if isinstance(declared, io.WidgetInput) or not declared.optional}
        assert needed <= set(node["inputs"]) <= {declared.id for declared in inputs}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("width", 0, "width is 0; it must be from 16 to 16384 pixels."),
        ("height", 16385, "height is 16385; it must be from 16 to 16384 pixels."),
        ("multiple", "7", "multiple is '7'; it must be one of: from model, 8, 16, 32, 64,"),
        ("mode", "sideways", "mode is 'sideways'; it must be one of: nearest, up, down."),
    ],
)
def test_a_wrong_size_is_refused_with_what_is_right(name, value, reason, core_nodes):
    prompt = copy.deepcopy(graph("text_to_image"))
    key = next(key for key, node in prompt.items() if node["class_type"] == "AccelResolutionSnap")
    prompt[key]["inputs"][name] = value
    valid, node_errors = validate(prompt)
    assert not valid
    assert any(reason in said["details"] for said in node_errors[key]["errors"])
