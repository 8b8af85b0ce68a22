"""Speed Up put in by mouse and keyboard, as people do: in a small graph, a subgraph, and ComfyUI's own templates."""

import json
import sysconfig
from pathlib import Path

import pytest
from kit.pages import CLASSIC, EVERY_SETUP, EXECUTE, READY, SAY, SET, get, screenshot, until

from dev.tools import workflow

from .test_node_text import LINE, LOAD, PROMPT, QUEUE, SAID, SAVED, TEXTS

pytestmark = pytest.mark.browser
in_all = pytest.mark.parametrize("setup", EVERY_SETUP, indirect=True)

NODE = "Accel: Speed Up"
SAMPLERS = ("KSampler", "KSamplerAdvanced", "CFGGuider", "BasicGuider")
OFFICIAL = 12, 8
"""How many of ComfyUI's templates, and in how many of them the sampler is inside a subgraph."""

GRAPH = "window.app.canvas.graph"
SMALL = """
() => {
    const { LiteGraph, app: { graph } } = window;
    const [loader, sampler] = ['CheckpointLoaderSimple', 'KSampler'].map(type => LiteGraph.createNode(type));
    for (const node of [loader, sampler]) graph.add(node);
    loader.connect(0, sampler, 0);
    sampler.pos = [900, 0];
    return [loader.id, sampler.id];
}
"""
LOOK = """
id => {
    const { canvas } = window.app;
    const { ds, graph } = canvas;
    canvas.auto_pan_speed = 0;  // what the mouse aims at stays where it is
    const node = graph.getNodeById(id);
    for (const scale of [0.8, 0.6, 0.45]) {
        ds.scale = scale;
        ds.offset = [1000 / scale - node.pos[0], 300 / scale - node.pos[1]];
        for (let x = 250; x < 700; x += 50)
            for (let y = 150; y < 700; y += 50) {
                const [left, top] = [x / scale - ds.offset[0], y / scale - ds.offset[1]];
                const isTaken = dx => [-40, 0, 80, 120].some(dy => graph.getNodeOnPos(left + dx, top + dy));
                if (![0, 80, 160, 240, 320].some(isTaken)) {
                    canvas.setDirty(true, true);
                    return [x, y];
                }
            }
    }
}
"""
"""Bring a node to the right; where there is room to the left of it."""
SLOT = """
([id, isInput, slot]) => {
    const { ds, graph, canvas } = window.app.canvas;
    const drawn = document.querySelector(`[data-slot-key="${id}-${isInput ? 'in' : 'out'}-${slot}"]`);
    if (drawn) {
        const { x, y, width, height } = drawn.getBoundingClientRect();
        return [x + width / 2, y + height / 2];
    }
    const [x, y] = graph.getNodeById(id).getConnectionPos(isInput, slot);
    const { left, top } = canvas.getBoundingClientRect();
    return [(x + ds.offset[0]) * ds.scale + left, (y + ds.offset[1]) * ds.scale + top];
}
"""
SHOW = """
place => {
    const { app } = window;
    const root = app.graph.rootGraph ?? app.graph;
    app.canvas.setGraph(place === null ? root : root.getNodeById(place).subgraph);
}
"""
MENU = "document.querySelector('.litemenu-entry') !== null"
NO_QUESTIONS = ["Comfy.Workflow.ShowMissingModelsWarning", False]


def drag(page, start, end):
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(start[0] - 40, start[1] + 40, steps=4)
    page.mouse.move(*end, steps=8)
    page.wait_for_timeout(150)
    page.mouse.up()


