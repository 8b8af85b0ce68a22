"""The line on a node after a run: what it gained, or what stands in the way."""

import pytest
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.report.headline import headline
from comfy_accel.accel.report.run import Totals
from comfy_accel.accel.report.run_record import RunRecords
from comfy_accel.accel.report.savings import Saving
from kit.run_facts import run_of

COMPILING, CACHING = {"node": "3"}, {"node": "4"}
NOT_CAPTURED = Reason("not_captured", why=Reason("training"))


def saved(seconds):
    return Saving(seconds, Reason("compiling_saved"))


def run(**facts):
    facts = {"compiling": COMPILING, "seconds": 6.8, "compiled_calls": 900, "compiled_seconds": {"": 14.0}, **facts}
    return run_of(**facts)


def line(node="3", **facts):
    return " · ".join(map(str, headline(run(**facts), node)))


def uncompiled(*reasons):
    return {("Block", reason): 9 - place for place, reason in enumerate(reasons)}


SAID = [
    ({"by_compiling": saved(2.1)}, "1.31× · 2.1 s saved · compiled once in 14 s · paid back after 7 images"),
    ({"by_compiling": saved(2.1), "seconds": 20.8, "compile_seconds": 14.0, "compilations": 4}, "1.31× · 2.1 s saved"),
    ({"by_compiling": saved(0.01), "compilations": 4}, "no faster than without Accel · compiled once in 14 s"),
    ({"by_compiling": saved(-0.1)}, "no faster than without Accel"),
    ({"by_compiling": saved(-1.0)}, "1.0 s slower than without Accel"),
    ({"compilations": 4}, "compiled once in 14 s · gain known after the next image"),
    ({"loaded": 4, "compiled_seconds": {}}, "compiled graphs loaded from disk"),
    ({"compiled_calls": 0, "fallbacks": uncompiled(NOT_CAPTURED, Reason("autocast"))}, "not compiled: autocast is"),
    (
        {"by_compiling": saved(2.1), "eager_calls": 600, "fallbacks": uncompiled(Reason("autocast"))},
        "1.31× · 2.1 s saved · compiled once in 14 s · paid back after 7 images · 40% uncompiled: autocast is on",
    ),
    (
        {
            **{"by_compiling": saved(2.1), "eager_calls": 600},
            "fallbacks": uncompiled(Reason("slower", compiled="3.2", eager="3.0")),
        },
        "1.31× · 2.1 s saved · compiled once in 14 s · paid back after 7 images",
    ),
    ({"compiled_calls": 0, "left_eager": {Reason("no_blocks"): 3, Reason("training"): 9}}, "not compiled: it is being"),
    ({"compiling": {**COMPILING, "backend": "eager"}, "compilations": 4}, "traced but uncompiled (backend eager)"),
    ({"compiled_calls": 0}, "not compiled: No compiled block ran."),
    ({"by_compiling": saved(20.0)}, "3.94× · 20 s saved · compiled once in 14 s · paid back at once"),
    (
        {"by_compiling": saved(4.0), "latent": (8, 4, 64, 64)},
        "1.59× · 4.0 s saved · compiled once in 14 s · paid back after 28",
    ),
]


@pytest.mark.parametrize(("facts", "said"), SAID, ids=[said[:40] for _, said in SAID])
def test_compiling_says_what_it_gained_or_what_stands_in_the_way(facts, said):
    assert line(**facts).startswith(said) and ("uncompiled: " in said) == ("uncompiled: " in line(**facts))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("FFFSSFSSFSSF", "6 of 12 steps skipped"),
        ("FFFF", "too few steps to skip any"),
        ("F" * 20, "no step skipped: too much changes between them"),
    ],
)
def test_skipping_says_how_many_steps_or_why_none(steps, said):
    assert line("4", compiling=None, caching=CACHING, steps_taken=steps) == said


