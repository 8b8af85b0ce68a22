"""What other packs do to a model, beside Accelerate Model and DeepCache in either order, and gone again."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.report.run_record import records
from kit import tiny_models
from kit.compiled import graphs
from kit.deep_cache import last_run
from kit.pack_patterns import PATTERNS
from kit.step_cache import every
from kit.thorough import thorough_except

cache = GraphCache()
"""One for the file: what a pack leaves alone is compiled once."""


@pytest.fixture(scope="module")
def model():
    model = tiny_models.small_unet()
    tiny_models.sample(fast(model), 64, 96)
    return model


def fast(model):
    return accelerate(model, CompileSettings(backend="eager"), cache)


def image(pattern, base, model, size=0):
    with pattern.installed(base):
        return tiny_models.sample(model, *((64, 96), (80, 64))[size], batch=1 + size, steps=4)


def assert_close(one, other):
    assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def why_eager():
    run = records.last()
    return {why.code for why in (*run.why_uncompiled(), *run.left_eager)}


QUICK = ["part bound", "part left", "part with the last", "classes", "list in one in the call", "hooks of parts"]


@pytest.mark.parametrize("name", thorough_except(PATTERNS, *QUICK, "part's class keeps on an object", "tensor left"))
def test_image_beside_what_packs_do_is_the_uncompiled_one_in_either_order_and_blocks_are_compiled_again_without(
    model, name
):
    pattern = PATTERNS[name]
    plain = tiny_models.sample(model, 64, 96, steps=4)
    made, said = [], set()
    for size in (0, 1):
        expected = image(pattern, model, pattern.on(model), size)
        for accelerated in (fast(pattern.on(model)), pattern.on(fast(model))):
            assert_close(image(pattern, model, accelerated, size), expected)
            made.append(graphs())
            said |= why_eager()
        if size == 0:
            assert torch.equal(expected, plain) != pattern.changes
            full = expected
    assert made[0] == made[-1]
    assert said == set(pattern.eager)
    deep = image(pattern, model, apply_deep_cache(pattern.on(model), every(2)))
    assert (last_run()["skipped_steps"] > 0) == pattern.skips
    for other in (
        pattern.on(apply_deep_cache(model, every(2))),
        fast(apply_deep_cache(pattern.on(model), every(2))),
        pattern.on(apply_deep_cache(fast(model), every(2))),
    ):
        assert_close(image(pattern, model, other), deep)
    assert torch.equal(image(pattern, model, pattern.on(apply_deep_cache(model, every(1)))), full)
    compiled = graphs()
    records.clear()
    assert torch.equal(tiny_models.sample(fast(model), 64, 96, steps=4), plain)
    assert why_eager() == set() and graphs() == compiled
