"""What appears in ComfyUI's per-call options, or leaves them, while a run is under way: it counts from then on."""

from contextlib import contextmanager

import pytest
import torch
from comfy.ldm.modules.attention import BasicTransformerBlock
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from kit import tiny_models
from kit.tiny_models import sample

STEPS = 6

cache = GraphCache()
"""One for the file: no option compiles anything."""


@pytest.fixture(scope="module")
def model():
    return tiny_models.small_unet()


def doubled(q, k, v, extra_options):
    return q * 2, k, v


def overridden(function, *args, **kwargs):
    return function(*args, **kwargs) * 0.5


CHANGES = {
    "a patch": {"patches": {"attn1_patch": [doubled]}},
    "an override of attention": {"optimized_attention_override": overridden},
    "a replacement": {"patches_replace": {"attn1": {("input", 2, 0): lambda q, k, v, extra_options: v * 0.5}}},
}


def image(model):
    return sample(model, width=64, height=96, steps=STEPS)


def from_step(model, first, last, change):
    """A clone whose calls from one to another have the change in their options; one call a step."""
    changed, calls = model.clone(), []

    def wrapper(executor, x, t, c_concat, c_crossattn, control, options, **kwargs):
        calls.append(None)
        if first <= len(calls) < last:
            options = {**options, **change}
        return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)

    changed.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", wrapper)
    return changed


def assert_right(changed, fast, plain, compiled=False):
    expected = image(changed())
    assert not torch.equal(expected, image(plain))
    torch.testing.assert_close(image(fast()), expected, rtol=1e-4, atol=1e-4)
    assert compiled or fallbacks.rows(), "no block was left to the change"


def accelerated(model):
    return accelerate(model, CompileSettings(backend="eager"), cache)


@pytest.mark.parametrize("sort", CHANGES)
def test_change_that_comes_and_goes_counts_while_it_is_there(model, sort):
    def changed():
        return from_step(model, 4, 6, CHANGES[sort])

    assert_right(changed, lambda: accelerated(changed()), model, sort != "a patch")
    assert (sort == "a patch") == bool(fallbacks.rows())


@contextmanager
def put_in_mid_call(model, change, step):
    """From one of a model's blocks on, in one of the steps, the change is in the dict that all of them are given."""
    blocks = [m for m in model.model.diffusion_model.modules() if isinstance(m, BasicTransformerBlock)]
    calls = []

    def put(module, args, kwargs):
        calls.append(None)
        if len(calls) == step:
            kwargs["transformer_options"].update(change)

    handle = blocks[len(blocks) // 2].register_forward_pre_hook(put, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("sort", ["a patch", "an override of attention"])
def test_change_between_two_blocks_of_one_call_counts_for_the_second(model, sort):
    plain = image(model)
    with put_in_mid_call(model, CHANGES[sort], STEPS - 1):
        expected = image(model)
    assert not torch.equal(expected, plain)
    fast = accelerated(model)
    with put_in_mid_call(model, CHANGES[sort], STEPS - 1):
        torch.testing.assert_close(image(fast), expected, rtol=1e-4, atol=1e-4)
    assert (sort == "a patch") == bool(fallbacks.rows())
    torch.testing.assert_close(image(fast), plain, rtol=1e-4, atol=1e-4)
