"""Text on our nodes: what a run gained, and what a node did. It is beside the graph: the workflow stays the user's."""

import json

import pytest
from kit.pages import CLEAR, CONTRASTS, EVERY_SETUP, OFF, READY, SAY, SET, answering, choosing, screenshot, state

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
INTO_SUBGRAPH = """
() => {
    const { graph } = window.app;
    const { node, subgraph } = graph.convertToSubgraph(new Set(graph.nodes));
    node.pos = [300, 200];
    return `${node.id}:${subgraph.nodes[0].id}`;
}
"""
QUEUE = """
async id => {
    const { api } = window.app;
    const answer = JSON.stringify({ prompt_id: id, number: 1, node_errors: {} });
    const fetch = api.fetchApi;
    api.fetchApi = (route, options) =>
        route === "/prompt" ? Promise.resolve(new Response(answer)) : fetch.call(api, route, options);
    await window.app.queuePrompt(0, 1);
    api.fetchApi = fetch;
}
"""
"""Queue the open workflow, on a server that says it is prompt `id`, and runs nothing."""

CHOOSE = """
([index, name, value]) => {
    const widget = window.app.graph.nodes[index].widgets.find(one => one.name === name);
    const before = widget.value;
    widget.value = value;
    const { changeTracker } = window.app.extensionManager.workflow.activeWorkflow;
    (changeTracker.captureCanvasState ?? changeTracker.checkState).call(changeTracker);
    return before;
}
"""
"""Choose another value, which the page notices after a click; what it was."""

TEXTS = "() => [...document.querySelectorAll('.accel-node-text')].map(element => element.textContent).filter(Boolean)"
SAVED = "() => JSON.stringify(window.app.graph.serialize())"
PROMPT = "async () => JSON.stringify((await window.app.graphToPrompt()).output)"
LOAD = "async text => { await window.app.loadGraphData(JSON.parse(text)); }"
NEW = "() => window.app.extensionManager.command.execute('Comfy.NewBlankWorkflow')"
HISTORY = """
() => {
    const { changeTracker } = window.app.extensionManager.workflow.activeWorkflow;
    (changeTracker.captureCanvasState ?? changeTracker.checkState).call(changeTracker);
    return changeTracker.undoQueue.length;
}
"""
"""How many steps could be undone, now that the page has looked for a change."""

LINE = [
    {"code": "line_times", "fields": {"times": "1.3"}, "reason": "about 1.3×"},
    {"code": "line_saved", "fields": {"seconds": "2.1"}, "reason": "about 2.1 s saved"},
    {"code": "line_paid_back", "fields": {"images": 7}, "reason": "pays off after 7 more images"},
]
COMPILING = {"event": "node_compiling", "name": "ResBlock", "number": 2, "of": 5, "stage": "build"}
SAID = "about 1.3× · about 2.1 s saved · pays off after 7 more images"


def ran(page, prompt, *nodes):
    """The prompt is over, and these nodes have a line."""
    page.evaluate(SAY, {"event": "node_lines", "prompt_id": prompt, "lines": dict.fromkeys(nodes, LINE)})


def as_it_is(page):
    """What the page has of the open workflow: steps to undo, the saved form, the prompt; once it has laid it out."""
    saved = None
    while saved != page.evaluate(SAVED):
        saved = page.evaluate(SAVED)
        page.wait_for_timeout(500)
    return page.evaluate(HISTORY), saved, page.evaluate(PROMPT)


def until_shown(page, *texts):
    page.wait_for_function(
        f"texts => JSON.stringify(({TEXTS})()) === texts",
        arg=json.dumps(texts, ensure_ascii=False, separators=(",", ":")),
    )


