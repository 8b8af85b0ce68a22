"""The Accel tab: with a real server behind it, with answers of the test's own, and how it looks and is used."""

import itertools
import json
import random
import re
import urllib.request

import pytest
from kit.pages import (
    CONTRASTS,
    EXECUTE,
    FRONTENDS,
    MARKUP,
    NO_TOASTS,
    OFF,
    PANEL,
    SAY,
    SET,
    answering,
    choosing,
    close_panel,
    get,
    graphs,
    idle,
    machine_part,
    open_panel,
    row,
    screenshot,
    set_width,
    state,
    until,
)

from dev.tools import workflow

pytestmark = [pytest.mark.browser, pytest.mark.parametrize("setup", FRONTENDS, indirect=True)]

STEPS = 20

RECORD = """
() => {
    const seen = window.accelSeen = { numbers: [], names: [], stages: [], badges: [], spoken: [], widths: [] };
    const note = (list, text) => { if (text && list.at(-1) !== text) list.push(text); };
    const look = () => {
        const section = document.querySelector('.accel-progress');
        if (section && !section.hidden) {
            note(seen.numbers, section.querySelector('.accel-numbers').textContent);
            note(seen.names, section.querySelector('.accel-strong').textContent);
            note(seen.stages, section.querySelector('.accel-strong + .accel-muted').textContent);
            note(seen.widths, section.querySelector('.accel-bar-part').style.width);
        }
        note(seen.spoken, document.querySelector('.accel-panel [role=status]')?.textContent);
        const tab = window.app.extensionManager.getSidebarTabs().find(tab => tab.id === 'accel');
        note(seen.badges, tab.iconBadge);
    };
    seen.observer = new MutationObserver(look);
    seen.observer.observe(document.body, { subtree: true, childList: true, characterData: true });
}
"""
"""Note what the panel and its icon show of a compilation, which may be over in a moment."""

QUEUE = """
async output => (await window.app.api.queuePrompt(0, { output, workflow: {} })).prompt_id
"""


@pytest.fixture
def panel(page):
    return open_panel(page)


@pytest.fixture(autouse=True)
def closed(page):
    """The panel is closed at a test's end, however that came."""
    yield
    page.evaluate(SAY, {"event": "run_end"})
    close_panel(page)


