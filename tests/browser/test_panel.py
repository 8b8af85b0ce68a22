"""The Accel tab with a real server behind it: a run is watched, entries go, settings and commands do what they say."""

import json
import random
import re
import urllib.request

import pytest
from kit.pages import (
    EXECUTE,
    FRONTENDS,
    NO_TOASTS,
    OFF,
    SAY,
    SET,
    answering,
    choosing,
    close_panel,
    get,
    graphs,
    idle,
    open_panel,
    row,
    screenshot,
    state,
    until,
)

from dev.tools import workflow

pytestmark = [
    pytest.mark.browser,
    pytest.mark.parametrize("setup", FRONTENDS, indirect=True),
]

STEPS = 20
NAMED_OFF = graphs("named_off", "off", variable="ACCEL_CUDA_GRAPHS")

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
    yield open_panel(page)
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
    try:
        with page.expect_response("**/accel/settings") as answered:
            page.evaluate(SET, ["Accel.Cache.MaxMB", 512])
        assert answered.value.json()["settings"]["max_mb"] == 512
        assert server_state(server)["graph_cache"]["max_bytes"] == 512 << 20
        ask(server, "/accel/settings", {"max_entries": 77})  # by somebody else
        page.wait_for_function(f"({shown})('Accel.Cache.MaxEntries') === 77")
        # Refused: said, and the server's value is shown again.
        with page.expect_response("**/accel/settings"):
            page.evaluate(SET, ["Accel.Cache.MaxMB", -5])
        page.wait_for_function(f"({shown})('Accel.Cache.MaxMB') === 512")
        page.get_by_text("whole number from 0").last.wait_for()
    finally:
        ask(server, "/accel/settings", {key: before[key] for key in ids.values()})
        page.wait_for_function(f"({shown})('Accel.Cache.MaxMB') === {before['max_mb']}")


def test_settings_and_commands_have_names_in_both_languages(page, server):
    texts = json.loads(get(server, "/i18n"))
    settings = page.evaluate(
        "() => Object.values(window.app.extensionManager.setting.settings)"
        ".filter(({ id }) => id.startsWith('Accel.')).map(({ id, name, tooltip }) => [id, name, tooltip])"
    )
    commands = page.evaluate(
        "() => window.app.extensionManager.command.commands.filter(({ id }) => id.startsWith('Accel.'))"
        ".map(({ id, label }) => [id, label])"
    )
    assert len(settings) == 5 and len(commands) == 3
    for name, title, tooltip in settings:
        english, chinese = (texts[language]["settings"][name.replace(".", "_")] for language in ("en", "zh"))
        assert (english["name"], english["tooltip"]) == (title, tooltip)
        assert chinese["name"] != title and chinese["tooltip"] != tooltip
    for name, label in commands:
        english, chinese = (texts[language]["commands"][name.replace(".", "_")]["label"] for language in ("en", "zh"))
        assert english == label != chinese


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


def test_without_triton_the_panel_says_how_to_install_it_and_of_nothing_that_it_is_compiled(page):
    missing = {"code": "no_triton", "fields": {"command": "pip install triton-windows"}}
    missing["reason"] = "torch needs Triton for the GPU, and it is not installed; this installs it: pip install …"
    given = state(0, machine=["Device: RTX", f"Compiling: no: {missing['reason']}"])
    given["graph_cache"].update(compilations=0, loaded=0, fallbacks=[{"block": "ResBlock", **missing, "calls": 40}])
    ran = {"compiled_calls": 0, "eager_calls": 40, "model_calls": 0, "compile_seconds": 0.0, "loaded": 0}
    given["last_run"].update(ran, gain=[], pays_back_after=None, saved_reasons=[])
    with answering(page, given):
        panel = open_panel(page)
        panel.get_by_text("Device", exact=True).wait_for()
        screenshot(page, "no-triton")
        said = panel.inner_text()
        assert said.count("torch needs Triton") == 2
        assert panel.locator("dd.accel-compiledCalls").inner_text() == "0%"
        assert "compiled in" not in said and "Compiling\n" not in said.partition("This machine")[0]
        close_panel(page)


