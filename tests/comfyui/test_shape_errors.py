"""What is said when a model of ours fails at a size that it cannot take."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.hosts.comfyui.sizes.shape_errors import ShapeMismatch
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from kit import tiny_models
from kit.blocks import raising
from kit.families import DITS
from kit.tiny_models import sample_latent

HUNYUAN = DITS["HunyuanVideo"]
"""Core's class for it does not fill up patches, and fails at an odd latent."""

ODD = (1, 16, 2, 9, 8)  # [B, C, T, H, W]: 64 × 72 pixels, at patches of 16


CACHE = GraphCache()


def accelerated(model):
    return accelerate(model, CompileSettings(backend="eager"), CACHE)


def deep_cached(model):
    return apply_deep_cache(model, DeepCacheSettings())


NODES = {
    "Accelerate Model": accelerated,
    "DeepCache": deep_cached,
    "both": lambda model: deep_cached(accelerated(model)),
    "both, the other way": lambda model: accelerated(deep_cached(model)),
}


def sample_odd(model, shape=ODD):
    conds = {"positive": HUNYUAN.conditioning(1), "negative": HUNYUAN.conditioning(2)}
    return sample_latent(model, torch.zeros(shape), steps=2, **conds)


@pytest.fixture(scope="module")
def hunyuan():
    return HUNYUAN.load()


@pytest.mark.parametrize("node", NODES)
def test_an_odd_latent_is_explained_in_one_sentence_and_the_size_that_it_suggests_runs(node, hunyuan):
    with pytest.raises(RuntimeError) as plain:
        sample_odd(hunyuan)
    with pytest.raises(ShapeMismatch) as said:
        sample_odd(NODES[node](hunyuan))
    sentence = str(said.value)
    assert sentence.startswith("Sampling failed at 64×72 pixels (a latent of 8×9), whose sides are not all")
    assert "multiples of the 16" in sentence and " ".join(str(plain.value).split()) in sentence
    assert sentence.endswith("if that is why, Resolution Snap before the sampler helps, which makes it 64×80.")
    assert "\n" not in sentence and sentence.count(". ") == 0
    assert type(said.value.__cause__) is RuntimeError and str(said.value.__cause__) == str(plain.value)
    assert torch.isfinite(sample_odd(NODES[node](hunyuan), (1, 16, 2, 10, 8))).all()


@pytest.fixture(scope="module")
def unet():
    """Two levels, so that its multiple is 16."""
    return tiny_models.unet(
        num_res_blocks=[1, 1], channel_mult=[1, 1], transformer_depth=[0, 0], transformer_depth_output=[0] * 4
    )


def fail_with(error, model):
    """The model, with somebody's patch in it that raises this error."""
    patched = model.clone()
    patched.set_model_unet_function_wrapper(raising(error))
    return patched


@pytest.mark.parametrize(
    ("error", "height"),
    [
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (154x2048 and 768x320)"), 72),
        (RuntimeError("The size of tensor a (46) must match the size of tensor b (45) at dimension 3"), 64),
        (RuntimeError("Expected all tensors to be on the same device"), 72),
        (torch.OutOfMemoryError("The size of tensor a (46) must match the size of tensor b (45)"), 72),
        (ValueError("Sizes of tensors must match except in dimension 1"), 72),
    ],
    ids=["another prompt's", "a size that is right", "another error", "memory", "no RuntimeError"],
)
@pytest.mark.parametrize("node", ["Accelerate Model", "DeepCache"])
def test_an_error_that_no_snap_prevents_passes_as_it_is(node, error, height, unet):
    with pytest.raises(type(error)) as said:
        tiny_models.sample(NODES[node](fail_with(error, unet)), 64, height, steps=1)
    assert said.value is error


def test_somebody_elses_mismatch_at_a_size_that_the_model_runs_at_is_not_blamed_on_the_model(unet):
    """Core's UNets run at sizes that are no multiple of theirs."""
    assert torch.isfinite(tiny_models.sample(accelerated(unet), 64, 72, steps=1)).all()
    error = RuntimeError("The size of tensor a (46) must match the size of tensor b (45) at dimension 3")
    with pytest.raises(ShapeMismatch) as said:
        tiny_models.sample(accelerated(fail_with(error, unet)), 64, 72, steps=1)
    assert "does not run" not in str(said.value) and "if that is why" in str(said.value)
    assert str(error) in str(said.value) and said.value.__cause__ is error
