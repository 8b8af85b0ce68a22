"""The first minutes: from an empty graph to an accelerated image, and the line that stays on the node."""

import json

import pytest
from kit.pages import (
    EVERY_SETUP,
    FRONTENDS,
    SETUPS,
    SMALL,
    answering,
    frontend,
    idle,
    open_panel,
    run_small,
    screenshot,
)

from dev.tools.server import serving

from .conftest import fill

pytestmark = pytest.mark.browser
in_all = pytest.mark.parametrize("setup", EVERY_SETUP, indirect=True)

TEXT = "document.querySelector('.accel-node-text')?.textContent ?? ''"
SHOWN = """
() => window.app.graph.nodes.filter(({ type }) => type.startsWith('Accel'))
    .flatMap(node => node.widgets.filter(widget => !widget.hidden && !widget.options?.advanced).map(({ name }) => name))
"""

BEYOND = """
() => {
    const { ds, canvas } = window.app.canvas;
    const { width, height } = canvas.getBoundingClientRect();
    const at = ([x, y]) => [(x + ds.offset[0]) * ds.scale, (y + ds.offset[1]) * ds.scale];
    return window.app.graph.nodes.filter(({ pos, size }) => {
        const [[left, top], [right, bottom]] = [at([pos[0], pos[1] - 30]), at([pos[0] + size[0], pos[1] + size[1]])];
        return left < 70 || top < 60 || right > width || bottom > height;
    }).map(({ title }) => title);
}
"""

WITHOUT_OURS = """
() => {
    const { graph } = window.app;
    const find = type => graph.nodes.find(one => one.type === type);
    graph.remove(find('AccelSpeedUp'));
    find('CheckpointLoaderSimple').connect(0, find('KSampler'), 0);
    find('CheckpointLoaderSimple').connect(2, find('VAEDecode'), 1);
}
"""
WAY_OF_MODEL = """
() => {
    const found = [];
    for (let at = window.app.graph.nodes.find(({ type }) => type === 'KSampler'); at; at = at.getInputNode(0))
        found.push(at.type);
    return found;
}
"""
SAVED = "(({ nodes, links }) => JSON.stringify([nodes, links]))(window.app.graph.serialize())"
TITLE_OF = """
type => {
    const { ds, graph, canvas } = window.app.canvas;
    const node = graph.nodes.find(one => one.type === type);
    ds.offset = [400 - node.pos[0], 300 - node.pos[1]];
    ds.scale = 1;
    window.app.canvas.deselectAll();
    window.app.canvas.setDirty(true, true);
    const { x, y } = canvas.getBoundingClientRect();
    return [x + 460, y + 285];
}
"""
"""Where the title of a node is, once it is in the middle of the page."""


def choose_in_menu(page, node, entry):
    """Right-click a node, and choose this entry."""
    place = page.evaluate(TITLE_OF, node)
    page.wait_for_timeout(500)
    page.mouse.click(*place, button="right")
    page.get_by_text(entry, exact=True).last.click()  # after what notes in the graph say


def open_starter(page):
    page.get_by_role("button", name="Accel", exact=True).click()
    page.get_by_role("button", name="Open the starter workflow").click()
    page.locator(".accel-panel").wait_for(state="detached")
    page.wait_for_function("window.app.graph.nodes.some(({ type }) => type === 'AccelSpeedUp')")


@in_all
def test_three_clicks_lead_to_an_accelerated_image_whose_gain_stays_on_the_node(page):
    with answering(page, idle()):
        open_starter(page)
    assert page.evaluate(BEYOND) == [], "nothing is beyond the window or under the page's own buttons"
    assert page.evaluate(SHOWN) == ["quality"]
    run_small(page)
    page.wait_for_function(f"({TEXT}) && !({TEXT}).startsWith('Compiling')")
    screenshot(page, "start-here-done")
    saved = page.evaluate("JSON.stringify(window.app.graph.serialize())")
    node = next(node for node in json.loads(saved)["nodes"] if node["type"] == "AccelSpeedUp")
    assert node["widgets_values"] == ["Exact"]
    assert page.evaluate(TEXT) not in saved


@pytest.mark.parametrize("setup", FRONTENDS, indirect=True)
def test_an_image_is_compared_with_plain_from_the_menu_of_a_node_that_the_menu_of_another_put_in(page, setup):
    with answering(page, idle()):
        open_starter(page)
    page.evaluate(WITHOUT_OURS)
    choose_in_menu(page, "KSampler", "Accel: speed up this model")
    assert page.evaluate(WAY_OF_MODEL) == ["KSampler", "AccelSpeedUp", "CheckpointLoaderSimple"]
    page.evaluate(SMALL, 1 + SETUPS.index(page.setup))
    before, asked = page.evaluate(SAVED), []
    page.on("request", lambda request: request.url.endswith("/prompt") and asked.append(request.post_data_json))
    choose_in_menu(page, "AccelSpeedUp", "Accel: compare with plain")
    result = page.get_by_role("dialog", name="Compare with plain")
    result.locator("img").nth(1).wait_for(timeout=300_000)
    screenshot(page, "compared")
    said = result.inner_text()
    assert "× as fast · " in said and (" dB apart: " in said or "images are equal" in said), said
    result.get_by_role("button", name="Close").click()
    assert page.evaluate(SAVED) == before
    made = [{node["class_type"]: node["inputs"] for node in one["prompt"].values()} for one in asked if one]
    assert ["AccelSpeedUp" in one for one in made] == [True, False, True, True, True][: len(made)] and len(made) > 1
    assert all("PreviewImage" in one and "SaveImage" not in one for one in made)
    assert len({one["KSampler"]["seed"] for one in made}) == 1
    assert {name for one in made for name in one if "accel_compared" in one[name]} == {"KSampler"}
    assert len({one["KSampler"]["accel_compared"] for one in made}) == len(made), "each samples anew"


@pytest.mark.thorough  # a server of its own
@pytest.mark.parametrize("setup", FRONTENDS, indirect=True)
def test_without_a_compiler_node_toast_and_panel_say_what_to_install_and_the_image_is_made(open_page, setup, tmp_path):
    fill(tmp_path)
    folder = frontend(setup)
    flags = ["--front-end-root", str(folder)] if folder else []
    with serving(tmp_path, extra_flags=flags, environment={"CXX": "no-such-compiler"}) as server:
        page = open_page(server)
        open_starter(page)
        run_small(page)
        page.get_by_text("Nothing is compiled", exact=True).wait_for()
        page.wait_for_function(f"({TEXT}).includes('not compiled: torch needs a C++ compiler')")
        screenshot(page, "no-compiler")
        panel = open_panel(page)
        panel.get_by_text("Not accelerated since the start", exact=True).wait_for()
        screenshot(page, "no-compiler-panel")
        said = panel.inner_text()
        made = panel.locator(".accel-of-compileTime[role=cell]").all_inner_texts()
        page.context.close()
    assert said.count("no-such-compiler was not found. Install it: ") >= 2  # not accelerated, and this machine
    assert set(made) == {"–"} and "faster" not in said
