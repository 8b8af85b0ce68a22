"""What is said of a run: facts for the report, and the lines on nodes."""

import dataclasses
import json

import pytest
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.core.sentences import LOADED_IN_PART
from comfy_accel.accel.hosts.comfyui.words import add_advice, advice
from comfy_accel.accel.report.account import Saving, compute_compile_saving, format_seconds
from comfy_accel.accel.report.facts import cache_fact, facts_of, line_of, make_skip_fact
from comfy_accel.accel.report.run import Skipping, Totals
from comfy_accel.accel.report.run_record import RunRecords
from kit.run_facts import run_of

CACHE = {
    **{"graphs": 11, "hits": 3000, "compilations": 9, "loaded": 3, "seconds": 44.0, "evictions": 2},
    **{"bytes": 7 << 20, "max_bytes": 2 << 30},
}
COMPILING, CACHING = {"node": "3"}, {"node": "4"}
NOT_CAPTURED = Reason("not_captured", why=Reason("training"))


def saved(seconds):
    return Saving(seconds, Reason("compiling_saved"))


RUN = run_of(
    model="SDXL",
    latent=(1, 4, 90, 120),
    steps=30,
    sampler="dpmpp_2m",
    compiling={"backend": "inductor", "shapes": "any size", "check_gain": True},
    caching={"interval": 3},
    contexts=(77,),
    seconds=8.0,
    compiled_calls=90,
    eager_calls=10,
    blocks=70,
    kinds=9,
    compilations=2,
    compile_seconds=1.2,
    loaded=3,
    load_seconds=0.3,
    fallbacks={
        ("BasicTransformerBlock", Reason("patched", patch="attn2_patch")): 9,
        ("ResBlock", Reason("patched", patch="attn2_patch")): 1,
        ("ResBlock", Reason("forward_replaced")): 2,
        ("SDXL", NOT_CAPTURED): 6,
    },
    model_calls=60,
    replays=54,
    captures=2,
    capture_seconds=0.4,
    loaded_share=0.4,
    steps_taken="FFSSFS",
    target_db=40.0,
    skipped_work=0.46,
    by_compiling=saved(0.5),
    by_skipping=Saving(1.5, Reason("skipping_saved")),
)


def sentences(run=RUN):
    return "\n".join(fact.sentence for fact in facts_of(run))


def changed(run, **facts):
    """The same run, but for facts of its skipping."""
    return dataclasses.replace(run, skipping=dataclasses.replace(run.skipping, **facts))


def test_sentences_say_what_was_made_gained_compiled_and_skipped_and_what_was_not():
    said = sentences()
    for sentence in (
        "SDXL, latent 90×120, prompt of 77 tokens, 30 steps of dpmpp_2m: 8.0 s.",
        "Gain: no faster than without Accel, later images about 1.3×, 2.0 s saved.",
        "1.9 s of this image are paid once, and counted: compiled once in 1.2 s, compiled graphs loaded from disk in "
        "0.3 s, CUDA graphs captured in 0.4 s.",
        "How this is known: Compiling: an estimate.",
        "Only 40% of the model fits",
        "90 of 100 block calls (90%) ran compiled",
        "70 blocks of 9 types can be compiled",
        "54 of 60 model calls replayed a CUDA graph",
        "skipped 3 of 6 steps, 46% of the work, as planned for 40 dB.\n  FFSSFS   (F",
        "10 calls of BasicTransformerBlock, ResBlock ran uncompiled: another node patches it (attn2_patch).",
        "6 calls of SDXL: not captured as a CUDA graph: it is being trained.",
        "2 calls of ResBlock ran uncompiled: another extension has replaced its forward.",
    ):
        assert said.count(sentence) == 1, sentence
    assert said.startswith("Last image") and max(map(len, said.splitlines())) < 420
    assert json.dumps(RUN.to_json()).count("another extension has replaced its forward") == 1


def test_what_another_node_compiles_is_not_said_to_run_uncompiled():
    (*_, said) = facts_of(run_of(fallbacks={("Flux", Reason("compiled_around")): 3}))
    assert said.sentence.startswith("3 calls of Flux ran without Accel: another node compiles the model")


def test_many_reasons_are_counted_and_the_most_frequent_told():
    rows = {(f"Block{number % 5}", Reason("compile_failed", error=f"error {number // 5}")): 1 for number in range(60)}
    told = facts_of(run_of(fallbacks=rows))[2:]
    assert len(told) == 9 and told[-1].sentence == "There are 4 more reasons."
    assert told[0].sentence == "5 calls of Block0, Block1, Block2 and others ran uncompiled: error 0."


