"""The models that people run, as core loads and samples them: what works of each. docs/models.md has what was seen.

`dev.py test --all tests/comfyui/test_models.py --write-models` runs all of it and writes the page, for this ComfyUI.
"""

import dataclasses
import json
import random
import re

import comfy.sd
import comfy.supported_models
import comfyui_version
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.controlnet import accelerate_control
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.modules.blocks import blocks
from comfy_accel.accel.report.run_record import records
from kit import families
from kit import streamed_weights as stand_in
from kit.captures import EAGER_BLOCKS, capturing_cache
from kit.compiled import graphs
from kit.controls import CONTROLS
from kit.core_families import NOT_SAMPLED, OTHERS
from kit.deep_cache import last_run
from kit.other_nodes import lora
from kit.step_cache import every
from kit.thorough import thorough_except, todays

from dev import ROOT

CORE = comfyui_version.__version__
FAMILIES = families.FAMILIES | OTHERS
JSON, PAGE = ROOT / "docs" / "models.json", ROOT / "docs" / "models.md"

COLUMNS = ("compiled", "DeepCache", "ControlNet", "quantised", "streamed", "captured")

HEAD = """# Models

What was seen to work: of every class of ComfyUI 0.33 that is sampled a tiny model, loaded and sampled by ComfyUI on a
CPU. Every image was compared with the one that ComfyUI makes without this pack. Nothing here says how fast anything
is. `dev.py test --all tests/comfyui/test_models.py --write-models` makes this page, from [models.json](models.json);
the tests run the same rows and compare.

- **compiled**: block types/graphs made for them in the first image, a batch of 1. A negative prompt beside it, another
  size, a longer prompt, a batch of 3 and a LoRA compiled nothing more, or (+) as many for the first larger batch.
  (n): why other blocks ran uncompiled.
- **DeepCache**: the last two of 4 steps were skipped.
- **ControlNet**: compiled beside the model, where the tests have one for it.
- **fp8**: weights stored so, with a LoRA too; “–” where ComfyUI itself cannot run it.
- **streamed**: weights that ComfyUI streams (DynamicVRAM), on a stand-in for its allocator that takes them away at
  random, with a LoRA, and other weights in between.
- **captured**: whole calls captured and replayed, on a stand-in for CUDA graphs.

"""

NOTES = """
RT-DETR, SAM 3 and Depth Anything 3 are not sampled. *Wan causal* with ComfyUI's *Sampler AR Video* runs uncompiled, for
the same images: its blocks write down what the next frames need.

Of newer models only blocks of their shape were run: *Kandinsky 6*'s and *Qwen-Image 2.1*'s are compiled once for every
size, *Prism*'s for each of the first four sizes. So are *PixelDiT*'s pixel blocks.
"""

GOOD = re.compile("2 of 4 steps skipped|compiled|replayed|fp8")
BESIDE, NOT_CAPTURED = "; other blocks: ", "not captured as a CUDA graph: "


SETTINGS = CompileSettings(backend="eager")

ROUNDS = {"ACE-Step 1.5": 2e-6, "ACE-Step": 2e-6, "TripoSplat": 2e-6} | dict.fromkeys(("Cosmos", "Cosmos i2v"), 2e-5)
ROUNDS |= dict.fromkeys(("SVD", "SV3D u", "SV3D p"), 4e-5)
"""Families where a copy made contiguous is summed in another order, and by how much of the largest value images differ
for it: more from a noise level of 700 down. The others are equal bit for bit."""

CONTROLLED_BY = {"SD1.5": "ControlNet of three levels", "Flux": "Flux XLabs", "SD3": "SD3", "Qwen-Image": "Qwen-Image"}

FURTHER = {"MiniMax H3": 1, "HiDream": 1, "HiDream-O1": 1, "Hunyuan3D 2.1": 1}
FURTHER |= {"Stable Cascade C": 2, "Stable Cascade B": 3}
FURTHER |= dict.fromkeys(("SVD", "SV3D u", "SV3D p"), 1)
"""Graphs beyond one a kind, all of them of the first image. HiDream's two sorts of blocks call one kind of attention
with text and without, Hunyuan3D 2.1's experts get tokens of one image and of all; a UNet's blocks get several layouts.
MiniMax H3's first step has one time for sound and picture, the others two; HiDream-O1's has the text beside the
picture, the others what was kept of it."""

A_GRAPH_A_SIZE = {"PixelDiT"}
"""Families with blocks that loop over chunks of their tokens, of which torch fixes the size."""


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()


