"""The example workflows in ComfyUI's own page: each opens whole and converts to the stored graph, and one runs.

`ACCEL_UPDATE=1 python3 dev.py test tests/browser/test_templates.py` writes what is otherwise compared: the API form of
every workflow as the page converts it, and its thumbnail, which is the opened workflow around its orange groups.
"""

import io
import json
from pathlib import Path

import pytest
from editor_page import CLASSIC, IN_NEWEST, SETUPS, UPDATE, get, screenshot

from bench.comfyui import PACK_NAME

pytestmark = pytest.mark.browser

FOLDER = Path(__file__).resolve().parents[2] / "example_workflows"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))

UNKNOWN_NODES = """
() => window.app.graph.nodes
    .filter(node => node.has_errors || !(node.type in window.LiteGraph.registered_node_types))
    .map(node => node.type)
"""
ALERTS = """
() => [...document.querySelectorAll('.p-toast-message-error, .p-toast-message-warn')].map(toast => toast.innerText)
"""
OVERLAPS = """
() => {
    const drawn = [...document.querySelectorAll('.lg-node')];
    const boxes = drawn.length
        ? drawn.map(part => [part.innerText.split('\\n')[0], part.getBoundingClientRect()])
              .map(([name, box]) => [name, box.x, box.y, box.right, box.bottom])
        : window.app.graph.nodes.map(node => [node.title, node.pos[0], node.pos[1] - 30,
              node.pos[0] + node.size[0], node.pos[1] + node.size[1]]);
    const pairs = [];
    boxes.forEach((a, at) => boxes.slice(at + 1).forEach(b => {
        if (a[1] < b[3] && b[1] < a[3] && a[2] < b[4] && b[2] < a[4]) pairs.push(`${a[0]} and ${b[0]}`);
    }));
    return pairs;
}
"""

THUMBNAIL = (768, 528)
# What neither the sidebar nor the bars cover, of the page of 1600 by 830.
ROOM = {"x": 80, "y": 100, "width": 931, "height": 640}
FOCUS = """
room => {
    const { groups } = window.app.graph;
    const box = chosen => chosen.map(({ pos: [x, y], size: [w, h] }) => [x, y, x + w, y + h]).reduce(
        (a, b) => [Math.min(a[0], b[0]), Math.min(a[1], b[1]), Math.max(a[2], b[2]), Math.max(a[3], b[3])]);
    // The largest of the pack's own groups, of those where there is something to set.
    const hasSettings = ({ type, widgets }) => type.startsWith('Accel') && widgets?.length > 2;
    const isOurs = ({ color, nodes }) => color === '#b06634' && nodes.some(hasSettings);
    for (const group of groups) group.recomputeInsideNodes();
    const area = ({ size: [w, h] }) => w * h;
    const [ours] = groups.filter(isOurs).sort((a, b) => area(b) - area(a)).map(group => box([group]));
    const all = box(groups);
    const width = Math.max(1250, (ours[3] - ours[1] + 60) * room.width / room.height);
    const middle = (ours[0] + ours[2]) / 2;
    const left = Math.max(all[0] - 30, Math.min(middle - width / 2, all[2] + 30 - width));
    const { ds } = window.app.canvas;
    ds.scale = room.width / width;
    ds.offset[0] = room.x / ds.scale - left;
    ds.offset[1] = room.y / ds.scale - all[1] + 20;
    window.app.canvas.setDirty(true, true);
}
"""

SMALL = """
seed => {
    const changes = {
        AccelModel: { backend: 'eager' },
        AccelResolutionSnap: { width: 64 + 8 * seed, height: 96, multiple: '8' },
        KSampler: { steps: 2, seed },
    };
    for (const node of window.app.graph.nodes)
        for (const [name, value] of Object.entries(changes[node.type] ?? {}))
            node.widgets.find(widget => widget.name === name).value = value;
}
"""
WATCH = """
() => {
    const seen = window.accelSeen = { progress: [], ended: null };
    const { api, graph } = window.app;
    const listen = (name, handle) => api.addEventListener(name, event => handle(event.detail));
    listen('progress', ({ node, value, max }) =>
        seen.progress.push([graph.getNodeById(node)?.type, value, max]));
    for (const end of ['execution_success', 'execution_error', 'execution_interrupted'])
        listen(end, detail => { seen.ended = [end, detail.exception_message ?? null]; });
}
"""