def test_the_cache_says_how_full_it_is():
    said = cache_fact(CACHE, {"loaded": 3, "saved": 6}).sentence
    assert "11 graphs, 7.0 MB of 2048 MB" in said and "2 dropped" in said and "3 loaded and 6 saved" in said


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "Gain: not known. Nothing of this run was measured."),
        ({"compiling": COMPILING, "by_compiling": saved(-0.5)}, "Gain: about 0.5 s slower than without Accel."),
        ({"failed": True}, "1.0 s, until it failed or was stopped."),
        ({"failed": True, "steps": 20, "steps_done": 8}, "1.0 s, until it was stopped after 8 steps."),
        ({"compiling": {"backend": "eager"}, "compiled_calls": 5}, "5 of 5 block calls (100%) ran traced but uncomp"),
    ],
)
def test_unknown_is_not_a_number_and_a_loss_is_called_one(facts, said):
    assert said in sentences(run_of(model="SD15", latent=(1, 4, 8, 8), seconds=1.0, **facts))


def test_traced_blocks_are_called_neither_compiled_nor_captured():
    eager = {"backend": "eager"}
    said = sentences(run_of(model="SD15", seconds=1.0, compiling=eager, compiled_calls=5, blocks=5, kinds=1))
    assert "5 blocks of 1 type can be traced" in said and "captured" not in said and "ran compiled" not in said


@pytest.mark.parametrize(("value", "said"), [(0.021, "0.02"), (3.44, "3.4"), (59.94, "60"), (125, "125")])
def test_seconds_for_people(value, said):
    assert format_seconds(value) == said


# What to do about it


@pytest.mark.parametrize(
    ("facts", "sampler", "said"),
    [
        ({"steps_taken": "F" * 6}, "euler", "none of 6 steps: with so few, each changes too much. It pays from about"),
        ({"steps_taken": "F" * 30}, "euler", "none of 30 steps: too much changed between them. Sample more steps, or"),
        ({"steps_taken": "F" * 30}, "euler_ancestral", "euler_ancestral adds new noise in each: use euler"),
        ({"why_full": "another node makes the calls"}, "euler", "DeepCache skipped no step: another node makes"),
    ],
)
def test_why_no_step_was_skipped_comes_with_what_to_do(facts, sampler, said):
    assert said in add_advice(make_skip_fact(Skipping(**facts)), sampler)


@pytest.mark.parametrize(
    ("facts", "code", "said"),
    [
        ({"compiling": {"backend": "eager"}, "compiled_calls": 5}, "line_traced", "inductor"),
        ({"loaded_share": 0.4}, LOADED_IN_PART, "smaller batch"),
        ({"fallbacks": {("Block", Reason("patched", patch="attn2")): 9}}, "patched", "Without that patch"),
        ({"fallbacks": {("Block", Reason("cache_bytes_full", megabytes="2")): 9}}, "cache_bytes_full", "limits"),
        ({"fallbacks": {("Block", Reason("no_triton", command="pip install triton")): 9}}, "no_triton", "pip install"),
        ({"fallbacks": {("Block", Reason("slower", compiled="2", eager="1")): 9}}, "slower", None),
        ({"fallbacks": {("Block", Reason("autocast")): 9}}, "autocast", None),
    ],
)
def test_advice_is_given_where_somebody_can_act_on_it(facts, code, said):
    (fact,) = [fact for fact in facts_of(run_of(**facts)) if getattr(fact.why, "code", fact.why) == code]
    assert (advice(fact.why) is None) == (said is None) and (said or "") in add_advice(fact)
    assert add_advice(fact).splitlines()[0].endswith(".")


def test_where_all_is_well_nothing_is_to_be_changed():
    well = run_of(compiling=COMPILING, compiled_calls=9, loaded_share=1.0, caching=CACHING, steps_taken="FS")
    assert [fact.why for fact in facts_of(well)] == [None] * 4


# The line on a node


def run(**facts):
    facts = {"compiling": COMPILING, "seconds": 6.8, "compiled_calls": 900, "owed": {"": 12.0}, **facts}
    return run_of(**facts)


def line(node="3", **facts):
    return " · ".join(map(str, line_of(run(**facts), node)))