def ask(server, path, body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def server_state(server):
    return json.loads(get(server, "/accel/state"))


def run(page, server):
    """Queue a small image from the page, and wait until it is there."""
    graph = workflow.change(
        workflow.load(),
        {
            "AccelModel": {"backend": "eager"},
            "AccelDeepCache": {"quality": "30 dB"},
            "EmptyLatentImage": {"width": 64, "height": 64, "batch_size": 1},
            "KSampler": {"steps": STEPS, "seed": random.getrandbits(32)},
        },
    )
    prompt = page.evaluate(QUEUE, graph)
    for _ in range(1200):
        history = json.loads(get(server, f"/history/{prompt}")).get(prompt)
        if history:
            assert history["status"]["status_str"] == "success", history["status"]
            return
        page.wait_for_timeout(100)
    raise AssertionError("the prompt has not ended within two minutes")


def test_a_run_is_watched_from_nothing_to_a_full_table(page, panel, server):
    ask(server, "/accel/clear", {})
    page.evaluate(RECORD)
    run(page, server)
    now = server_state(server)
    names = sorted(entry["name"] for entry in now["graph_cache"]["table"])
    panel.locator(".accel-row:not(.accel-head)").nth(len(names) - 1).wait_for()
    screenshot(page, "panel-after-run")

    seen = page.evaluate(
        "() => { const { observer, ...seen } = window.accelSeen; observer.disconnect(); return seen; }"
    )
    assert set(seen["names"]) == set(names)
    assert set(seen["stages"]) <= {" · tracing", " · generating code"} and seen["stages"], "eager builds no kernels"
    counted = [re.match(r"(\d+) of (\d+)", text).groups() for text in seen["numbers"]]
    assert len({number for number, _ in counted}) >= 2, "progress went on"
    number, of = map(int, counted[0])
    assert seen["badges"][0] == str(of - number + 1), "kinds left"
    assert seen["spoken"][-2:] == ["Compiling has started.", "Compiling has ended."]
    assert panel.locator(".accel-progress").is_hidden()

    assert sorted(panel.locator(".accel-row .accel-strong").all_inner_texts()) == names
    assert panel.locator(".accel-steps span").count() == STEPS
    assert panel.locator(".accel-skipped").count() == now["last_run"]["skipped_steps"] > 0
    assert "Full: 1-" in panel.locator(".accel-steps").get_attribute("aria-label")
    assert panel.locator(".accel-imageSize").inner_text() == "64×64"
    assert panel.locator(".accel-tracedCalls").inner_text() == "100%"  # the backend is eager
    assert panel.locator(".accel-compiledCalls").count() == 0


def test_an_evicted_entry_is_gone_from_panel_and_server_and_the_focus_stays_in_the_table(page, panel, server):
    if server_state(server)["graph_cache"]["entries"] < 2:
        run(page, server)
        panel.locator(".accel-row:not(.accel-head)").nth(1).wait_for()
    before = {entry["id"] for entry in server_state(server)["graph_cache"]["table"]}
    rows = panel.locator(".accel-row:not(.accel-head)")
    count = rows.count()
    rows.first.get_by_role("button").focus()
    with page.expect_response("**/accel/evict") as answered:
        page.keyboard.press("Enter")
    assert answered.value.json()["dropped"] == 1
    page.wait_for_function(f"document.querySelectorAll('.accel-row:not(.accel-head)').length === {count - 1}")
    after = {entry["id"] for entry in server_state(server)["graph_cache"]["table"]}
    assert after < before and len(after) == len(before) - 1
    assert page.evaluate("document.activeElement.closest('.accel-row') !== null")


def test_clearing_asks_first_and_then_the_server_has_nothing(page, panel, server):
    if not server_state(server)["graph_cache"]["entries"]:
        run(page, server)
    clear = panel.get_by_role("button", name="Clear graph cache")
    dialog = page.get_by_role("dialog")
    # Rows that arrive between the two halves of a click move the button away from under it.
    until(page, "document.querySelector('[role=dialog]')", lambda: clear.click())
    dialog.get_by_role("button", name="Cancel").click()
    assert server_state(server)["graph_cache"]["entries"] > 0
    dialog.wait_for(state="detached")
    until(page, "document.querySelector('[role=dialog]')", lambda: clear.click())
    with page.expect_response("**/accel/clear"):
        dialog.get_by_role("button", name="Delete").click()
    assert server_state(server)["graph_cache"]["entries"] == 0
    page.get_by_text("Graph cache cleared", exact=True).wait_for()
    panel.locator(".accel-table").wait_for(state="hidden")


def test_settings_show_the_server_s_values_and_change_them(page, server):
    ids = {"Accel.Cache.MaxMB": "max_mb", "Accel.Cache.MaxEntries": "max_entries", "Accel.Log.Verbosity": "verbosity"}
    shown = "name => window.app.extensionManager.setting.get(name)"
    before = server_state(server)["settings"]
    assert {name: page.evaluate(shown, name) for name in ids} == {name: before[key] for name, key in ids.items()}
    page.evaluate("window.app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    page.get_by_placeholder("Search Settings").fill("Memory limit (MB)")
    page.get_by_text("Memory limit (MB)").locator("i").hover()
    page.get_by_text("How much memory compiled graphs may take.").wait_for()
    page.locator(".p-dialog-mask").wait_for()
    page.keyboard.press("Escape")
    page.locator(".p-dialog-mask").wait_for(state="detached")
    try:
        with page.expect_response("**/accel/settings") as answered:
            page.evaluate(SET, ["Accel.Cache.MaxMB", 512])
        assert answered.value.json()["settings"]["max_mb"] == 512
        assert server_state(server)["graph_cache"]["max_bytes"] == 512 << 20
        ask(server, "/accel/settings", {"max_entries": 77})  # by somebody else
        page.wait_for_function(f"({shown})('Accel.Cache.MaxEntries') === 77")
        with page.expect_response("**/accel/settings"):
            page.evaluate(SET, ["Accel.Cache.MaxMB", -5])
        page.wait_for_function(f"({shown})('Accel.Cache.MaxMB') === 512")
        page.get_by_text("whole number from 0").last.wait_for()
    finally:
        ask(server, "/accel/settings", {key: before[key] for key in ids.values()})
        page.wait_for_function(f"({shown})('Accel.Cache.MaxMB') === {before['max_mb']}")


def test_the_report_is_saved_as_a_text_file(page, server):
    with page.expect_download() as download:
        page.evaluate(EXECUTE, "Accel.ExportReport")
    assert download.value.suggested_filename == "accel-report.txt"
    assert download.value.path().read_text(encoding="utf-8").strip()


def test_a_fallback_is_told_once_for_its_reason_and_many_at_once_are_one(page):
    toasts = page.get_by_text("Part of the model is not accelerated", exact=True)
    reason = f"a reason of this test {random.random()}"
    for _ in range(3):
        page.evaluate(SAY, {"event": "fallback", "block": "ResBlock", "reason": reason})
    toasts.first.wait_for()
    before = toasts.count()
    page.evaluate(SAY, {"event": "fallback", "block": "Upsample", "reason": reason})
    page.wait_for_timeout(1200)
    assert toasts.count() == before == 1
    for name in "abcde":
        page.evaluate(SAY, {"event": "fallback", "block": "ResBlock", "reason": f"cause {name}: {reason}"})
    page.get_by_text("For 5 reasons").last.wait_for()
    assert toasts.count() == 2


def test_without_a_compiler_the_toast_says_that_nothing_is_compiled_and_once(page):
    missing = {"event": "fallback", "of_all": True, "code": "no_triton", "fields": {"command": "pip install triton"}}
    missing["reason"] = f"torch needs Triton {random.random()}"
    for block in ("ResBlock", "SpatialTransformer", "Upsample"):
        page.evaluate(SAY, {**missing, "block": block})
    toast = page.get_by_text("Nothing is compiled", exact=True)
    toast.wait_for()
    page.wait_for_timeout(1000)
    assert toast.count() == 1
    page.get_by_text("Your images are made as in plain ComfyUI.").last.wait_for()


MISSING = {
    **{"code": "no_triton", "fields": {"command": "pip install triton-windows"}},
    "reason": "torch needs Triton for the GPU, and it is not installed; this installs it: pip install …",
}
LACKING = machine_part("Compiling", "compiles_not", why=MISSING)
NOT_COMPILED = {"code": "line_not_compiled", "fields": {"why": MISSING}, "reason": f"not compiled: {MISSING['reason']}"}
UNCOMPILED = {"compiled_calls": 0, "eager_calls": 40, "model_calls": 0, "compile_seconds": 0.0, "loaded": 0}
STOPPED = {"failed": True, "steps_done": 8, "seconds": 5.0, "account": {"gain": []}, "steps_taken": ""}
ANSWERS = {
    "without Triton": (
        {
            "graph_cache": {
                "entries": 0,
                "table": [],
                "compilations": 0,
                "loaded": 0,
                "fallbacks": [{"block": "ResBlock", **MISSING, "calls": 40}],
            },
            "last_run": {**UNCOMPILED, "account": {"worked": 9.2, "gain": []}, "lines": {"3": [NOT_COMPILED]}},
            "machine": [machine_part("Device", "device", name="RTX"), LACKING],
        },
        {
            ".accel-gain": ["not compiled: torch needs Triton"],
            "dd.accel-compiledCalls": ["0%"],
            "dd.accel-speed": ["2.7 it/s"],
            ".accel-fold dd": ["RTX", "no: torch needs Tr"],
        },
        ["compiled in"],
    ),
    "a kind that could not be compiled": (
        {"graph_cache": {"rows_total": 1, "table": [row(3, graphs=0, seconds=0.0)]}},
        {".accel-of-compileTime[role=cell]": ["–"]},
        [],
    ),
    "an interrupted run": (
        {"last_run": STOPPED},
        {"dd.accel-took": ["5 s, stopped after 8 of 25 steps"], "dd.accel-speed": [], "dd.accel-paysBack": []},
        ["Full steps"],
    ),
    "captured calls": (
        {},
        {
            "dd.accel-replays": ["18 of 25"],
            ".accel-row:has-text('UNetModel call') .accel-of-compileTime": ["CUDA graph, 0.3 s"],
            ".accel-row:has-text('UNetModel call') .accel-of-usedFor": ["exact size"],
        },
        [],
    ),
}
"""What the server answers in place of a day's work; texts at places in the panel begin so; and what it must not say."""


@pytest.mark.parametrize("name", ANSWERS)
def test_the_panel_says_what_the_server_answers_and_no_more(page, name):
    changes, texts, unsaid = ANSWERS[name]
    given = state()
    for part, values in changes.items():
        given[part] = values if isinstance(values, list) else {**given[part], **values}
    with answering(page, given):
        panel = open_panel(page)
        panel.locator("dd.accel-took").wait_for()
        page.wait_for_timeout(300)
        screenshot(page, f"panel {name}")
        for place, wanted in texts.items():
            found = panel.locator(place).all_inner_texts()
            assert len(found) == len(wanted) and all(map(str.startswith, found, wanted)), (place, found)
        said = panel.inner_text()
        assert [text for text in unsaid if text in said] == []


@pytest.mark.parametrize(
    ("given", "said", "buttons"),
    [
        (OFF, "about 0.5 GB of GPU memory and one restart", {"Turn on CUDA graphs": "on", "No, thanks": "off"}),
        ({**OFF, "choice": "off"}, "turn them on here", {"Turn on CUDA graphs": "on"}),
        ({**OFF, "choice": "off", "by_environment": True}, "ACCEL_CUDA_GRAPHS=on", {}),
        (graphs("restart", "on"), "changed: restart ComfyUI", {"Turn off CUDA graphs": "off"}),
        (graphs("on", "on"), "on", {"Turn off CUDA graphs": "off"}),
        (graphs("blocked", "on"), "has chosen another allocator", {"Turn off CUDA graphs": "off"}),
        (graphs("given"), None, {}),
        (graphs("nowhere"), None, {}),
        (None, None, {}),
    ],
)
def test_cuda_graphs_are_turned_on_and_off_where_there_is_a_choice(page, given, said, buttons):
    with answering(page, state(2, cuda_graphs=given)), choosing(page) as chosen:
        panel = open_panel(page)
        panel.locator(".accel-row").nth(1).wait_for()
        section = panel.locator(".accel-fold").filter(has=page.get_by_role("heading", name="CUDA graphs"))
        if said is None:
            assert section.is_hidden()
        else:
            section.get_by_text(said).wait_for()
            section.get_by_role("button").nth(len(buttons)).wait_for(state="detached")  # of the answer before
            assert section.get_by_role("button").all_inner_texts() == list(buttons)
        if given is OFF:
            screenshot(page, "graphs-in-panel")
        for name in buttons:
            page.evaluate(NO_TOASTS)
            section.get_by_role("button", name=name).click()
            page.wait_for_timeout(200)
        assert chosen == list(buttons.values())


@pytest.mark.parametrize("is_old", [False, True])
def test_comfyui_is_restarted_where_its_manager_can(page, is_old):
    asked = []

    def answer(route):
        method, path = route.request.method, route.request.url.rpartition("/api")[2]
        asked.append(f"{method} {path}")
        route.fulfill(status=404 if is_old and "/v2/" in path else 405 if is_old and method == "POST" else 200, body="")

    page.route("**/manager/*", answer)
    with answering(page, state(2, cuda_graphs=graphs("restart", "on"))):
        open_panel(page).get_by_role("button", name="Restart ComfyUI").click()
        page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
        page.get_by_role("dialog").wait_for(state="detached")
        page.wait_for_timeout(300)
    page.unroute("**/manager/*", answer)
    old = ["GET /v2/manager/version", "GET /manager/version", "POST /manager/reboot", "GET /manager/reboot"]
    assert asked == (old if is_old else ["GET /v2/manager/version", "POST /v2/manager/reboot"])


def test_nothing_is_asked_while_nothing_happens_or_nobody_looks(page):
    with answering(page, state()) as asked:
        page.evaluate(SAY, {"event": "run_end"})
        page.wait_for_timeout(900)
        assert asked == [], "nobody looks"
        panel = open_panel(page)
        panel.locator(".accel-row").nth(1).wait_for()
        page.wait_for_timeout(2500)
        assert len(asked) == 1, "nothing happens"
        for number in range(20):  # as fast as the server may send
            page.evaluate(SAY, {"event": "compiled", "name": "ResBlock", "seconds": number})
            page.wait_for_timeout(40)
        page.wait_for_timeout(900)
        assert 2 <= len(asked) <= 5


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        (idle(), 200, "Put Speed Up before the sampler"),
        ({"error": "no such route"}, 404, "restart ComfyUI"),
        ("", 500, "does not answer"),
        ({"graph_cache": {"entries": 1, "compilations": 1, "table": [{"name": "ResBlock"}]}}, 200, "ResBlock"),
        ({"graph_cache": {"table": None}, "last_run": {}}, 200, "Last run"),
        ({}, 200, "No image has been accelerated"),
        ([], 200, "No image has been accelerated"),
    ],
)
def test_a_server_that_knows_less_or_nothing_is_no_error(page, given, status, said):
    page.complaints.clear()
    with answering(page, given, status):
        panel = open_panel(page)
        panel.get_by_text(said).first.wait_for()
        page.evaluate(SAY, {})
        page.evaluate("window.app.api.dispatchEvent(new CustomEvent('reconnected'))")
        page.wait_for_timeout(300)
    assert not [
        complaint for complaint in page.complaints if "accel" in complaint and "Failed to load" not in complaint
    ]