def assert_same(name, actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert other.isfinite().all() and other.std() > 0
        if name in ROUNDS:
            assert (one - other).abs().max() <= ROUNDS[name] * other.abs().max()
        else:
            assert torch.equal(one, other)


def outcome(good: str) -> str:
    """`good`, or why blocks ran uncompiled: all of them, or others than those that graphs were made for."""
    rows = fallbacks.rows()
    if not rows:
        return good
    return f"{good}{BESIDE}{rows[0]['reason']}" if graphs() else f"no: {rows[0]['reason']}"


def compiled(name, case):
    """Batch 1 first; then another size, a longer prompt, batches and a LoRA compile nothing more, but for blocks whose
    positions have no rows for images, which in a batch of 1 look as if they had: once more for the first larger one."""
    model, cache = case.load(), GraphCache()
    fast = accelerate(model, SETTINGS, cache)
    single = dataclasses.replace(case, cfg=1.0)
    runs = [(single, {}), (case, {}), (case, {"size": 1}), (case, {"tokens": 1})]
    runs += [(case, {"size": 1, "batch": 3})] if case.batches else []
    made = []
    for run, given in runs:
        assert_same(name, run.sample(fast, **given), run.sample(model, **given))
        made.append(graphs())
    assert_same(name, case.sample(lora(fast, 5, 0.5), size=1), case.sample(lora(model, 5, 0.5), size=1))
    made.append(graphs())
    kinds, later = len({key.kind for key in cache._entries}), made[-1] - made[0]
    assert len(set(made)) <= 2 and later <= kinds or name in A_GRAPH_A_SIZE, made
    assert made[0] <= kinds + FURTHER.get(name, 0), cache.statistics()
    further = f", {later} more for {'other sizes' if name in A_GRAPH_A_SIZE else 'a larger batch'}" if later else ""
    return outcome(f"{_counted(kinds, 'kind')}, {_counted(made[0], 'graph')}{further}")


def _counted(number, noun):
    return f"{number} {noun}{'s' * (number != 1)}"


def cached(name, case):
    """Full and skipped steps, or why none is skipped."""
    model = case.load()
    records.clear()
    plain = case.sample(model, steps=4)
    assert_same(name, case.sample(apply_deep_cache(model, every(1)), steps=4), plain)
    deep = case.sample(apply_deep_cache(model, every(3)), steps=4)
    assert_same(name, case.sample(model, steps=4), plain)
    if last_run()["skipped_steps"]:
        assert not torch.equal(deep[0], plain[0])
        return f"{last_run()['skipped_steps']} of 4 steps skipped"
    assert_same(name, deep, plain)
    return f"no: {records.last().skipping.why_full}"


def controlled(name, case):
    if name not in CONTROLLED_BY:
        return "–"
    tiny = CONTROLS[CONTROLLED_BY[name]]
    net, model, cache = tiny.build(), case.load(), GraphCache()
    hint = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(4))
    fast = accelerate_control(net, SETTINGS, cache)
    for batch in (1, 3):  # some take no odd sizes
        expected, out = (
            case.sample(model, batch=batch, control=tiny.hinted(one, hint), control_apply_to_uncond=True)
            for one in (net, fast)
        )
        assert_same(name, out, expected)
        assert not torch.equal(expected[0], case.sample(model, batch=batch)[0])
    assert graphs() == tiny.kinds
    return outcome("compiled")


def quantised(name, case):
    """Weights stored in fp8, which core casts in each call, also with a LoRA."""
    try:
        model, cache = case.load(stored=torch.float8_e4m3fn), GraphCache()
        expected = case.sample(model)
    except NotImplementedError:
        return "–"
    assert any(weight.dtype == torch.float8_e4m3fn for weight in model.model.parameters())
    fast = accelerate(model, SETTINGS, cache)
    assert_same(name, case.sample(fast), expected)
    made = graphs()
    assert_same(name, case.sample(lora(fast, 5, 0.5), size=1), case.sample(lora(model, 5, 0.5), size=1))
    assert graphs() == made or name in A_GRAPH_A_SIZE
    return outcome("fp8")


