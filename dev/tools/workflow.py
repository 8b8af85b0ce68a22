"""API-format workflows: loaded, changed, and with this pack's nodes taken out. Graphs that come in stay as they are."""

import copy
import json
import re
from pathlib import Path

from dev import ROOT, Problem

from .client import Graph

TEMPLATES = ROOT / "example_workflows"
TEXT_TO_IMAGE = TEMPLATES / "api" / "text_to_image.json"

PASSED_ON = {
    "AccelSpeedUp": ("model", "vae"),
    "AccelModel": ("model",),
    "AccelDeepCache": ("model",),
    "AccelTextEncoder": ("clip",),
    "AccelVAESkipCompile": ("vae",),
}
"""Node class → the inputs that its outputs are in place of."""


def api_form(template: str) -> Path:
    """The API form of a template: "08 Image to image, any size" has api/image_to_image_any_size.json."""
    words = re.findall(r"[a-z0-9]+", template.lower())
    return TEMPLATES / "api" / f"{'_'.join(words[1:])}.json"


def models() -> set[tuple[str, str]]:
    """What the templates load: (folder of models, file)."""
    saved = (json.loads(path.read_text(encoding="utf-8")) for path in TEMPLATES.glob("*.json"))
    nodes = [node for each in saved for graph in graphs(each).values() for node in graph["nodes"]]
    return {(each["directory"], each["name"]) for node in nodes for each in node["properties"].get("models", ())}


def graphs(saved: Graph) -> dict[str, Graph]:
    """The graphs of a workflow as the page saves it: its own under "", subgraphs under their ids."""
    return {"": saved, **{each["id"]: each for each in saved.get("definitions", {}).get("subgraphs", ())}}


def load(path: Path = TEXT_TO_IMAGE) -> Graph:
    """The graph in the file `path`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Problem(f"No workflow at {path}.") from None


def change(graph: Graph, inputs: dict[str, dict]) -> Graph:
    """The graph with new inputs: node class → input → value, for every node of that class.

    Raises:
        Problem: the graph has no node of a class.
    """
    changed = copy.deepcopy(graph)
    for class_type, values in inputs.items():
        nodes = [node for node in changed.values() if node["class_type"] == class_type]
        if not nodes:
            raise Problem(f"The workflow has no {class_type} node.")
        for node in nodes:
            node["inputs"].update(values)
    return changed


def bypass(graph: Graph, *classes: str) -> Graph:
    """The graph as it would be without nodes of these classes, by default all of this pack; everything else equal."""
    plain = copy.deepcopy(graph)
    for node_id, node in graph.items():
        kind = node["class_type"]
        if classes and kind not in classes:
            continue
        if kind in PASSED_ON:
            # From `plain`: what feeds this node may itself have been replaced already.
            given = plain[node_id]["inputs"]
            _reconnect(plain, node_id, {slot: given.get(name) for slot, name in enumerate(PASSED_ON[kind])})
            del plain[node_id]
    return plain


def _reconnect(graph: Graph, node_id: str, outputs: dict[int, object]) -> None:
    """Give every input fed by `node_id`'s output what `outputs` names for it."""
    for node in graph.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list) and len(value) == 2 and value[0] == node_id and value[1] in outputs:
                node["inputs"][name] = outputs[value[1]]