def test_the_panel_fills_once_the_server_is_back(page):
    with answering(page, {}, 404):
        panel = open_panel(page)
        panel.get_by_text("restart ComfyUI").filter(visible=True).first.wait_for()  # toasts may say so, too
    with answering(page, state(2, compiling={"name": "ResBlock", "number": 1, "of": None, "seconds": 1.0})):
        panel.get_by_role("button", name="Try again").click()
        panel.locator(".accel-row .accel-strong").first.wait_for()
        assert "ResBlock" in panel.locator(".accel-progress").inner_text()
        assert panel.get_by_role("progressbar").get_attribute("aria-valuenow") is None


BUSY = {"event": "compiling", "name": "BasicTransformerBlock", "number": 3, "of": 9, "stage": "build", "seconds": 2.0}
BEYOND = """
() => {
    const panel = document.querySelector('.accel-panel');
    const right = panel.getBoundingClientRect().right;
    const outside = [...panel.querySelectorAll('*')].filter(part =>
        part.checkVisibility() && !part.closest('.accel-spoken') && part.getBoundingClientRect().right > right);
    return [panel.scrollWidth - panel.clientWidth, outside.map(part => part.outerHTML.slice(0, 80))];
}
"""
"""How far the panel could be scrolled sideways, and what reaches over its edge."""