def put_in(page, sampler, words=NODE):
    """Take the link from the sampler's model, let it go where there is room, take Speed Up from the menu that opens,
    and draw a link from that to the sampler; the id of the node that came."""
    room = page.evaluate(LOOK, sampler)
    page.wait_for_timeout(500)
    slot = page.evaluate(f"id => {GRAPH}.getNodeById(id).findInputSlot('model')", sampler)
    until(page, MENU, lambda: drag(page, page.evaluate(SLOT, [sampler, True, slot]), room))
    page.locator(".litemenu-entry", has_text="Search").first.click()
    page.wait_for_function("document.activeElement.tagName === 'INPUT'")
    page.keyboard.type(words)
    page.locator("[role=option], [data-testid=result-item]").filter(has_text=NODE).first.wait_for()
    ours = f"{GRAPH}.nodes.find(({{ type, inputs }}) => type === 'AccelSpeedUp' && inputs[0].link !== null)"
    until(page, ours, lambda: page.keyboard.press("Enter"))
    # In newer frontends the node hangs on the pointer, a moment later, until it is put down.
    page.wait_for_timeout(700)
    until(page, f"!({ours}).flags.ghost", lambda: page.mouse.click(*room))
    node = page.evaluate(f"({ours}).id")
    page.wait_for_timeout(300)
    is_linked = f"{GRAPH}.getNodeById({json.dumps(sampler)}).inputs[{slot}].link !== null"
    until(
        page,
        is_linked,
        lambda: drag(page, *page.evaluate(f"ends => ends.map({SLOT})", [[node, False, 0], [sampler, True, slot]])),
    )
    return node


def prompt_of(page):
    """What would be sent, without seeds, which change with each queueing."""
    found = json.loads(page.evaluate(PROMPT))
    for node in found.values():
        node["inputs"] = {name: value for name, value in node["inputs"].items() if "seed" not in name}
        node.pop("_meta", None)
    return found


def with_speed_up(prompt, sampler, node):
    """The prompt with a Speed Up before the sampler's model, and nothing else changed."""
    prompt = json.loads(json.dumps(prompt))
    model = prompt[sampler]["inputs"]["model"]
    prompt[sampler]["inputs"]["model"] = [node, 0]
    prompt[node] = {"class_type": "AccelSpeedUp", "inputs": {"quality": "Exact", "model": model}}
    return prompt


def press(page, keys, condition):
    """Press the keys until the condition holds; the page takes note of one change after another."""
    page.mouse.move(800, 815)
    until(page, condition, lambda: page.keyboard.press(keys))
    page.wait_for_timeout(500)


def runs_goes_and_comes_back(page, prompt, node, before):
    """A run's line is on the node and nowhere in the file; Ctrl+Z takes the node away and leaves nothing of ours; the
    file has the same prompt when it is opened."""
    page.evaluate(QUEUE, prompt)
    page.evaluate(SAY, {"event": "node_lines", "prompt_id": prompt, "lines": {node: LINE}})
    page.wait_for_function(f"said => ({TEXTS})().includes(said)", arg=SAID)
    exported, saved = prompt_of(page), page.evaluate(SAVED)
    assert "accel_text" not in saved + json.dumps(exported) and SAID not in saved
    press(page, "Control+z", "!JSON.stringify(window.app.graph.serialize()).includes('Accel')")
    for _ in range(4):  # the links that were drawn are steps of their own
        if prompt_of(page) == before:
            break
        page.keyboard.press("Control+z")
        page.wait_for_timeout(500)
    assert prompt_of(page) == before
    page.evaluate(LOAD, saved)
    page.wait_for_timeout(500)
    assert prompt_of(page) == exported
    assert page.evaluate(TEXTS) == []


@in_all
def test_speed_up_is_put_in_from_the_link_menu_undone_and_opened_again(page):
    loader, sampler = page.evaluate(SMALL)
    before = prompt_of(page)
    node = put_in(page, sampler)
    screenshot(page, "put-in")
    assert prompt_of(page) == with_speed_up(before, str(sampler), str(node))
    runs_goes_and_comes_back(page, "by mouse", str(node), before)


@in_all
def test_the_page_s_own_command_takes_speed_up_into_a_subgraph(page):
    page.reload()  # newer pages take no link by mouse right after a file was opened
    page.wait_for_function(READY)
    _, sampler = page.evaluate(SMALL)
    node = put_in(page, sampler)
    alone = prompt_of(page)
    page.mouse.click(700, 780)  # the keys are for the graph
    until(page, f"{GRAPH}.nodes.every(({{ selected }}) => selected)", lambda: page.keyboard.press("Control+a"))
    page.evaluate(EXECUTE, "Comfy.Graph.ConvertToSubgraph")
    page.wait_for_function("window.app.graph.nodes.length === 1 && window.app.graph.nodes[0].subgraph")
    outer = page.evaluate("window.app.graph.nodes[0].id")
    inside = json.loads(json.dumps(prompt_of(page)).replace(f'"{outer}:', '"'))
    assert inside == alone
    page.evaluate(QUEUE, "subgraph")
    page.evaluate(SAY, {"event": "node_lines", "prompt_id": "subgraph", "lines": {f"{outer}:{node}": LINE}})
    page.wait_for_function(f"said => ({TEXTS})().includes(said)", arg=SAID)
    screenshot(page, "converted")
    press(page, "Control+z", "window.app.graph.nodes.length === 3")
    assert prompt_of(page) == alone