def test_a_row_of_what_could_not_be_compiled_does_not_say_that_it_was(page):
    given = state(0)
    given["graph_cache"].update(rows_total=1, table=[row(3, graphs=0, seconds=0.0)])
    with answering(page, given):
        panel = open_panel(page)
        assert panel.locator(".accel-row:not(.accel-head) .accel-of-compileTime").inner_text() == "–"
        close_panel(page)


def test_an_interrupted_run_tells_how_far_it_came_and_no_speed(page):
    given = state(2)
    given["last_run"].update(failed=True, steps_done=8, seconds=5.0, gain=[], pays_back_after=None, steps_taken="")
    with answering(page, given):
        panel = open_panel(page)
        assert panel.locator("dd.accel-took").inner_text() == "5 s, stopped after 8 of 25 steps"
        assert [panel.locator(f"dd.accel-{name}").count() for name in ("speed", "paysBack")] == [0, 0]
        assert panel.get_by_text("DeepCache", exact=True).is_hidden()
        close_panel(page)


@pytest.mark.parametrize(
    ("given", "said", "buttons"),
    [
        (OFF, "as with --disable-cuda-malloc", {"Turn on CUDA graphs": "on", "No, thanks": "off"}),
        ({**OFF, "choice": "off"}, "turn them on here", {"Turn on CUDA graphs": "on"}),
        ({**NAMED_OFF, "by_environment": True}, "turned off by ACCEL_CUDA_GRAPHS", {}),
        (graphs("turned_on", "on"), "turned on: restart ComfyUI", {"Turn off CUDA graphs": "off"}),
        (graphs("turned_off", "off"), "turned off: restart ComfyUI", {"Turn on CUDA graphs": "on"}),
        (graphs("on", "on"), "torch uses its own allocator", {"Turn off CUDA graphs": "off"}),
        (graphs("flag", "on"), "started with --cuda-malloc", {"Turn off CUDA graphs": "off"}),
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
            assert section.get_by_role("button").all_inner_texts() == list(buttons)
        if given is OFF:
            screenshot(page, "graphs-in-panel")
        for name in buttons:
            page.evaluate(NO_TOASTS)
            section.get_by_role("button", name=name).click()
            page.wait_for_timeout(200)
        assert chosen == list(buttons.values())
        close_panel(page)


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
        close_panel(page)


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        (idle(), 200, "Add Speed Up before the sampler"),
        ({"error": "no such route"}, 404, "restart ComfyUI"),
        ("", 500, "does not answer"),
        ({"graph_cache": {"entries": 1, "compilations": 1, "table": [{"name": "ResBlock"}]}}, 200, "ResBlock"),
        ({"graph_cache": {"table": None}, "last_run": {}}, 200, "Last run"),
        ({}, 200, "Nothing is accelerated yet"),
        ([], 200, "Nothing is accelerated yet"),
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
        close_panel(page)
    assert not [
        complaint for complaint in page.complaints if "accel" in complaint and "Failed to load" not in complaint
    ]


def test_the_panel_fills_once_the_server_is_back(page):
    with answering(page, {}, 404):
        panel = open_panel(page)
        panel.get_by_text("restart ComfyUI").wait_for()
    with answering(page, state(2, compiling={"name": "ResBlock", "number": 1, "of": None, "seconds": 1.0})):
        panel.get_by_role("button", name="Try again").click()
        panel.locator(".accel-row .accel-strong").first.wait_for()
        assert "ResBlock" in panel.locator(".accel-progress").inner_text()
        assert panel.get_by_role("progressbar").get_attribute("aria-valuenow") is None
        close_panel(page)


def test_captured_calls_are_told_from_compiled_blocks(page):
    with answering(page, state()):
        panel = open_panel(page)
        assert panel.locator("dd.accel-replays").inner_text() == "18 of 25"
        captured = panel.locator(".accel-row", has_text="UNetModel call")
        assert captured.locator(".accel-of-compileTime").inner_text() == "CUDA graph, 0.3 s"
        assert "exact size" in captured.locator(".accel-of-usedFor").inner_text()
        close_panel(page)