def open_template(page, name: str) -> None:
    """What a click on the template does: fetch it from where the page would, and load it."""
    page.evaluate(
        """async ([pack, name]) => {
            const answer = await fetch(`/api/workflow_templates/${pack}/${name}.json`);
            await window.app.loadGraphData(await answer.json(), true, true, name);
        }""",
        [PACK_NAME, name],
    )
    page.wait_for_timeout(1000)  # the page warns of what is missing a moment later


def meaning(graph: dict) -> dict:
    """What a graph does: titles, and notes of where a node comes from, differ between versions."""
    return {key: (node["class_type"], node["inputs"]) for key, node in graph.items()}


def thumbnail(page, path: Path) -> None:
    from PIL import Image

    page.evaluate(FOCUS, ROOM)
    page.wait_for_timeout(500)
    picture = Image.open(io.BytesIO(page.screenshot(clip=ROOM))).convert("RGB")
    picture.resize(THUMBNAIL, Image.Resampling.LANCZOS).save(path, quality=85, optimize=True)


def test_every_template_opens_whole_and_converts_to_the_stored_graph(page):
    complaints = []
    for name in NAMES:
        open_template(page, name)
        screenshot(page, name)
        complaints += [f"{name}: unknown node {kind}" for kind in page.evaluate(UNKNOWN_NODES)]
        complaints += [f"{name}: {alert}" for alert in page.evaluate(ALERTS)]
        complaints += [f"{name}: {pair} overlap" for pair in page.evaluate(OVERLAPS)]
        complaints += [f"{name}: a dialog" for _ in range(page.locator(".p-dialog").count())]

        # As text: Playwright would turn JavaScript's undefined into null.
        converted = json.loads(page.evaluate("async () => JSON.stringify((await window.app.graphToPrompt()).output)"))
        stored = FOLDER / "api" / f"{name}.json"
        if UPDATE and page.setup == CLASSIC:
            stored.write_text(json.dumps(converted, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        elif UPDATE and page.setup == IN_NEWEST:
            thumbnail(page, FOLDER / f"{name}.jpg")
        elif meaning(converted) != meaning(json.loads(stored.read_text(encoding="utf-8"))):
            complaints.append(f"{name}: the page converts it to another graph than {stored.name} has")
    assert complaints + page.errors() == []


def test_a_template_runs_and_its_nodes_show_progress_and_results(page):
    open_template(page, "text_to_image")
    page.evaluate(SMALL, SETUPS.index(page.setup))  # another image than in the setup before
    page.evaluate(WATCH)
    page.locator("button[data-testid=queue-button], [data-testid=queue-button] button").first.click()
    page.wait_for_function("() => window.accelSeen.ended", timeout=120_000)
    seen = page.evaluate("() => window.accelSeen")
    assert seen["ended"] == ["execution_success", None]
    assert [entry for entry in seen["progress"] if entry[0] == "KSampler"][-1] == ["KSampler", 2, 2]
    page.wait_for_timeout(1000)
    screenshot(page, "text_to_image-done")
    shown = page.evaluate(
        "() => Object.fromEntries(window.app.graph.nodes.map(({ id, type }) => [type, window.app.nodeOutputs[id]]))"
    )
    assert len(shown["SaveImage"]["images"]) == 1
    assert shown["AccelResolutionSnap"]["text"] == [f"{64 + 8 * SETUPS.index(page.setup)}×96, as asked"]


def test_the_page_is_offered_every_template_with_its_thumbnail(any_server):
    offered = json.loads(get(any_server, "/api/workflow_templates"))
    assert sorted(offered[PACK_NAME]) == NAMES
    for name in NAMES:
        picture = get(any_server, f"/api/workflow_templates/{PACK_NAME}/{name}.jpg")
        assert picture[:3] == b"\xff\xd8\xff"
        assert len(picture) < 120_000