def uncompiled(*reasons):
    return {("Block", reason): 9 - place for place, reason in enumerate(reasons)}


MADE = {"compilations": 4, "compile_seconds": 14.0, "seconds": 20.8}
SAID = [
    ({"by_compiling": saved(2.1)}, "about 1.3× · about 2.1 s saved · pays off after 6 more images"),
    ({"by_compiling": saved(2.1), "owed": {"": -0.1}}, "about 1.3× · about 2.1 s saved"),
    (
        {"by_compiling": saved(2.1), **MADE},
        "about 12 s slower than without Accel · compiled once in 14 s · later images about 1.3×, 2.1 s saved · pays "
        "off after 6 more images",
    ),
    ({"by_compiling": saved(0.01), **MADE}, "about 14 s slower than without Accel · compiled once in 14 s"),
    ({"by_compiling": saved(-0.1)}, "no faster than without Accel"),
    ({"by_compiling": saved(-1.0)}, "about 1.0 s slower than without Accel"),
    (MADE, "compiled once in 14 s · gain known after the next image"),
    (
        {**MADE, "by_compiling": compute_compile_saving(9, {}, False)},
        "compiled once in 14 s · How much compiling saved is not m",
    ),
    ({"loaded": 4, "load_seconds": 4.8}, "compiled graphs loaded from disk in 4.8 s · Nothing of"),
    (
        {"loaded": 4, "load_seconds": 4.8, "by_compiling": saved(0.3), "owed": {"": 4.5}, "seconds": 8.8},
        "about 4.5 s slower than without Accel · compiled graphs loaded from disk in 4.8 s · later images about 1.1×, "
        "0.3 s saved · pays off after 15 more images",
    ),
    ({"compiled_calls": 0, "fallbacks": uncompiled(NOT_CAPTURED, Reason("autocast"))}, "not compiled: autocast is"),
    (
        {"by_compiling": saved(2.1), "eager_calls": 600, "fallbacks": uncompiled(Reason("autocast"))},
        "about 1.3× · about 2.1 s saved · pays off after 6 more images · 40% of the calls uncompiled: autocast is on",
    ),
    (
        {"by_compiling": saved(2.1), "eager_calls": 3, "fallbacks": uncompiled(Reason("patched", patch="attn2"))},
        "about 1.3× · about 2.1 s saved · pays off after 6 more images · 1% of the calls uncompiled: another",
    ),
    (
        {
            **{"by_compiling": saved(2.1), "eager_calls": 600},
            "fallbacks": uncompiled(Reason("slower", compiled="3.2", eager="3.0")),
        },
        "about 1.3× · about 2.1 s saved · pays off after 6 more images · 40% of the calls uncompiled: slower at",
    ),
    (
        {"compare_seconds": 48.0, "survey_seconds": 5.6, "load_seconds": 3.7, "loaded": 3, "seconds": 60.0}
        | {"by_compiling": saved(0.3), "owed": {"": 56.0}},
        "about 57 s slower than without Accel · compared with the plain model in 48 s · later images about 1.1×, 0.3 s"
        " saved",
    ),
    (
        {**MADE, "is_beside": True, "survey_seconds": 2.0, "by_compiling": saved(2.1)},
        "about 14 s slower than without Accel · traced once in 14 s · model examined in 2.0 s · later images about 1.4×"
        ", 2.1 s saved · pays off after 6 more images",
    ),
    ({"compiling": {**COMPILING, "backend": "eager"}, "compilations": 4}, "traced but uncompiled (backend eager)"),
    ({"compiled_calls": 0}, "not compiled: No compiled block ran."),
    (
        {"by_compiling": saved(20.0), **MADE, "owed": {"": -6.0}},
        "about 1.3× · about 6.0 s saved · compiled once in 14 s",
    ),
    (
        {"by_compiling": saved(4.0), "latent": (8, 4, 64, 64)},
        "about 1.6× · about 4.0 s saved · pays off after 24 more images",
    ),
]