HITS = itertools.count(40_000)


@pytest.fixture
def shown(page):
    """The panel with a day's work in it; afterwards the page is as it was."""
    given = state()
    # The panel opens with what the test before was given: wait for a number that only this answer has.
    given["graph_cache"]["hits"] = next(HITS)
    with answering(page, given):
        panel = open_panel(page)
        panel.get_by_text(f"{given['graph_cache']['hits']:,}").wait_for()
        yield panel


def test_other_tabs_take_the_place_and_give_it_back(page):
    """The page hands the element of one pack's tab to the next one's, and tells neither."""
    page.evaluate(
        """() => window.app.extensionManager.registerSidebarTab({
            id: 'of-another-pack', title: 'Other', type: 'custom', icon: 'pi pi-box',
            render: element => element.append(Object.assign(document.createElement('p'), { id: 'theirs' })),
        })"""
    )
    try:
        with answering(page, state()) as asked:
            for other, theirs in (("of-another-pack", "#theirs"), ("workflows", ".comfy-vue-side-bar-container")):
                open_panel(page).locator(".accel-row").nth(1).wait_for()
                page.evaluate(EXECUTE, f"Workspace.ToggleSidebarTab.{other}")
                page.locator(theirs).first.wait_for(state="attached")
                page.locator(".accel-panel").wait_for(state="detached")
                page.evaluate(SAY, {"event": "run_end"})
                page.wait_for_timeout(700)
                before = len(asked)
                page.evaluate(SAY, {"event": "run_end"})
                page.wait_for_timeout(700)
                assert len(asked) == before, "nobody looks any more"
            open_panel(page).locator(".accel-row").nth(1).wait_for()
            assert page.locator("#theirs").count() == 0
            close_panel(page)
    finally:
        page.evaluate("window.app.extensionManager.unregisterSidebarTab('of-another-pack')")


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_every_text_is_readable_in_both_themes(page, shown, theme):
    style = "getComputedStyle(document.querySelector('.accel-panel'))"
    colours = f"() => [{style}.color, {style}.backgroundColor]"
    page.wait_for_function(f"{style}.backgroundColor !== 'rgba(0, 0, 0, 0)'")  # the style sheets are there
    before = page.evaluate(colours)
    try:
        page.evaluate(SET, ["Comfy.ColorPalette", theme])
        page.evaluate(SAY, BUSY)
        page.wait_for_timeout(400)
        screenshot(page, f"panel-{theme}")
        found = page.evaluate(CONTRASTS, PANEL)
        assert len(found) > 50
        assert [(ratio, text) for ratio, text in found if ratio < 4.5] == []
        assert (page.evaluate(colours) == before) == (theme == "dark")
    finally:
        page.evaluate(SET, ["Comfy.ColorPalette", "dark"])


