"""The first minutes: from an empty graph to an accelerated image, and the line that stays on the node."""

import json

import pytest
from kit.pages import EVERY_SETUP, FRONTENDS, answering, frontend, idle, open_panel, run_small, screenshot

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
    assert said.count("there is no no-such-compiler; this installs one") >= 2  # not accelerated, and this machine
    assert set(made) == {"–"} and "faster" not in said
