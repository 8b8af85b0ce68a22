"""Messages to the pages: in order, to whom they concern, and none where nobody listens."""

import time

import pytest
from comfy_accel.accel.core.events import emit, subscribe
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.hosts.comfyui.server.panel_messages import LONGEST_SILENCE, Messages
from comfy_accel.accel.report.run import Run

OWN = {"prompt_id": "prompt 1", "to": "somebody"}
LINES = {"event": "node_lines", "lines": {"7": [Reason("line_loaded", seconds="4.8").to_json()]}, "offers": {}}


class Page:
    """Somebody who listens."""

    def __init__(self):
        self.listens, self.got, self.asker, self.stops = True, [], ("somebody", "prompt 1"), False
        self.hear = Messages(
            lambda message, client: self.got.append(message if client is None else {**message, "to": client}),
            lambda: self.listens,
            lambda: self.asker,
            lambda: self.stops,
        )


@pytest.fixture
def page():
    page = Page()
    stop = subscribe(page.hear)
    yield page
    stop()


def run_over():
    emit("run_over", run=Run(lines={"7": [Reason("line_loaded", seconds="4.8")]}))


def test_nothing_is_sent_where_nobody_listens(page):
    page.listens = False
    run_over()
    assert page.got == []


def test_events_become_messages_in_order(page):
    emit("compiling", name="Block", number=1, of=2, stage="trace", node="7")
    emit("compile_end", name="Block", key="x", seconds=1.0)
    emit("compile_failed", name="Block", key="x", reason=Reason("compile_failed", error="no"), seconds=0.1)
    emit("fallback", block="Block", reason=Reason("autocast"))
    run_over()
    emit("cache_changed")
    emit("graph_hit", name="Block", key="x")
    own, public, over, compiled, over_too, failed, fallback, *rest = page.got
    what = {"name": "Block", "number": 1, "of": 2, "stage": "trace", "node": "7", "stops": False}
    assert own == {"event": "node_compiling", **what, "seconds": own["seconds"], **OWN}
    assert public == {"event": "compiling", **what, "seconds": own["seconds"]} and own["seconds"] >= 0
    assert compiled == {"event": "compiled", "name": "Block", "seconds": 1.0}
    assert over == over_too == {"event": "node_compiled", **OWN}
    assert failed == {"event": "compiled", "name": "Block", "seconds": 0.1, "failed": "no"}
    assert fallback == {"event": "fallback", "block": "Block", "of_all": False, **Reason("autocast").to_json(), **OWN}
    assert rest == [{**LINES, **OWN}, {"event": "run_end"}, {"event": "cache_changed"}]


def test_what_is_compiled_is_said_again_before_long_and_at_once_where_it_is_to_stop(page, monkeypatch):
    passed, clock = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed[0])
    assert not page.hear.repeat()
    emit("compiling", name="Block", number=1, of=2, stage="build", node="7")
    for seconds, stops, said in ((2.0, False, False), (LONGEST_SILENCE, False, True), (0.1, True, True)):
        page.got.clear()
        passed[0] += seconds
        page.stops = stops
        assert page.hear.repeat()
        assert [message["stops"] for message in page.got] == [stops] * 2 * said
    page.got.clear()
    emit("compile_end", name="Block", key="x", seconds=1.0)
    assert not page.hear.repeat() and len(page.got) == 2


def test_nobody_is_warned_of_what_is_as_it_should_be_and_of_a_missing_compiler_as_of_all(page):
    emit("fallback", block="Block", reason=Reason("slower", compiled="3.20", eager="3.02"))
    emit("fallback", block="Model", reason=Reason("not_captured", why=Reason("training")))
    emit("fallback", block="Block", reason=Reason("interrupted"))
    assert page.got == []
    emit("fallback", block="Block", reason=Reason("no_triton", command="pip install triton"))
    assert page.got[0]["of_all"]


def test_what_is_of_a_node_goes_to_nobody_but_who_asked_for_the_prompt(page):
    page.asker = (None, "prompt 1")  # a script that listens to nothing
    emit("fallback", block="Block", reason=Reason("autocast"))
    run_over()
    page.asker = ("somebody", "prompt 2")
    run_over()
    everybody = {"event": "run_end"}
    assert page.got == [everybody, {**LINES, "prompt_id": "prompt 2", "to": "somebody"}, everybody]