def test_each_node_tells_of_its_own_part_and_one_that_does_both_of_both():
    facts = {"by_compiling": saved(2.0), "by_skipping": saved(3.0), "caching": CACHING, "steps_taken": "FFSS"}
    assert line("3", **facts).startswith("1.29× · 2.0 s saved · compiled")
    assert line("4", **facts) == "1.44× · 3.0 s saved · 2 of 4 steps skipped"
    both = line("3", **{**facts, "caching": COMPILING})
    assert both.startswith("1.74× · 5.0 s saved · compiled once") and both.endswith("2 of 4 steps skipped")


def test_seconds_of_compiling_are_those_of_all_runs_of_the_model():
    records = RunRecords()
    for compiled in (9.0, 5.0):
        records.hear("run_start", {"owner": 1, "model": "SDXL", "compiling": COMPILING})
        records.hear("compile_end", {"name": "Block", "seconds": compiled})
        records._open[next(iter(records._open))][-1].run.totals = Totals(compiled_calls=10)
        records.hear("run_end", {"owner": 1, "failed": False})
    assert "compiled once in 14 s" in said(records)


def said(records, node="3"):
    return " · ".join(map(str, records.last().lines[node]))


def test_what_compiling_took_is_not_said_for_ever():
    """Until it has paid off; where it never will, once."""
    facts = {"by_compiling": saved(2.1)}
    assert line(**facts, images=7).endswith("paid back after 7 images")
    assert line(**facts, images=8) == "1.31× · 2.1 s saved"
    assert line(by_compiling=saved(-1.0), images=2) == "1.0 s slower than without Accel"


def test_an_interrupted_run_says_how_far_it_came_and_no_speed():
    records = RunRecords()
    for prompt, done in (("a", 8), ("b", None), ("c", 0)):
        records.hear("run_start", {"owner": 1, "prompt": prompt, "steps": 200, "compiling": COMPILING})
        records.hear("run_end", {"owner": 1, "failed": True, "steps_done": done})
        assert records.last().times_by(saved(2.0)) is None
        assert records.last().lines == ({} if done is None else {"3": [Reason("line_stopped", done=done, steps=200)]})
    assert "stopped after 0 of 200 steps" in said(records)


def test_an_interrupt_in_the_second_pass_counts_the_steps_of_both():
    records = RunRecords()
    for failed, steps, done in ((False, 20, None), (True, 10, 3)):
        records.hear("run_start", {"owner": 1, "prompt": "a", "steps": steps, "compiling": COMPILING})
        records.hear("run_end", {"owner": 1, "failed": failed, "steps_done": done})
    assert said(records) == "stopped after 23 of 30 steps"


def test_images_are_counted_once_for_all_passes_of_a_prompt():
    records = RunRecords()
    for prompt in ("a", "a", "b", None):
        records.hear("run_start", {"owner": 1, "model": "SDXL", "prompt": prompt, "latent": (2, 4, 8, 8)})
        records.hear("run_end", {"owner": 1, "failed": False})
    assert records.last().images == 6


def test_failed_runs_and_nodes_with_nothing_new_leave_the_line_before():
    assert line(failed=True, by_compiling=saved(2.1)) == ""
    assert line(compiled_seconds={}) == ""


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"steps_taken": "F" * 20, "why_full": "the noise levels go up and down"},
            "no step skipped: the noise levels go up and down",
        ),
        ({"why_full": "another node makes the calls"}, "no step skipped: another node makes the calls"),
        (
            {"target_db": 40.0, "steps_taken": "FFSS", "skipped_work": 0.46},
            "planned for 40 dB, 46% of the work skipped",
        ),
        ({"target_db": 40.0, "steps_taken": "F" * 4, "skipped_work": 0.0}, "too few steps to skip any"),
    ],
)
def test_what_was_planned_is_told_or_what_keeps_every_step_full(facts, said):
    assert line("4", compiling=None, caching=CACHING, **facts) == said