def test_another_language_is_taken_at_once(page, shown):
    assert "found for 80% of 5 lookups" in shown.text_content()
    try:
        page.evaluate(SET, ["Comfy.Locale", "zh"])
        shown.get_by_role("heading", name="编译缓存").wait_for()
        screenshot(page, "panel-zh")
        texts = page.evaluate("document.querySelector('.accel-panel').innerText")
        assert "Graph cache" not in texts and "上次运行" in texts
        assert "5 次查找中有 80% 找到" in shown.text_content()
        assert "有补丁（attn2）作用于它" in texts and "another node" not in texts
        assert [ratio for ratio, _ in page.evaluate(CONTRASTS, PANEL) if ratio < 4.5] == []
    finally:
        page.evaluate(SET, ["Comfy.Locale", "en"])
    shown.get_by_role("heading", name="Graph cache").wait_for()


@pytest.mark.parametrize("width", [300, 420, 760, None])
def test_nothing_is_cut_off_at_the_width_or_with_the_page_at_half_its_size(page, shown, width):
    page.evaluate(SAY, BUSY)
    if width is None:
        page.set_viewport_size({"width": 3200, "height": 1660})
    else:
        set_width(page, width)
    try:
        screenshot(page, f"panel-{width}")
        assert page.evaluate(BEYOND) == [0, []]
        assert width is None or shown.locator(".accel-head").is_visible() == (width == 760)
    finally:
        page.set_viewport_size({"width": 1600, "height": 830})