@in_all
def test_a_run_leaves_its_line_on_the_node_and_nothing_in_the_workflow(page):
    node = page.evaluate(ADD, "AccelSpeedUp")
    page.evaluate(ADD, "EmptyLatentImage")
    before = as_it_is(page)
    page.evaluate(QUEUE, "prompt 1")
    page.evaluate(SAY, {**COMPILING, "node": node, "prompt_id": "another"})
    assert page.evaluate(TEXTS) == []
    ran(page, "prompt 1", node, "2", "99")
    page.evaluate("() => window.app.api.dispatchCustomEvent('execution_success', { prompt_id: 'prompt 1' })")
    until_shown(page, SAID)  # and not on the latent, which is not ours
    page.wait_for_timeout(300)
    screenshot(page, "node-text")
    box = page.locator(".accel-node-text").bounding_box()
    assert box["height"] >= 18 and box["width"] > 100
    assert as_it_is(page) == before
    page.evaluate("() => { window.app.graph.nodes[1].title = 'renamed'; }")
    assert page.evaluate(HISTORY) == before[0] + 1
    page.evaluate("() => window.app.extensionManager.command.execute('Comfy.Undo')")
    page.wait_for_function("() => window.app.graph.nodes[1].title !== 'renamed'")
    until_shown(page, SAID)  # on the nodes that the page has made anew
    page.evaluate(LOAD, before[1])
    assert page.evaluate(TEXTS) == [], "the same file, opened again, has not run"


@in_all
def test_what_is_compiled_is_said_with_a_clock_until_the_compiler_has_ended(page):
    node = page.evaluate(ADD, "AccelSpeedUp")
    page.evaluate(QUEUE, "prompt 13")
    says = {"node": node, "prompt_id": "prompt 13"}
    step = "() => window.app.api.dispatchCustomEvent('progress', { prompt_id: 'prompt 13', value: 1, max: 20 })"
    done = {**says, "event": "node_compiled"}
    page.evaluate(SAY, {**COMPILING, **says, "seconds": 41.5})
    until_shown(page, "Compiling ResBlock, 2 of 5 · building kernels · 43 s")
    page.evaluate(SAY, done)  # three are to come
    assert page.evaluate(TEXTS) != []
    page.evaluate(step)
    until_shown(page)
    page.evaluate(SAY, {**COMPILING, **says, "number": 5})
    page.evaluate(SAY, done)
    until_shown(page)
    beside = {**COMPILING, **says, "name": "", "number": 3, "of": 7, "stage": "beside"}
    page.evaluate(SAY, beside)
    until_shown(page, "Running plain, 2 of 7 ready")
    page.evaluate("window.app.api.dispatchCustomEvent('reconnecting')")
    until_shown(page)
    page.evaluate(SAY, {**beside, "left": 19.4})
    page.evaluate(step)
    until_shown(page, "Running plain, 2 of 7 ready · about 18 s")
    page.evaluate(SAY, {**says, "event": "node_code_ready"})
    until_shown(page)


@in_all
def test_a_line_goes_with_the_choice_that_it_is_of_and_comes_back_with_it(page):
    node = page.evaluate(ADD, "AccelSpeedUp")
    page.evaluate(ADD, "EmptyLatentImage")
    page.evaluate(QUEUE, "prompt 7")
    ran(page, "prompt 7", node)
    until_shown(page, SAID)
    for index, name, chosen in ((0, "quality", "Fast"), (1, "width", 768)):
        before = page.evaluate(CHOOSE, [index, name, chosen])
        until_shown(page)
        page.evaluate(CHOOSE, [index, name, before])
        until_shown(page, SAID)


@in_all
def test_a_line_and_progress_are_there_after_the_page_was_loaded_again(page):
    node = page.evaluate(ADD, "AccelSpeedUp")
    as_it_is(page)  # the page keeps a draft of it some time later
    page.evaluate(QUEUE, "prompt 8")
    page.wait_for_timeout(2000)
    ended = {"prompt": "prompt 8", "lines": {node: LINE}, "compiling": {"node": node}, "graphs_would_give": 1.84}
    with answering(page, state(2, last_run=ended, cuda_graphs=OFF)):
        page.reload()
        page.wait_for_function(READY)
        until_shown(page, f"{SAID}\n{OFFER}Turn on CUDA graphsNo, thanks")
    page.evaluate(SAY, {**COMPILING, "node": node, "prompt_id": "prompt 8", "stops": True, "seconds": 9})
    page.wait_for_function(f"({TEXTS})()[0]?.startsWith('Compiling ResBlock, 2 of 5 · stops after this block type · ')")
    page.evaluate("() => window.app.api.dispatchCustomEvent('execution_success', { prompt_id: 'prompt 8' })")
    ran(page, "prompt 8", node)
    until_shown(page, SAID)


