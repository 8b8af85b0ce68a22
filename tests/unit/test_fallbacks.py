"""What ran eagerly: one line and one row for each reason."""

from comfy_accel.accel.core.fallbacks import _MOST, Fallbacks


def test_reasons_that_differ_in_numbers_alone_are_one(caplog):
    said = Fallbacks()
    for milliseconds in (3.04, 17.5):
        said.note("Block", f"it takes {milliseconds:.2f} ms for (154x512), off by 1.2e-{milliseconds:02.0f}")
    assert said.rows() == [{"block": "Block", "reason": "it takes 3.04 ms for (154x512), off by 1.2e-03", "calls": 2}]
    assert len([record for record in caplog.records if "runs uncompiled" in record.message]) == 1


def test_names_that_end_in_numbers_are_told_apart():
    said = Fallbacks()
    said.note("Block", "a patch (attn1) concerns it")
    said.note("Block", "a patch (attn2) concerns it")
    assert len(said.rows()) == 2


def test_table_is_bounded():
    said = Fallbacks()
    for number in range(_MOST + 5):
        said.note(f"Block{number}", "some reason")
    assert len(said.rows()) == _MOST