@pytest.mark.parametrize("setup", EVERY_SETUP[-1:], indirect=True)
def test_who_types_what_others_call_it_finds_speed_up_first(page, server):
    if "search_aliases" not in json.loads(get(server, "/object_info"))["AccelSpeedUp"]:
        pytest.skip("this core knows no aliases")
    for words in ("faster", "speed up", "optimize", "performance", "teacache", "first block cache"):
        until(page, "document.activeElement.tagName === 'INPUT'", lambda: page.mouse.dblclick(900, 450))
        page.keyboard.type(words)
        results = page.locator("[role=option], [data-testid=result-item]")
        results.filter(has_text=NODE).first.wait_for()
        assert NODE in results.first.inner_text(), words
        page.keyboard.press("Escape")


def official() -> list[Path]:
    """ComfyUI's templates that are installed."""
    return sorted(Path(sysconfig.get_path("purelib")).glob("comfyui_workflow_templates_media_*/templates/*.json"))


def first_sampler(graph) -> int | None:
    """The first sampler that takes part and has its model from a node beside it."""
    links = [link if isinstance(link, dict) else {"id": link[0], "origin_id": link[1]} for link in graph["links"]]
    beside = {link["id"] for link in links if link["origin_id"] >= 0}
    for node in graph["nodes"]:
        model = next((slot for slot in node.get("inputs", ()) if slot["name"] == "model"), {})
        if node["type"] in SAMPLERS and not node.get("mode") and model.get("link") in beside:
            return node["id"]
    return None


def place_of_sampler(saved, known) -> tuple[int | None, int] | None:
    """The subgraph's node, None for none, and the sampler; None where a node is unknown or there is no sampler."""
    graphs = workflow.graphs(saved)
    types = {node["type"] for graph in graphs.values() for node in graph["nodes"]}
    if not types <= known | graphs.keys():
        return None
    places = {
        node["id"]: graphs[node["type"]] for node in saved["nodes"] if node["type"] in graphs and not node["mode"]
    }
    for place, graph in {**places, None: saved}.items():
        sampler = first_sampler(graph)
        if sampler is not None:
            return place, sampler
    return None


def chosen(known) -> list[tuple]:
    """(name, workflow, place of its sampler) of as many templates as `OFFICIAL` says, or as have subgraphs."""
    found = []
    for path in official():
        saved = json.loads(path.read_text(encoding="utf-8"))
        place = place_of_sampler(saved, known) if isinstance(saved, dict) and "nodes" in saved else None
        if place is not None:
            found.append((path.stem, saved, place))
    every, within = OFFICIAL
    inside = [each for each in found if each[2][0] is not None][:within]
    return inside + [each for each in found if each[2][0] is None][: every - len(inside)]


@pytest.mark.thorough  # minutes
@pytest.mark.parametrize("setup", [CLASSIC], indirect=True)
def test_speed_up_is_put_into_official_templates_and_taken_out_again(page, server):
    known = {*json.loads(get(server, "/object_info")), "Note", "MarkdownNote", "Reroute", "PrimitiveNode"}
    templates = chosen(known)
    assert len(templates) == OFFICIAL[0]
    page.evaluate(SET, NO_QUESTIONS)
    wrong = {}
    for name, saved, (outer, sampler) in templates:
        try:
            page.evaluate(LOAD, json.dumps(saved))
            page.wait_for_timeout(800)
            before = prompt_of(page)
            assert "ccel" not in page.evaluate(SAVED)
            page.evaluate(SHOW, outer)
            page.wait_for_timeout(800)
            node = put_in(page, sampler)
            screenshot(page, f"official {name}")
            page.evaluate(SHOW, None)
            inside = "" if outer is None else f"{outer}:"
            assert prompt_of(page) == with_speed_up(before, f"{inside}{sampler}", f"{inside}{node}")
            runs_goes_and_comes_back(page, name, f"{inside}{node}", before)
        except Exception as error:
            wrong[name] = str(error)[:2000]
    assert wrong == {}
