"""The report in words and as a picture, from a state."""

import dataclasses
import json

import pytest
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.report import chart
from comfy_accel.accel.report import text as report
from comfy_accel.accel.report.savings import Saving
from kit.blocks import in_new_process
from kit.run_facts import run_of

CACHE = {
    **{"entries": 9, "graphs": 11, "hits": 3000, "compilations": 9, "loaded": 3, "seconds": 44.0, "evictions": 0},
    **{"bytes": 7 << 20, "max_bytes": 2 << 30, "max_entries": 512, "table": [], "fallbacks": []},
}
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
    left_eager={Reason("forward_replaced"): 2},
    compilations=2,
    compile_seconds=1.2,
    loaded=3,
    load_seconds=0.3,
    fallbacks={("BasicTransformerBlock", Reason("patched", patch="attn2_patch")): 10},
    model_calls=60,
    replays=54,
    captures=2,
    capture_seconds=0.4,
    steps_taken="FFSFSSFSSF",
    by_compiling=Saving(0.5, Reason("compile_failed", error="Compiling: measured.")),
    by_skipping=Saving(1.5, Reason("compile_failed", error="DeepCache: measured.")),
)


STORE = {"loaded": 3, "saved": 6}


def text_of(run=RUN, diagnosis=(), comparison=None):
    return report.text(run, CACHE, STORE, diagnosis, comparison)


def changed(run, **facts):
    """The same run, but for facts of its skipping."""
    return dataclasses.replace(run, skipping=dataclasses.replace(run.skipping, **facts))


def test_text_says_what_was_compiled_loaded_skipped_saved_and_why_not():
    text = text_of(RUN, ["Do this first.", "Then that."], report.comparison(34.24))
    for said in (
        "SDXL, latent 90x120, batch 1, prompt of 77 tokens, 30 steps of dpmpp_2m: 8.0 s",
        "90 of 100 block calls (90%) ran compiled",
        "This run compiled 2 graphs in 1.2 s",
        "loaded 3 graphs from disk",
        "54 of 60 model calls replayed a CUDA graph",
        "captured 2 CUDA graphs in 0.4 s",
        "5 of 10 steps skipped",
        "FFSFSSFSSF",
        "about 2.0 s of the 10.0 s that it would have taken (20%)",
        "Compiling: measured. DeepCache: measured.",
        "34.2 dB",
        "BasicTransformerBlock: another node patches it (attn2_patch) (10 times)",
        "2 blocks: another extension",
        "11 graphs, 7.0 MB of 2048 MB",
        "Change first:\n  Do this first.\nThen:\n  Then that.",
    ):
        assert said in text
    assert max(map(len, text.splitlines())) < 200
    assert text.index("Time saved") < text.index("Change first") < text.index("ran compiled")


def test_blocks_left_out_are_told_once():
    assert json.dumps(RUN.as_json()).count("another extension has replaced its forward") == 1


def test_unknown_is_not_a_number_and_a_loss_is_called_one():
    text = text_of(None)
    assert "No image was made" in text and "Nothing to change" in text
    run = {"model": "SD15", "latent": (1, 4, 8, 8), "seconds": 1.0}
    assert "Time saved: not known. Nothing of this run was measured." in text_of(run_of(**run))
    slower = run_of(**run, by_compiling=Saving(-0.5, Reason("compiling_saved")))
    assert "it took about 0.5 s longer" in text_of(slower)


def test_traced_blocks_are_called_neither_compiled_nor_captured():
    eager = {**RUN.compiling, "backend": "eager"}
    run = run_of(model="SD15", seconds=1.0, compiling=eager, compiled_calls=5, blocks=5, kinds=1)
    text = text_of(run)
    assert "5 of 5 block calls (100%) ran traced but uncompiled (backend eager)" in text
    assert "5 blocks of 1 type can be traced" in text and "All graphs were there already" in text
    assert "captured" not in text and "ran compiled" not in text


@pytest.mark.parametrize(("psnr", "said"), [(100.0, "equal"), (41.0, "hard to see"), (31.0, "visible side by side")])
def test_psnr_is_told_in_words(psnr, said):
    assert said in report.comparison(psnr)


@pytest.mark.parametrize(
    ("value", "said"), [(0.021, "0.021 s"), (3.44, "3.4 s"), (59.94, "59.9 s"), (125, "2 min 05 s")]
)
def test_seconds_for_people(value, said):
    assert report.seconds(value) == said


def colours(picture):
    return {colour for _, colour in picture.getcolors(1 << 20)}


def rgb(colour):
    return tuple(bytes.fromhex(colour[1:]))


def test_chart_shows_time_calls_steps_and_budget():
    picture = chart.draw(RUN, CACHE, 34.2)
    assert picture.mode == "RGB" and picture.width == 512 and 300 < picture.height < 600
    shown = [chart.BLUE, chart.ORANGE, chart.GREEN, chart.SKY]
    assert {rgb(colour) for colour in shown} <= colours(picture)


def test_what_was_planned_and_saved_is_told_where_anything_was_skipped():
    planned = changed(RUN, steps_taken="FFSSFS", target_db=40.0, skipped_work=0.46)
    said = text_of(planned)
    assert "3 of 6 steps skipped" in said and "FFSSFS   (F full, S skipped)" in said
    assert "planned for 40 dB, 46% of the work skipped" in said
    assert "planned" not in text_of(changed(planned, steps_taken="FFFFFF", skipped_work=0.0))
    assert "0 of 0" not in text_of(changed(planned, steps_taken="", skipped_work=0.0, why_full="another node"))
    assert chart.draw(changed(planned, steps_taken="FS" * 300), CACHE).width == 512
    shown = chart.draw(planned, CACHE)
    assert shown.height > chart.draw(changed(planned, target_db=None), CACHE).height


def line(picture, y):
    return {picture.getpixel((x, y)) for x in range(picture.width)}


def test_widths_of_the_time_bar_are_its_shares():
    picture = chart.draw(RUN, CACHE)
    rows = [
        [picture.getpixel((x, y)) for x in range(picture.width)]
        for y in range(picture.height)
        if sum(picture.getpixel((x, y)) == rgb(chart.ORANGE) for x in range(0, picture.width, 4)) > 15
    ]
    # 6.5 s of sampling, 1.5 s of compiling and loading, 2 s saved, on 480 pixels.
    assert abs(rows[0].count(rgb(chart.ORANGE)) - 480 * 1.5 / 10) <= 2
    assert abs(rows[0].count(rgb(chart.BLUE)) - 480 * 6.5 / 10) <= 2


def test_chart_of_nothing_and_of_long_names_is_drawn():
    assert chart.draw(None, CACHE).height < chart.draw(RUN, CACHE).height
    wide = run_of(model="A" * 400, latent=tuple(range(1, 7)), seconds=0.0, steps_taken="FS" * 400, caching={})
    assert chart.draw(wide, CACHE).width == 512


def test_importing_the_chart_loads_no_pillow():
    code = "import comfy_accel.accel.report.chart; print('PIL' in sys.modules, 'matplotlib' in sys.modules)"
    assert in_new_process(code).split() == ["False", "False"]
