"""DeepCache in diffusers' pipelines: which steps call no model."""

import functools
from contextlib import contextmanager

import diffusers
import pytest
import torch
from comfy_accel.accel.hosts.diffusers.deep_cache import deep_cache
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from kit import deep_transformers
from kit import tiny_pipelines as tiny
from kit.deep_transformers import pipeline, sample, sample_cached
from kit.step_cache import every

CACHED = (3, 3)
"""Full and skipped steps of six, every third one full."""


@contextmanager
def calls_of(*models):
    """How often the own forward of each is called."""
    calls, own = [0] * len(models), {type(model): type(model).forward for model in models}

    def counted(forward):
        @functools.wraps(forward)
        def call(model, *args, **kwargs):
            calls[models.index(model)] += 1
            return forward(model, *args, **kwargs)

        return call

    for cls, forward in own.items():
        cls.forward = counted(forward)
    try:
        yield calls
    finally:
        for cls, forward in own.items():
            cls.forward = forward


def flat(latents):
    return torch.stack(latents) if isinstance(latents, list) else latents


@pytest.mark.parametrize(
    ("kind", "arguments", "each"),
    [
        ("StableDiffusion3Pipeline", {"height": 80, "width": 112, "batch": 2}, 1),
        ("FluxPipeline", {"true_cfg_scale": 3.0, "width": 176}, 2),
        ("WanPipeline", {"height": 80, "width": 48}, 2),
        ("ZImagePipeline", {}, 1),
        ("PixArtAlphaPipeline", {}, 1),
        ("UNet", {"height": 72, "width": 96}, 1),
    ],
)
def test_skipped_step_calls_no_model_and_the_pipeline_stays_as_it_is(kind, arguments, each):
    pipe, sampled = (tiny.pipeline(), tiny.sample) if kind == "UNet" else (pipeline(kind), sample)
    plain = sampled(pipe, **arguments)
    with calls_of(pipe.unet if kind == "UNet" else pipe.transformer) as calls:
        cached, counts = sample_cached(pipe, every(3), sampled, **arguments)
    assert counts == [CACHED] and calls == [3 * each]
    assert flat(cached).isfinite().all() and not torch.equal(flat(cached), flat(plain))
    assert torch.equal(flat(sample_cached(pipe, every(3), sampled, **arguments)[0]), flat(cached))
    assert torch.equal(flat(sampled(pipe, **arguments)), flat(plain))


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_settings_that_skip_nothing_change_nothing(kind):
    pipe, sampled = (pipeline("FluxPipeline"), sample) if kind == "dit" else (tiny.pipeline(), tiny.sample)
    plain, before = sampled(pipe), dict(vars(pipe))
    for settings in (every(1), DeepCacheSettings(start_percent=0.5, end_percent=0.5)):
        with deep_cache(pipe, settings):
            assert vars(pipe) == before
            assert torch.equal(sampled(pipe), plain)
    # Every step is in full, and compared.
    cached, counts = sample_cached(pipe, DeepCacheSettings(300.0), sampled)
    assert counts == [(6, 0)] and torch.equal(cached, plain)


# Which step it is


def test_few_steps_are_not_skipped_at_all():
    pipe = pipeline("StableDiffusion3Pipeline")
    cached, counts = sample_cached(pipe, DeepCacheSettings(30.0), steps=4)
    assert counts == [(4, 0)] and torch.equal(cached, sample(pipe, steps=4))


@pytest.mark.parametrize("kind", ["FluxPipeline", "ZImagePipeline"])
def test_timesteps_rounded_to_half_precision_are_found(kind):
    pipe = pipeline(kind).to(torch.bfloat16)
    assert sample_cached(pipe, steps=30, dtype=torch.bfloat16, height=32, width=32)[1] == [(11, 19)]


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda: diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0),
        lambda: diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        lambda: diffusers.FlowMatchLCMScheduler(shift=3.0),
        lambda: diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        lambda: diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    ],
)
def test_schedulers_of_flows(scheduler):
    pipe = pipeline("StableDiffusion3Pipeline", scheduler())
    assert sample_cached(pipe)[1] == [CACHED]


@pytest.mark.parametrize("kind", ["FluxImg2ImgPipeline", "FluxInpaintPipeline"])
def test_image_to_image_counts_from_its_first_step(kind):
    pipe = pipeline(kind, transformer=deep_transformers.transformer("Flux", in_channels=64))
    arguments = {"image": torch.randn(1, 16, 8, 12), "strength": 0.6, "steps": 10}
    if "Inpaint" in kind:
        arguments |= {"mask_image": torch.ones(1, 1, 64, 96), "masked_image_latents": torch.randn(1, 16, 8, 12)}
    with calls_of(pipe.transformer) as calls:
        assert sample_cached(pipe, **arguments)[1] == [CACHED]
    assert calls == [3]


def test_two_transformers_have_a_part_of_the_schedule_each():
    second = deep_transformers.transformer("Wan", 1, num_layers=9)
    pipe = pipeline("WanPipeline", transformer_2=second, boundary_ratio=0.6)
    plain = sample(pipe, steps=8)
    with calls_of(pipe.transformer, second) as calls:
        cached, counts = sample_cached(pipe, every(3), steps=8)
    assert calls == [4, 4] and counts == [(4, 4)], "one run, of which each has two full steps"
    assert not torch.equal(cached, plain) and torch.equal(sample(pipe, steps=8), plain)


def test_timesteps_for_each_token():
    assert sample_cached(pipeline("WanPipeline", expand_timesteps=True))[1] == [CACHED]


# Calls of one step


def test_call_that_a_skipped_step_has_in_addition_leaves_it_skipped():
    """As where guidance begins late, or leaves layers out from some step on."""
    pipe = pipeline("StableDiffusion3Pipeline")
    guided = {"skip_layer_guidance_start": 0.3, "skip_layer_guidance_stop": 0.9, "skip_guidance_layers": [4]}
    with calls_of(pipe.transformer) as calls:
        latents, [(full, skipped)] = sample_cached(pipe, every(9), **guided)
    assert latents.isfinite().all() and full == 4 and skipped
    assert calls == [7], "once; two full steps then begin a new line"


def test_list_of_fewer_images_than_before_is_computed():
    """As Z-Image's, which with guidance has each image twice: without, two images would come of one."""
    pipe = pipeline("ZImagePipeline")
    plain = sample(pipe, cfg_truncation=0.5)
    latents, [(full, skipped)] = sample_cached(pipe, every(3), cfg_truncation=0.5)
    assert flat(latents).shape == flat(plain).shape and full > 2 and skipped
