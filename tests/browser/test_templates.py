"""The example workflows in ComfyUI's own page: each opens whole and converts to the stored graph.

`ACCEL_UPDATE=1 python3 dev.py test tests/browser/test_templates.py` writes what is otherwise compared: the API form of
every workflow as the page converts it.
"""

import io
import json

import pytest
from kit.pages import CLASSIC, UPDATE, screenshot

from dev.tools import workflow
from dev.tools.comfyui import PACK_NAME

pytestmark = pytest.mark.browser

FOLDER = workflow.TEMPLATES
START = "01 Start here"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))

LATER = {"15 LTX 2.5 video"}
"""Has nodes that ComfyUI 0.3.75 does not have."""

UNKNOWN_NODES = """
() => [window.app.graph, ...window.app.graph.subgraphs?.values() ?? []].flatMap(({ nodes }) => nodes)
    .filter(node => node.has_errors || !(node.subgraph || node.type in window.LiteGraph.registered_node_types))
    .map(node => node.type)
"""
ALERTS = """
() => [...document.querySelectorAll('.p-toast-message-error, .p-toast-message-warn')].map(toast => toast.innerText)
"""
MASK = ".p-dialog-mask, [data-testid=dialog-overlay]"
CLOSE = """
() => [...document.querySelectorAll('.p-dialog-mask button, [role=dialog] button')]
    .find(({ ariaLabel, classList }) => /close/i.test(ariaLabel ?? '') || classList.contains('right-6'))?.click()
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

NOTE = {"x": 320, "y": 220, "width": 500, "height": 300}
LOOK_AT_NOTE = """
place => {
    const { ds, graph } = window.app.canvas;
    const note = graph.nodes.find(node => node.type === 'MarkdownNote');
    ds.scale = 1.6;
    ds.offset[0] = place.x / ds.scale - note.pos[0];
    ds.offset[1] = place.y / ds.scale - note.pos[1];
    window.app.canvas.setDirty(true, true);
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


def set_theme(page, theme: str) -> None:
    """ComfyUI's own dark or light colours."""
    page.evaluate("theme => window.app.extensionManager.setting.set('Comfy.ColorPalette', theme)", theme)
    page.wait_for_timeout(500)


def contrast(png: bytes) -> float:
    """WCAG's contrast of the text in a picture: of its commonest colour and of the one furthest from that."""
    from PIL import Image

    def luminance(colour) -> float:
        linear = [part / 3294.6 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    colours = sorted(((count, luminance(colour)) for count, colour in picture.getcolors(1 << 24)), reverse=True)
    ground = colours[0][1]
    often = [each for count, each in colours if count > 100]  # strokes, not a single pixel of theirs
    return max((max(ground, each) + 0.05) / (min(ground, each) + 0.05) for each in often)


def test_every_template_opens_whole_and_converts_to_the_stored_graph(page):
    complaints = []
    for name in NAMES:
        open_template(page, name)
        screenshot(page, name)
        unknown = page.evaluate(UNKNOWN_NODES)
        if name in LATER and unknown:
            page.evaluate(CLOSE)
            continue
        complaints += [f"{name}: unknown node {kind}" for kind in unknown]
        complaints += [f"{name}: {alert}" for alert in page.evaluate(ALERTS)]
        complaints += [f"{name}: {pair} overlap" for pair in page.evaluate(OVERLAPS)]
        complaints += [f"{name}: a dialog" for _ in range(page.locator(".p-dialog").count())]

        # As text: Playwright would turn JavaScript's undefined into null.
        converted = json.loads(page.evaluate("async () => JSON.stringify((await window.app.graphToPrompt()).output)"))
        stored = workflow.api_form(name)
        if UPDATE and page.setup == CLASSIC:
            stored.write_text(json.dumps(converted, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        elif meaning(converted) != meaning(json.loads(stored.read_text(encoding="utf-8"))):
            complaints.append(f"{name}: the page converts it to another graph than {stored.name} has")
    assert complaints + page.errors() == []


def test_start_here_is_the_first_of_our_templates(page):
    page.evaluate("() => window.app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    page.get_by_text(PACK_NAME, exact=True).first.click()
    titles = page.locator("[data-testid^='template-workflow-']")
    titles.first.wait_for()
    screenshot(page, "templates")
    assert START in titles.first.get_attribute("data-testid")
    page.evaluate(CLOSE)
    page.locator(MASK).first.wait_for(state="detached")


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_notes_are_readable_in_both_themes(page, theme):
    set_theme(page, theme)
    try:
        open_template(page, START)
        page.evaluate(LOOK_AT_NOTE, NOTE)
        page.wait_for_timeout(500)
        screenshot(page, f"note-{theme}")
        assert contrast(page.screenshot(clip=NOTE)) >= 4.5
    finally:
        set_theme(page, "dark")