@pytest.mark.parametrize(("facts", "said"), SAID, ids=[said[:40] for _, said in SAID])
def test_compiling_says_what_it_gained_or_what_stands_in_the_way(facts, said):
    assert line(**facts).startswith(said) and all(
        (part in said) == (part in line(**facts)) for part in ("uncompiled: ", "pays off")
    )


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"steps_taken": "FFFSSFSSFSSF"}, "6 of 12 steps skipped"),
        ({"steps_taken": "FFFF"}, "no step skipped: with so few, each changes too much"),
        ({"steps_taken": "F" * 20}, "no step skipped: too much changed between them"),
        ({"steps_taken": "F" * 20, "samplings": 2}, "no step skipped: with so few, each changes too much"),
        ({"steps_taken": "F" * 20, "why_full": "levels go up and down"}, "no step skipped: levels go up and down"),
        ({"why_full": "another node makes the calls"}, "no step skipped: another node makes the calls"),
        (
            {"target_db": 40.0, "steps_taken": "FFSS", "skipped_work": 0.46},
            "46% of the work skipped, planned for 40 dB",
        ),
        (
            {"target_db": 40.0, "steps_taken": "F" * 4, "skipped_work": 0.0},
            "no step skipped: with so few, each changes too much",
        ),
    ],
)
def test_skipping_says_how_much_or_why_none(facts, said):
    assert line("4", compiling=None, caching=CACHING, **facts) == said


def test_each_node_tells_of_its_own_part_and_one_that_does_both_of_both():
    facts = {"by_compiling": saved(2.0), "by_skipping": saved(3.0), "caching": CACHING, "steps_taken": "FFSS"}
    assert line("3", **facts) == "about 1.3× · about 2.0 s saved · pays off after 6 more images"
    assert line("4", **facts) == "about 1.4× · about 3.0 s saved · 2 of 4 steps skipped"
    both = line("3", **{**facts, "caching": COMPILING})
    assert both == "about 1.7× · about 5.0 s saved · pays off after 3 more images · 2 of 4 steps skipped"


def test_line_begins_with_the_quality_and_the_size_that_it_is_of():
    facts = {"by_compiling": saved(2.0), "owed": {}, "latent": (2, 4, 64, 96), "pixels": (768, 512)}
    assert line(**facts).startswith("768×512 ×2 · about 1.3×")
    facts["compiling"] = {**COMPILING, "quality": "Exact"}
    assert line(**facts).startswith("Exact 768×512 ×2 · about 1.3×")
    assert line("4", **facts, caching=CACHING, steps_taken="FFSS").startswith("768×512 ×2 · 2 of 4")


def test_what_was_paid_is_owed_until_images_have_saved_as_much():
    records, owed = RunRecords(), []
    for paid, gained in ((9.0, None), (5.0, 4.0), (0.0, 4.0), (0.0, 7.0)):
        records.hear("run_start", {"owner": 1, "model": "SDXL", "compiling": COMPILING})
        records.hear("compile_end", {"name": "Block", "seconds": paid})
        now = records._open[next(iter(records._open))][-1]
        now.began -= 20.0
        now.run.totals = Totals(compiled_calls=10, by_compiling=Saving(gained, Reason("compiling_saved")))
        records.hear("run_end", {"owner": 1, "failed": False})
        owed.append(records.last().account().owed)
    assert owed == [9.0, 10.0, 6.0, -1.0]


def said(records, node="3"):
    return " · ".join(map(str, records.last().lines[node]))


def test_an_interrupted_run_says_how_far_it_came_and_no_speed():
    records = RunRecords()
    for prompt, done in (("a", 8), ("b", None), ("c", 0)):
        records.hear("run_start", {"owner": 1, "prompt": prompt, "steps": 200, "compiling": COMPILING})
        records.hear("run_end", {"owner": 1, "failed": True, "steps_done": done})
        assert records.last().account().times is None
        assert records.last().lines == ({} if done is None else {"3": [Reason("line_stopped", done=done, steps=200)]})
    assert "stopped after 0 of 200 steps" in said(records)


def test_an_interrupt_in_the_second_pass_counts_the_steps_of_both():
    records = RunRecords()
    for failed, steps, done in ((False, 20, None), (True, 10, 3)):
        records.hear("run_start", {"owner": 1, "prompt": "a", "steps": steps, "compiling": COMPILING})
        records.hear("run_end", {"owner": 1, "failed": failed, "steps_done": done})
    assert said(records) == "stopped after 23 of 30 steps"


def test_run_that_an_error_ended_has_no_line_and_one_without_a_gain_says_why():
    assert line(failed=True, by_compiling=saved(2.1)) == ""
    assert line(by_compiling=Saving(None, Reason("compiling_unmeasured"))) == str(Reason("compiling_unmeasured"))