def streamed(name, case):
    """Weights that come and go at random; LoRAs, and other weights of the family in between."""
    if stand_in.why_not() is not None:
        return "–"
    plain, rng = case.load(), random.Random(1)
    expected = {
        (size, strength): case.sample(lora(plain, 5, strength) if strength else plain, size)
        for size, strength in ((0, 0), (1, 0.5))
    }
    others = case.sample(case.load(seed=1))
    with stand_in.streaming() as card:
        cache = GraphCache()
        model = card.streamed(case.load())
        fast, other = (accelerate(one, SETTINGS, cache) for one in (model, card.streamed(case.load(seed=1))))
        assert fast.is_dynamic()
        assert_same(name, case.sample(fast), expected[0, 0])
        before, card.capacity, card.peak = graphs(), card.size // 3, 0
        card.vbars[0].free_memory(card.size)
        assert_same(name, case.sample(fast), expected[0, 0])
        assert card.peak <= card.capacity + 2 * largest_taken(model.model.diffusion_model)
        for size, strength in ((0, 0), (1, 0.5), (0, 0)):
            out = case.sample(lora(fast, 5, strength) if strength else fast, size)
            assert_same(name, out, expected[size, strength])
            assert card.pins == 0
            card.shake(rng)
            if strength:
                assert_same(name, case.sample(other), others)
        assert card.misses and card.pins == 0 and graphs() == before
    return outcome("compiled")


def largest_taken(network) -> int:
    """Bytes of the streamed weights that are taken at once: a block's, or those of a layer outside of blocks."""
    taken = [block for _, block in blocks(network)] + [part for part in network.modules() if "_v" in vars(part)]
    return max(sum(part._v[2] for part in one.modules() if "_v" in vars(part)) for one in taken)


def captured(name, case):
    """Whole model calls, captured and replayed on a stand-in for CUDA graphs."""
    model = case.load()
    cache, capturer = capturing_cache()
    fast = accelerate(model, EAGER_BLOCKS, cache, graphs=True)
    expected = case.sample(model, steps=6)
    for _ in range(2):
        assert_same(name, case.sample(fast, steps=6), expected)
    whole = (row["reason"] for row in fallbacks.rows() if row["reason"].startswith(NOT_CAPTURED))
    return "replayed" if capturer.replays else f"no: {next(whole, '?')}"


CHECKS = dict(zip(COLUMNS, (compiled, cached, controlled, quantised, streamed, captured), strict=True))

KNOWN = [name for name, case in FAMILIES.items() if case.is_known]
QUICK = {"Wan 2.2 5B ti2v", *todays(KNOWN, 3)}
"""A time step for each frame; and three of all in turns, lest the page grows old. All blocks: test_model_table.py."""


@pytest.mark.parametrize("column", CHECKS)
@pytest.mark.parametrize("name", thorough_except(KNOWN, *QUICK))
def test_model_does_what_the_page_says(name, column, request):
    seen = CHECKS[column](name, FAMILIES[name])
    known = json.loads(JSON.read_text(encoding="utf-8")) if JSON.is_file() else {}
    if request.config.getoption("--write-models"):
        known.setdefault(name, {}).setdefault(CORE, {})[column] = seen
        JSON.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text(page(known), encoding="utf-8")
    elif column in known.get(name, {}).get(CORE, {}):
        assert seen == known[name][CORE][column]


def page(known: dict[str, dict[str, dict[str, str]]]) -> str:
    """The page. known: family → version of ComfyUI → column → what was seen."""
    lines = [f"| Model | {' | '.join(COLUMNS).replace('quantised', 'fp8')} |", f"|---{'|---' * len(COLUMNS)}|"]
    why: dict[str, int] = {}

    def cell(seen: str) -> str:
        good, _, beside = seen.partition(BESIDE)
        if beside:
            return f"{cell(good)} ({why.setdefault(beside, len(why) + 1)})"
        if count := re.match(r"(\d+) kinds?, (\d+) graphs?(?:, (\d+) more)?", seen):
            return f"{count[1]}/{count[2]}" + (f" +{count[3]}" if count[3] else "")
        if GOOD.fullmatch(seen):
            return "yes"
        reason = seen.removeprefix("no: ").removeprefix(NOT_CAPTURED)
        return f"no ({why.setdefault(reason, len(why) + 1)})" if seen.startswith("no: ") else seen

    for name in (name for name in FAMILIES if name in known):
        rows = known[name]
        newest = max(rows, key=lambda version: [int(part) for part in version.split(".")])
        cells = [cell(rows[newest].get(column, "not seen")) for column in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    reasons = [f"{number}. {reason}" for reason, number in why.items()]
    return HEAD + "\n".join([*lines, "", *reasons]) + "\n" + NOTES


def test_each_class_of_core_that_is_sampled_has_a_row():
    known = {case.family.model_class for case in FAMILIES.values()}
    assert {one.__name__ for one in comfy.supported_models.models} - NOT_SAMPLED <= known


def test_page_is_what_was_seen():
    known = json.loads(JSON.read_text(encoding="utf-8"))
    assert sorted(known) == sorted(FAMILIES)
    assert all(row.keys() <= CHECKS.keys() for rows in known.values() for row in rows.values())
    assert PAGE.read_text(encoding="utf-8") == page(known)
