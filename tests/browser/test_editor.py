"""The nodes in ComfyUI's own page, in English and Chinese, with help.

`ACCEL_UPDATE=1 python3 dev.py test tests/browser/test_editor.py` takes the pictures on the help pages anew, in the
newest frontend.
"""

import io
import json

import pytest
from kit.pages import IN_NEWEST, UPDATE, get, screenshot, set_setting, until

from dev import ROOT

pytestmark = pytest.mark.browser

DOCS = ROOT / "web" / "docs"
NODES = sorted(path.parent.name for path in DOCS.glob("*/en.md"))

LOSES_TEXTS = "1.32."
"""A frontend that puts its own texts of a language, which it loads late, in the place of every custom node's."""

ALONE = """
async type => {
    const { app, LiteGraph } = window;
    await app.extensionManager.command.execute('Comfy.ClearWorkflow');
    const node = LiteGraph.createNode(type);
    app.graph.add(node);
    node.pos = [300, 100];
    app.canvas.ds.scale = 1;
    app.canvas.ds.offset = [0, 0];
    app.canvas.setDirty(true, true);
    return node.title;
}
"""
SELECT = "() => { window.app.canvas.deselectAll(); window.app.canvas.selectNode(window.app.graph.nodes[0]); }"
HELP = """
([type, title]) => {
    const help = document.querySelector('.node-help-content');
    const picture = help?.querySelector('img');
    return help?.querySelector('h1')?.innerText === title && picture?.src.includes(`/docs/${type}/`)
        && picture.complete && picture.naturalWidth > 100;
}
"""


def picture(page, name: str) -> None:
    """Take the picture of the only node for its help page."""
    from PIL import Image

    page.evaluate("() => { window.app.canvas.ds.scale = 1.3; window.app.canvas.setDirty(true, true); }")
    page.mouse.move(1500, 700)
    page.wait_for_timeout(500)
    box = page.locator("[data-node-id]").first.bounding_box()
    edge = 14  # half of a socket
    clip = {"x": box["x"] - edge, "y": box["y"] - edge, "width": box["width"] + 2 * edge, "height": box["height"] + 28}
    path = DOCS / name / "en.png"  # for every language: a browser without Chinese letters would draw boxes
    path.parent.mkdir(exist_ok=True)
    Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB").quantize(dither=0).save(path, optimize=True)


def show_every_help_page(page, language: str, titles: dict[str, str]) -> dict[str, str]:
    """Open each node's help page as a click on its "i" does, and see its title and picture; node → title on the graph.

    titles: node → the title of its help page.
    """
    seen = {}
    for name in NODES:
        seen[name] = page.evaluate(ALONE, name)
        if UPDATE and page.setup == IN_NEWEST and language == "en":
            picture(page, name)
            page.evaluate(ALONE, name)
        until(page, "document.querySelector('[data-testid=info-button]')", lambda: page.evaluate(SELECT))
        page.wait_for_timeout(200)
        if not page.evaluate(HELP, [name, titles[name]]):
            page.get_by_test_id("info-button").first.dispatch_event("click")
        page.wait_for_function(HELP, arg=[name, titles[name]], timeout=20_000)
    screenshot(page, f"help-{language}")
    page.evaluate("() => { window.app.extensionManager.sidebarTab.activeSidebarTabId = null; }")
    return seen


def test_every_help_page_opens_with_its_picture(page, any_server):
    titles = {name: node["display_name"] for name, node in our_nodes(any_server).items() if name in NODES}
    assert show_every_help_page(page, "en", titles) == titles


def test_in_chinese_nodes_and_help_pages_are_chinese(open_page, server, any_server):
    set_setting(server, "Comfy.Locale", "zh")
    try:
        page = open_page()
    finally:
        set_setting(server, "Comfy.Locale", "en")
    texts = json.loads(get(any_server, "/i18n"))["zh"]["nodeDefs"]
    titles = {name: text["display_name"] for name, text in texts.items() if name in NODES}
    seen = show_every_help_page(page, "zh", titles)
    if not page.evaluate("window.__COMFYUI_FRONTEND_VERSION__").startswith(LOSES_TEXTS):
        assert seen == titles
        page.evaluate(ALONE, "AccelResolutionSnap")
        shown = page.evaluate("window.app.graph.nodes[0].widgets.map(({ label }) => label)")
        assert texts["AccelResolutionSnap"]["inputs"]["width"]["name"] in shown
    page.evaluate(ALONE, "AccelSpeedUp")
    page.wait_for_timeout(500)
    screenshot(page, "speed-up-chinese")
    assert page.evaluate("window.app.graph.nodes[0].widgets[0].options.getOptionLabel('Exact')") == "Exact（精确）"
    assert page.evaluate("window.app.graph.nodes[0].widgets[0].value") == "Exact"
    assert page.errors() == []
    page.context.close()


def our_nodes(any_server) -> dict[str, dict]:
    """Our nodes' part of /object_info."""
    described = json.loads(get(any_server, "/object_info"))
    return {name: node for name, node in described.items() if name.startswith("Accel")}
