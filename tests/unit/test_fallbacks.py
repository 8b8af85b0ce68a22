"""What ran eagerly: one line and one row for each reason."""

from comfy_accel.accel.core.events import log
from comfy_accel.accel.core.fallbacks import _MOST, Fallbacks
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.report.log import add_name


def test_lines_in_a_program_s_log_begin_with_whose_they_are(caplog):
    log.addFilter(add_name)
    try:
        Fallbacks().note("Block", Reason("autocast"))
    finally:
        log.removeFilter(add_name)
    assert [record.getMessage().partition(", and")[0] for record in caplog.records] == [
        "Accel: Block runs uncompiled: autocast is on"
    ]


def test_nobody_is_warned_of_what_is_as_it_should_be_also_within_another_reason(caplog):
    for why in ("device_busy", "training"):
        Fallbacks().note("Flux", Reason("not_captured", why=Reason(why)), "block by block")
    assert [record.message.rpartition(": ")[2] for record in caplog.records if record.levelname == "WARNING"] == [
        "it is being trained"
    ]


def test_reasons_that_differ_in_numbers_alone_are_one_with_the_latest(caplog):
    said = Fallbacks()
    caplog.set_level("INFO")
    for milliseconds in (17.5, 3.04):
        before = said.counts()
        said.note("Block", Reason("slower", compiled=f"{milliseconds:.2f}", eager="1.2e-03"))
    fields = {"compiled": "3.04", "eager": "1.2e-03"}
    reason = "slower at this size (3.04 ms a call compiled, 1.2e-03 uncompiled)"
    assert [(str(why), calls) for (_, why), calls in said.subtract(before).items()] == [(reason, 1)]
    assert said.rows() == [{"block": "Block", "code": "slower", "fields": fields, "reason": reason, "calls": 2}]
    assert len([record for record in caplog.records if "runs uncompiled" in record.message]) == 1
    for name in ("attn1", "attn2"):  # names, and no numbers
        said.note("Block", Reason("patched", patch=name))
    assert len(said.rows()) == 3


def test_counts_since_have_only_the_calls_that_came_after():
    said = Fallbacks()
    said.note("Block", Reason("autocast"))
    said.note("Block", Reason("gradients"))
    before = said.counts()
    said.note("Block", Reason("autocast"))
    assert said.subtract(before) == {("Block", Reason("autocast")): 1}


def test_table_is_bounded():
    said = Fallbacks()
    for number in range(_MOST + 5):
        said.note(f"Block{number}", Reason("no_blocks"))
    assert len(said.rows()) == _MOST