@in_all
def test_compiling_that_no_node_shows_is_told_by_a_toast_once(page):
    toasts = page.get_by_text("Only the first image waits for this.", exact=True)
    node = page.evaluate(ADD, "AccelSpeedUp")
    page.evaluate(QUEUE, "prompt 11")
    page.evaluate(SAY, {**COMPILING, "node": node, "prompt_id": "prompt 11"})
    page.wait_for_timeout(1500)
    assert toasts.count() == 0
    page.evaluate(CLEAR)
    for number in (1, 2):
        page.evaluate(SAY, {**COMPILING, "node": node, "number": number, "prompt_id": "prompt 12"})
    toasts.wait_for()
    page.wait_for_timeout(1000)
    assert toasts.count() == 1


@in_all
def test_of_two_copies_of_a_workflow_the_one_that_ran_has_the_line(page):
    node = page.evaluate(ADD, "AccelSpeedUp")
    saved = page.evaluate(SAVED)
    page.evaluate("() => { window.first = window.app.extensionManager.workflow.activeWorkflow; }")
    page.evaluate(QUEUE, "prompt 2")
    page.evaluate(NEW)
    page.evaluate(LOAD, saved)
    ran(page, "prompt 2", node)
    page.wait_for_timeout(300)
    assert page.evaluate(TEXTS) == []
    page.evaluate("() => window.app.loadGraphData(window.first.activeState, true, true, window.first)")
    until_shown(page, SAID)


@in_all
def test_a_line_that_comes_before_the_prompt_is_known_waits_for_it(page):
    ran(page, "prompt 3", page.evaluate(ADD, "AccelSpeedUp"))
    assert page.evaluate(TEXTS) == []
    page.evaluate(QUEUE, "prompt 3")
    until_shown(page, SAID)


@in_all
def test_a_line_within_subgraphs_is_on_their_nodes_too(page):
    page.evaluate(ADD, "AccelSpeedUp")
    inner = page.evaluate(INTO_SUBGRAPH)
    outer = page.evaluate(INTO_SUBGRAPH).partition(":")[0]
    before = as_it_is(page)
    page.evaluate(QUEUE, "prompt 4")
    ran(page, "prompt 4", f"{outer}:{inner}")
    page.wait_for_function(f"said => ({TEXTS})().includes(said)", arg=SAID)
    page.wait_for_timeout(300)
    screenshot(page, "node-text-subgraph")
    shown = page.evaluate("""() => {
        const shown = [];
        for (let [node] = window.app.graph.nodes; node; [node] = node.subgraph?.nodes ?? [])
            shown.push(node.widgets.find(({ name }) => name === 'accel_text')?.element.textContent);
        return shown;
    }""")
    assert shown == [SAID] * 3
    assert as_it_is(page) == before


@in_all
def test_a_copy_of_a_node_has_no_line_and_a_bypassed_one_is_dim(page):
    node = page.evaluate(ADD, "AccelSpeedUp")
    page.evaluate(QUEUE, "prompt 5")
    ran(page, "prompt 5", node)
    until_shown(page, SAID)
    page.evaluate("() => { window.app.canvas.copyToClipboard(window.app.graph.nodes); }")
    page.evaluate("() => { window.app.canvas.pasteFromClipboard(); }")
    page.wait_for_function("() => window.app.graph.nodes.length === 2")
    page.wait_for_timeout(300)
    assert page.evaluate(TEXTS) == [SAID]
    page.evaluate("() => { window.app.graph.nodes[0].mode = 4; window.app.canvas.setDirty(true, true); }")
    page.wait_for_function("""() => {
        let seen = 1;
        for (let at = document.querySelector('.accel-node-text'); at; at = at.parentElement)
            seen *= Number(getComputedStyle(at).opacity);
        return seen < 0.6;
    }""")


@in_all
def test_a_node_shows_what_it_did(page):
    node = page.evaluate(ADD, "AccelResolutionSnap")
    page.evaluate(QUEUE, "prompt 6")
    did = {"prompt_id": "prompt 6", "node": node, "output": {"text": ["720×960 → 704×960, 2.2 % narrower"]}}
    page.evaluate("did => window.app.api.dispatchCustomEvent('executed', did)", did)
    until_shown(page, "720×960 → 704×960, 2.2 % narrower")