def test_of_thousands_of_entries_the_last_used_are_asked_for(page):
    given = state(5)
    given["graph_cache"]["rows_total"] = 5000
    with answering(page, given) as asked:
        panel = open_panel(page)
        panel.locator(".accel-row").nth(5).wait_for()
        assert asked[-1].endswith("rows=200") and "5 of 5,000" in panel.inner_text()


def test_names_and_reasons_are_shown_as_text_whatever_they_are(page):
    reason = {"reason": MARKUP, "code": MARKUP, "fields": {MARKUP: MARKUP}}
    hostile = state()
    hostile["graph_cache"]["table"] = [row(1, name=MARKUP, model=MARKUP, dtype=MARKUP, failure_reason=reason)]
    hostile["graph_cache"]["fallbacks"] = [{"block": MARKUP, **reason, "calls": MARKUP}]
    hostile["graph_store"].update(folder=MARKUP, misses=[{"block": MARKUP, "reason": MARKUP, "count": 1}])
    hostile["last_run"].update(model=MARKUP, latent=[MARKUP], pixels=[MARKUP])
    hostile["last_run"]["account"].update(how=[reason], gain=[reason])
    hostile["machine"] = [{"name": MARKUP, **reason}]
    hostile["compiling"] = {"name": MARKUP, "number": 1, "of": 2, "seconds": 1}
    with answering(page, hostile):
        panel = open_panel(page)
        panel.locator(".accel-row").nth(1).wait_for()
        page.evaluate(SAY, {"event": "fallback", "block": MARKUP, "reason": MARKUP})
        page.wait_for_timeout(1500)
        assert panel.inner_text().count(MARKUP) >= 6
        assert panel.locator("img, b").count() == 0
        assert page.locator("img[src='x']").count() == 0
        assert page.evaluate("window.accelHacked") is None
        page.evaluate(SAY, {"event": "run_end"})


