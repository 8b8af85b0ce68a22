"""Text on our nodes: what a run gained, and what a node did; it stays, is saved, and changes nothing else."""

import json

import pytest
from kit.pages import EVERY_SETUP, SAY, screenshot

pytestmark = pytest.mark.browser
in_all = pytest.mark.parametrize("setup", EVERY_SETUP, indirect=True)

ADD = """
type => {
    const node = window.LiteGraph.createNode(type);
    window.app.graph.add(node);
    node.pos = [300 + 400 * (window.app.graph.nodes.length - 1), 200];
    return String(node.id);
}
"""
TEXTS = "() => [...document.querySelectorAll('.accel-node-text')].map(element => element.textContent)"
WORKFLOW = "() => (window.app.graph.rootGraph ?? window.app.graph).id"
SAVED = "() => JSON.stringify(window.app.graph.serialize())"
PROMPT = "async () => JSON.stringify((await window.app.graphToPrompt()).output)"
LOAD = "async text => { await window.app.loadGraphData(JSON.parse(text)); }"

LINE = [
    {"code": "line_times", "fields": {"times": "1.31"}, "reason": "1.31×"},
    {"code": "line_saved", "fields": {"seconds": "2.1"}, "reason": "2.1 s saved"},
    {"code": "line_paid_back", "fields": {"images": 7}, "reason": "paid back after 7 images"},
]
SAID = "1.31× · 2.1 s saved · paid back after 7 images"


def until_shown(page, *texts):
    page.wait_for_function(
        f"texts => JSON.stringify(({TEXTS})()) === texts",
        arg=json.dumps(texts, ensure_ascii=False, separators=(",", ":")),
    )


@in_all
def test_the_line_of_a_run_stays_on_its_node_and_in_the_saved_workflow(page):
    node = page.evaluate(ADD, "AccelSpeedUp")
    page.evaluate(ADD, "KSampler")
    before = page.evaluate(PROMPT)
    workflow = page.evaluate(WORKFLOW)
    compiling = {"event": "compiling", "node": node, "name": "ResBlock", "number": 2, "of": 5, "stage": "build"}
    page.evaluate(SAY, {**compiling, "workflow": "another"})
    assert page.evaluate(TEXTS) == []
    page.evaluate(SAY, {**compiling, "workflow": workflow})
    until_shown(page, "Compiling ResBlock, 2 of 5 · building kernels")
    lines = {node: LINE, "2": LINE, "99": LINE}
    page.evaluate(SAY, {"event": "run_end", "workflow": workflow, "lines": lines})
    until_shown(page, SAID)  # and not on the sampler, which is not ours
    page.wait_for_timeout(300)
    screenshot(page, "node-text")
    box = page.locator(".accel-node-text").bounding_box()
    assert box["height"] >= 18 and box["width"] > 100
    assert page.evaluate(PROMPT) == before
    saved = page.evaluate(SAVED)
    values = next(found["widgets_values"] for found in json.loads(saved)["nodes"] if found["type"] == "AccelSpeedUp")
    assert values == ["Exact"]
    page.evaluate(LOAD, saved)
    until_shown(page, SAID)
    assert page.evaluate(PROMPT) == before


@in_all
def test_a_run_of_a_workflow_that_is_not_open_is_told_when_it_is(page):
    page.evaluate(ADD, "AccelSpeedUp")
    saved = page.evaluate(SAVED)
    workflow = page.evaluate(WORKFLOW)
    page.evaluate("() => window.app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    node = page.evaluate(ADD, "AccelSpeedUp")
    page.evaluate(SAY, {"event": "run_end", "workflow": workflow, "lines": {node: LINE}})
    page.wait_for_timeout(300)
    assert page.evaluate(TEXTS) == [], "a node of the same id in another workflow"
    page.evaluate(LOAD, saved)
    until_shown(page, SAID)


@in_all
def test_a_node_shows_what_it_did(page):
    page.evaluate(ADD, "AccelSnapSize")
    page.evaluate("() => window.app.graph.nodes[0].onExecuted({ text: ['720×960 → 704×960, 2.2 % narrower'] })")
    until_shown(page, "720×960 → 704×960, 2.2 % narrower")
