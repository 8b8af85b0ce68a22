"""Probes of a run with a quality: a full step that is skipped first, for comparison, is noticed by nobody else."""

import comfy.model_management
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from kit import tiny_models
from kit.deep_cache import SMALL, assert_no_trace, counts, last_run
from kit.other_nodes import control_net, controlled, easy_cache, in_areas, lazy_cache, with_momentum

SIZE = {"width": 72, "height": 88, "steps": 24}
NEVER_ENOUGH = DeepCacheSettings(quality=300.0)
"""Compares and skips nothing: the image must be the plain one, bit by bit."""
LITTLE = DeepCacheSettings(quality=20.0)


BESIDE = {
    "alone": (lambda model: model, {}),
    "guidance with a state": (with_momentum, {}),
    "noise of the sampler": (lambda model: model, {"sampler": "euler_ancestral"}),
    "two calls a step": (lambda model: model, {"sampler": "heun"}),
    "ControlNet": (lambda model: model, {"positive": lambda: controlled(control_net(**SMALL))}),
    "regional prompts": (lambda model: model, {"positive": in_areas}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_probes_leave_the_image_and_its_previews_alone(small_unet, sample, name):
    patch, settings = BESIDE[name]
    run = {**SIZE, **{key: value() if callable(value) else value for key, value in settings.items()}}
    plain, cached = [], []
    expected = sample(patch(small_unet), **run, callback=lambda step, *rest: plain.append(step))
    model = apply_deep_cache(patch(small_unet), NEVER_ENOUGH)
    assert torch.equal(sample(model, **run, callback=lambda step, *rest: cached.append(step)), expected)
    assert cached == plain
    assert last_run()["probes"] >= 1 and counts() == (24, 0)
    assert_no_trace(model)


def failing_where_skipped(model, error):
    def patch(h, transformer_options):
        if h.shape[1] == 1:  # a layer that is left out
            raise error
        return h

    model = model.clone()
    model.set_model_input_block_patch(patch)
    return model


def test_probe_that_runs_out_of_memory_costs_the_image_nothing(small_unet, sample, caplog):
    model = failing_where_skipped(small_unet, comfy.model_management.OOM_EXCEPTION("full"))
    expected = sample(model, **SIZE)
    assert torch.equal(sample(apply_deep_cache(model, LITTLE), **SIZE), expected)
    assert counts() == (24, 0) and last_run()["probes"] == 1
    assert "a skipped step failed (full)" in caplog.text


def test_interrupt_in_a_probe_ends_the_run(small_unet, sample):
    interrupt = comfy.model_management.InterruptProcessingException()
    model = apply_deep_cache(failing_where_skipped(small_unet, interrupt), LITTLE)
    with pytest.raises(type(interrupt)):
        sample(model, **SIZE)
    assert_no_trace(model)


@pytest.mark.parametrize("other", [easy_cache, lazy_cache])
def test_quality_leaves_all_to_a_cache_of_whole_steps(small_unet, sample, other):
    """Which would answer the full call by what the probe came to."""
    expected = sample(other(small_unet), **SIZE)
    for both in (apply_deep_cache(other(small_unet), LITTLE), other(apply_deep_cache(small_unet, LITTLE))):
        assert torch.equal(sample(both, **SIZE), expected)
        assert counts()[1] == 0 and last_run()["probes"] == 0
        assert_no_trace(both)


@pytest.mark.thorough  # tracing takes 20 seconds; how compiled blocks and DeepCache go together is asked elsewhere
def test_compiled_blocks_skip_and_compare_the_same_steps():
    small = {**SMALL, "transformer_depth": [1, 0], "transformer_depth_output": [1, 1, 0, 0]}
    model = tiny_models.unet(**small, transformer_depth_middle=-1)  # few kinds: tracing is most of the time
    expected = tiny_models.sample(apply_deep_cache(model, LITTLE), **SIZE)
    told = last_run()
    compiled = accelerate(apply_deep_cache(model, LITTLE), CompileSettings(backend="eager"), GraphCache())
    made = tiny_models.sample(compiled, **SIZE)
    assert (made - expected).abs().max() <= 1e-3 * expected.abs().max()
    assert counts() == (told["full_steps"], told["skipped_steps"])
    assert told["skipped_steps"] and last_run()["probes"] == told["probes"] > 0