def test_the_keyboard_reaches_every_control_and_shows_where_it_is(page, shown):
    page.evaluate(EXECUTE, "Accel.OpenPanel")
    page.wait_for_function("document.activeElement?.classList.contains('accel-panel')")
    buttons = "[...document.querySelectorAll('.accel-panel :is(button, input, select, summary)')]"
    wanted = page.evaluate(f"() => {buttons}.filter(part => part.checkVisibility()).length")
    reached = set()
    for _ in range(wanted + 2):
        page.keyboard.press("Tab")
        place, outline = page.evaluate(
            f"() => [{buttons}.indexOf(document.activeElement), getComputedStyle(document.activeElement).outlineStyle]"
        )
        if place < 0:
            break
        assert outline != "none"
        reached.add(place)
    assert len(reached) == wanted
    unnamed = page.evaluate(
        "() => [...document.querySelectorAll('.accel-panel button')]"
        ".filter(button => !(button.textContent.trim() || button.ariaLabel)).length"
    )
    assert unnamed == 0


def test_less_motion_is_given_where_it_is_asked_for(page, shown):
    moves = "how => getComputedStyle(document.querySelector('.accel-busy')).animationName == how"
    page.evaluate(SAY, BUSY)
    page.wait_for_function(moves, arg="accel-turn")
    page.emulate_media(reduced_motion="reduce")
    try:
        page.wait_for_function(moves, arg="none")
    finally:
        page.emulate_media(reduced_motion="no-preference")
