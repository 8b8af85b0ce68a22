"""How the Accel tab looks and is used: themes, languages, widths, the keyboard, thousands of rows, hostile names."""

import itertools

import pytest
from kit.pages import (
    CONTRASTS,
    EVERY_SETUP,
    EXECUTE,
    FRONTENDS,
    MARKUP,
    PANEL,
    SAY,
    SET,
    UNFOLD,
    answering,
    close_panel,
    open_panel,
    row,
    screenshot,
    set_width,
    state,
)

pytestmark = pytest.mark.browser

in_both = pytest.mark.parametrize("setup", FRONTENDS, indirect=True)
in_all = pytest.mark.parametrize("setup", EVERY_SETUP, indirect=True)

BUSY = {"event": "compiling", "name": "BasicTransformerBlock", "number": 3, "of": 9, "stage": "build", "seconds": 2.0}
RENDERED = """
async () => {
    const button = document.querySelector('.accel-header button');
    const until = wanted => new Promise(resolve => {
        const check = () => (wanted() ? resolve(performance.now()) : requestAnimationFrame(check));
        check();
    });
    const rows = () => document.querySelectorAll('.accel-row').length;
    const text = Response.prototype.text;
    let arrived = null;
    Response.prototype.text = async function () {
        const found = await text.call(this);
        arrived = performance.now();
        return found;
    };
    button.click();
    const drawn = await until(() => arrived !== null && rows() > 50);
    Response.prototype.text = text;
    const before = performance.now();
    document.querySelector('.accel-sort button').click();
    return [drawn - arrived, performance.now() - before, rows()];
}
"""
"""Milliseconds from the answer to its rows, and for sorting them; rows drawn, with the headings."""

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
        page.evaluate(SAY, {"event": "run_end"})
        close_panel(page)


@in_all
def test_the_tab_opens_by_its_button_in_each_way_of_drawing_nodes(page):
    with answering(page, state()):
        page.get_by_role("button", name="Accel", exact=True).click()
        page.get_by_text("1.91×").wait_for()
        screenshot(page, "panel-folded")
        page.evaluate(UNFOLD)
        page.locator(".accel-panel .accel-row").nth(1).wait_for()
        screenshot(page, "panel")
        page.get_by_role("button", name="Accel", exact=True).click()
        page.locator(".accel-panel").wait_for(state="detached")


@in_both
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


@in_both
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


@in_both
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


@in_both
@pytest.mark.parametrize("width", [300, 420, 760])
def test_nothing_is_cut_off_at_the_width(page, shown, width):
    page.evaluate(SAY, BUSY)
    set_width(page, width)
    screenshot(page, f"panel-{width}")
    assert page.evaluate(BEYOND) == [0, []]
    assert shown.locator(".accel-head").is_visible() == (width == 760)


@in_both
def test_nothing_is_cut_off_with_the_page_at_half_its_size(page, shown):
    page.set_viewport_size({"width": 3200, "height": 1660})
    try:
        assert page.evaluate(BEYOND) == [0, []]
    finally:
        page.set_viewport_size({"width": 1600, "height": 830})


@in_both
def test_thousands_of_entries_are_drawn_in_a_moment(page):
    with answering(page, state(5000)):
        panel = open_panel(page)
        panel.locator(".accel-row").nth(1).wait_for()
        tries = [page.evaluate(RENDERED) for _ in range(3)]
        screenshot(page, "panel-thousands")
        assert min(drawn for drawn, _, _ in tries) < 200
        assert min(sorting for _, sorting, _ in tries) < 200
        assert tries[0][2] == 51
        assert "50 of 5,000" in panel.inner_text()
        panel.get_by_role("button", name="Show more").click()
        assert panel.locator(".accel-row").count() == 101
        close_panel(page)


@in_both
def test_rows_are_sorted_and_filtered_also_by_the_server(page):
    with answering(page, state()) as asked:
        panel = open_panel(page)
        set_width(page, 760)
        head = panel.get_by_role("columnheader")
        head.get_by_role("button", name="Memory").click()
        cells = panel.locator(".accel-of-bytes[role=cell]").all_inner_texts()
        sizes = [int(text.split()[0]) for text in cells]
        assert sizes == sorted(sizes, reverse=True)
        assert head.nth(2).get_attribute("aria-sort") == "descending"
        head.get_by_role("button", name="Memory").click()
        assert head.nth(2).get_attribute("aria-sort") == "ascending"
        panel.get_by_role("searchbox").fill("resbl")
        names = panel.locator(".accel-row .accel-strong").all_inner_texts()
        assert set(names) == {"ResBlock"} and len(names) == 3
        page.wait_for_timeout(600)
        assert asked[-1].endswith("filter=resbl")
        panel.get_by_role("searchbox").fill("there is none")
        panel.get_by_text("No block type or model contains this text.").wait_for()
        panel.get_by_role("searchbox").fill("")
        head.get_by_role("button", name="Last used").click()
        close_panel(page)


@in_both
def test_names_and_reasons_are_shown_as_text_whatever_they_are(page):
    reason = {"reason": MARKUP, "code": MARKUP, "fields": {MARKUP: MARKUP}}
    hostile, left = state(), [{**reason, "blocks": 1}]
    hostile["graph_cache"]["table"] = [row(1, name=MARKUP, model=MARKUP, dtype=MARKUP, failure_reason=reason)]
    hostile["graph_cache"]["fallbacks"] = [{"block": MARKUP, **reason, "calls": MARKUP}]
    hostile["graph_store"].update(folder=MARKUP, misses=[{"block": MARKUP, "reason": MARKUP, "count": 1}])
    hostile["last_run"].update(model=MARKUP, latent=[MARKUP], pixels=[MARKUP], saved_reasons=[reason])
    hostile["last_run"]["left_eager_reasons"] = left
    hostile["machine"] = [MARKUP]
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
        close_panel(page)


@in_both
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


@in_both
def test_less_motion_is_given_where_it_is_asked_for(page, shown):
    moves = "() => getComputedStyle(document.querySelector('.accel-busy')).animationName"
    page.evaluate(SAY, BUSY)
    assert page.evaluate(moves) == "accel-turn"
    page.emulate_media(reduced_motion="reduce")
    try:
        assert page.evaluate(moves) == "none"
    finally:
        page.emulate_media(reduced_motion="no-preference")