HALF = """
() => {
    const { ds, graph } = window.app.canvas;
    ds.scale = 0.5;
    ds.offset = [200, 200];
    window.app.canvas.setDirty(true, true);
    const [{ pos, size }] = graph.nodes;
    return [(pos[0] + 200) / 2, (pos[1] + 200) / 2, size[0] / 2, size[1] / 2];
}
"""
"""Draw the graph at half its size; where the first node then is."""


@in_all
@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_text_is_readable_in_both_themes_and_stays_on_its_node_at_half_the_size(page, theme):
    node = page.evaluate(ADD, "AccelSpeedUp")
    page.evaluate(QUEUE, f"theme {theme}")
    ran(page, f"theme {theme}", node)
    until_shown(page, SAID)
    try:
        page.evaluate(SET, ["Comfy.ColorPalette", theme])
        page.wait_for_timeout(500)
        screenshot(page, f"node-text-{theme}")
        ((ratio, _),) = page.evaluate(CONTRASTS, ".accel-node-text > [role=status]")
        assert ratio >= 4.5
        left, top, width, height = page.evaluate(HALF)
        page.wait_for_timeout(500)
        box = page.locator(".accel-node-text").bounding_box()
        assert left <= box["x"] and box["x"] + box["width"] <= left + width
        assert top <= box["y"] and box["y"] + box["height"] <= top + height + 8
    finally:
        page.evaluate(SET, ["Comfy.ColorPalette", "dark"])
        page.evaluate("() => { window.app.canvas.ds.scale = 1; window.app.canvas.ds.offset = [0, 0]; }")


OFFER = (
    "CUDA graphs would make this model's steps about 1.8× as fast, for about 0.5 GB of GPU memory and one restart; the "
    "Accel tab turns them off again."
)
IN_LANGUAGE = {
    "en": ("Turn on CUDA graphs", "on", SAID, OFFER),
    "zh": (
        *("不用了", "off", "约 1.3× · 节省约 2.1 秒 · 再生成 7 张图后回本"),
        "CUDA 图可让此模型每步约快 1.8 倍，代价是约 0.5 GB 显存和一次重启；可随时在 Accel 面板中关闭。",
    ),
}
CUT_OFF = """
() => {
    const text = document.querySelector('.accel-node-text');
    return text.scrollHeight - text.clientHeight;
}
"""
"""How many pixels of the text and its buttons nobody sees."""


def offered(page, prompt, node):
    """The prompt is over, and CUDA graphs are what it lacked."""
    lines = {node: LINE}
    page.evaluate(SAY, {"event": "node_lines", "prompt_id": prompt, "lines": lines, "offers": {node: {"times": "1.8"}}})


@in_all
@pytest.mark.parametrize("language", ["en", "zh"])
def test_cuda_graphs_are_offered_on_the_node_that_ran_until_somebody_has_answered(page, language):
    button, choice, said, offer = IN_LANGUAGE[language]
    page.evaluate(SET, ["Comfy.Locale", language])
    page.reload()
    page.wait_for_function(READY)
    node = page.evaluate(ADD, "AccelSpeedUp")
    before = as_it_is(page)
    page.evaluate(QUEUE, "prompt 9")
    offered(page, "prompt 9", node)
    texts = page.locator(".accel-node-text")
    texts.get_by_role("button", name=button).wait_for()
    assert texts.get_by_role("status").inner_text() == f"{said}\n{offer}"
    page.wait_for_timeout(500)
    screenshot(page, f"graphs-offer-{language}")
    assert page.evaluate(CUT_OFF) == 0
    assert as_it_is(page) == before
    try:
        with choosing(page) as chosen:
            texts.get_by_role("button", name=button).click()
            texts.get_by_role("button").first.wait_for(state="detached")
        assert chosen == [choice]
        if choice == "on":
            page.get_by_text("Restart ComfyUI to use them.").first.wait_for()
        until_shown(page, said)
        offered(page, "prompt 9", node)
        until_shown(page, said)
        assert texts.get_by_role("button").count() == 0
    finally:
        page.evaluate(SET, ["Comfy.Locale", "en"])
