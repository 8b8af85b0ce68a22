"""Messages to the pages: in order, a few a second, and none where nobody listens."""

import pytest
from comfy_accel.accel.core.events import emit, subscribe
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.hosts.comfyui.server.panel_messages import _MOST_WAITING, SPACING, PanelMessages
from comfy_accel.accel.report.run import Run

LINES = {"event": "node_lines", "lines": {"7": [Reason("line_loaded").as_json()]}, "offers": {}, "to": "somebody"}
"""Without the prompt that they are of."""


class Page:
    """Somebody who listens, and an event loop whose time passes when told."""

    def __init__(self, listens=True):
        self.listens, self.got, self.due = listens, [], []
        self.asker = ("somebody", "prompt 1")
        self.messages = PanelMessages(
            lambda message, client: self.got.append(message if client is None else {**message, "to": client}),
            lambda s, act: self.due.append((s, act)),
            lambda: self.listens,
            lambda: self.asker,
        )

    def wait(self):
        """Until the next message's time; the seconds that it took."""
        seconds, act = self.due.pop(0)
        act()
        return seconds

    def events(self):
        while self.due:
            self.wait()
        return [message["event"] for message in self.got]


@pytest.fixture
def page():
    made = Page()
    stop = subscribe(made.messages.hear)
    yield made
    stop()


def test_nothing_is_sent_or_planned_where_nobody_listens(page):
    page.listens = False
    emit("run_over", run=Run(lines={"7": [Reason("line_loaded")]}))
    assert page.due == [] and page.got == []


def test_events_become_messages_in_order(page):
    emit("compile_start", name="Block", key="x")
    emit("compiling", name="Block", number=1, of=2, stage="trace", node="7")
    emit("compile_end", name="Block", key="x", seconds=1.0)
    emit("graph_loaded", name="Other", key="y", seconds=0.5)
    emit("fallback", block="Block", reason=Reason("autocast"))
    emit("run_over", run=Run(lines={"7": [Reason("line_loaded")]}))
    emit("cache_changed")
    emit("graph_hit", name="Block", key="x")
    events = ["node_compiling", "compiling", "compiled", "loaded", "fallback", "node_lines", "run_end", "cache_changed"]
    assert page.events() == events
    own, public, compiled, _, fallback, *_ = page.got
    assert public["number"] == 1 and public["stage"] == "trace" and public["seconds"] >= 0
    assert (own["number"], own["node"]) == (1, "7")
    assert compiled == {"event": "compiled", "name": "Block", "seconds": 1.0}
    told = {"prompt_id": "prompt 1", "to": "somebody"}
    assert fallback == {"event": "fallback", "block": "Block", "of_all": False, **Reason("autocast").as_json(), **told}


def test_nobody_is_warned_of_what_is_as_it_should_be_and_of_a_missing_compiler_as_of_all(page):
    emit("fallback", block="Block", reason=Reason("slower", compiled="3.20", eager="3.02"))
    emit("fallback", block="Model", reason=Reason("not_captured", why=Reason("training")))
    emit("fallback", block="Block", reason=Reason("interrupted"))
    assert page.due == []
    emit("fallback", block="Block", reason=Reason("no_triton", command="pip install triton"))
    page.events()
    assert page.got[0]["of_all"]


def test_what_is_of_a_node_goes_to_nobody_but_who_asked_for_the_prompt(page):
    page.asker = (None, "prompt 1")  # a script that listens to nothing
    emit("fallback", block="Block", reason=Reason("autocast"))
    emit("run_over", run=Run(lines={"7": [Reason("line_loaded")]}))
    page.asker = ("somebody", "prompt 2")
    emit("run_over", run=Run(lines={"7": [Reason("line_loaded")]}))
    page.events()
    everybody = {"event": "run_end"}
    assert page.got == [{**LINES, "prompt_id": "prompt 2"}, everybody]


def test_of_many_at_once_the_latest_of_a_sort_is_sent_spaced(page):
    for number in range(1000):
        emit("graph_loaded", name=f"Block{number}", key="x", seconds=0.5)
    emit("run_over", run=Run(lines={"7": [Reason("line_loaded")]}))
    assert page.wait() == 0.0
    assert page.wait() == page.wait() == SPACING
    assert page.got == [
        {"event": "loaded", "name": "Block999", "seconds": 0.5},
        {**LINES, "prompt_id": "prompt 1"},
        {"event": "run_end"},
    ]
    assert page.due == []
    emit("cache_changed")
    assert 0 < page.wait() <= SPACING


def test_a_later_compilation_is_told_after_the_end_of_the_one_before(page):
    for number in (1, 2):
        emit("compile_start", name="Block", key="x")
        emit("compiling", name="Block", number=number, of=2, stage="trace", node=None)
        if number == 1:
            emit("compile_end", name="Block", key="x", seconds=1.0)
    assert page.events() == ["compiled", "node_compiling", "compiling"]
    assert page.got[-1]["number"] == 2
    emit("compile_failed", name="Block", key="x", reason=Reason("compile_failed", error="no"), seconds=0.1)
    assert page.events()[-1] == "compiled" and page.got[-1]["failed"] == "no"


def test_fallbacks_are_told_once_for_each_reason_and_bounded(page):
    for number in range(500):
        emit("fallback", block="Block", reason=Reason("compile_failed", error=f"reason {number}"))
    assert len(page.events()) == _MOST_WAITING


def test_lines_of_two_runs_that_wait_are_sent_together(page):
    emit("cache_changed")
    for node in ("7", "8"):
        emit("run_over", run=Run(lines={node: [Reason("line_loaded")]}))
    page.asker = ("somebody", "prompt 2")
    emit("run_over", run=Run(lines={"9": [Reason("line_loaded")]}))
    page.events()
    lines = [(message["prompt_id"], list(message["lines"])) for message in page.got if "lines" in message]
    assert lines == [("prompt 1", ["7", "8"]), ("prompt 2", ["9"])]
