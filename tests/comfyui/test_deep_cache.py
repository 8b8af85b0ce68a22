"""DeepCache in a real ComfyUI: every size, every sampler, and streams that never mix."""

import logging

import comfy.samplers
import pytest
import tiny_models
import torch
from comfy_accel.accel.events import subscribe
from comfy_accel.accel.hosts.comfyui import deep_cache as host
from comfy_accel.accel.hosts.comfyui.deep_cache import last_run
from deep_cache_runs import (
    assert_close,
    assert_no_trace,
    cached,
    counts,
    full_and_skipped,
    said_of_fallbacks,
    split_chunks,
)

# Latents 16×16, 20×30 (720×960 at this scale), 30×20, 23×31, 25×33, 11×17; pixels here.
SIZES = [(128, 128), (240, 160), (160, 240), (248, 184), (264, 200), (136, 88)]


@pytest.fixture
def no_fallback(caplog):
    caplog.set_level(logging.WARNING)
    yield
    assert not said_of_fallbacks(caplog)


# Identity


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_sde"])
def test_interval_one_is_bit_identical(tiny_unet, sample, sampler):
    plain = sample(tiny_unet, 160, 240, steps=4, sampler=sampler)
    off = cached(tiny_unet, 1)
    assert torch.equal(sample(off, 160, 240, steps=4, sampler=sampler), plain)
    # And so for every other sampler: nothing of ours is left on the clone.
    assert not any(off.get_wrappers(kind, host.KEY) for kind in host._WRAPPED)


def test_plain_model_is_bit_identical_after_a_cached_run(tiny_unet, sample, no_fallback):
    plain = sample(tiny_unet, steps=4)
    assert not torch.equal(sample(cached(tiny_unet), steps=4), plain)
    assert torch.equal(sample(tiny_unet, steps=4), plain)
    assert_no_trace(tiny_unet)


def test_later_node_replaces_the_settings_of_an_earlier_one(tiny_unet, sample):
    plain = sample(tiny_unet, steps=4)
    assert torch.equal(sample(cached(cached(tiny_unet, 3), 1), steps=4), plain)
    assert torch.equal(sample(cached(cached(tiny_unet, 3), 2), steps=4), sample(cached(tiny_unet, 2), steps=4))
    assert counts() == (2, 2)


@pytest.mark.parametrize("depth", range(1, 6))
@pytest.mark.parametrize("height, width", [(16, 16), (20, 30), (23, 31), (25, 33)])
def test_skipped_step_at_the_same_input_equals_the_full_one(tiny_unet, depth, height, width):
    full, skipped = full_and_skipped(tiny_unet, depth, height, width)
    assert torch.equal(full, skipped)
    assert_no_trace(tiny_unet)


# Sizes


def test_one_model_takes_every_size_and_batch_in_turn(tiny_unet, sample, no_fallback):
    model = cached(tiny_unet)
    for width, height in SIZES:
        for batch in (1, 2):
            out = sample(model, width, height, batch, steps=4)
            assert out.shape == (batch, 4, height // 8, width // 8)
            assert out.isfinite().all()
            assert counts() == (2, 2)
    first = sample(model, *SIZES[0], steps=4)
    assert torch.equal(first, sample(cached(tiny_unet), *SIZES[0], steps=4))


def test_hires_fix_gives_each_sampler_a_state_of_its_own(tiny_unet, sample, no_fallback):
    model = cached(tiny_unet)
    low = sample(model, 120, 160, steps=4)
    high = torch.nn.functional.interpolate(low, (31, 23))
    twice = sample(model, steps=6, denoise=0.5, latent=high)
    assert counts() == (2, 4)
    assert torch.equal(twice, sample(cached(tiny_unet), steps=6, denoise=0.5, latent=high))


# Samplers


@pytest.mark.parametrize(
    "sampler",
    [
        "euler",
        "euler_ancestral",
        "heun",
        "dpm_2",
        "dpmpp_2s_ancestral",
        "dpmpp_sde",
        "dpmpp_2m",
        "lcm",
        "ddim",
        "uni_pc",
    ],
)
def test_every_third_step_is_full_whatever_the_calls_of_a_step(tiny_unet, sample, no_fallback, sampler):
    events = []
    stop = subscribe(lambda name, data: events.append((name, data)))
    try:
        out = sample(cached(tiny_unet), 64, 64, steps=7, sampler=sampler)
    finally:
        stop()
    assert out.isfinite().all()
    assert counts() == (3, 4)
    assert ("deep_cache_run", last_run()) in events


@pytest.mark.parametrize("sampler", comfy.samplers.SAMPLER_NAMES)
def test_every_sampler_of_core_runs(tiny_unet, sample, no_fallback, sampler):
    out = sample(cached(tiny_unet), 64, 64, steps=5, sampler=sampler)
    assert out.isfinite().all()
    assert last_run()["skipped_steps"] >= 1


@pytest.mark.parametrize(
    "steps, interval, expected", [(1, 3, (1, 0)), (4, 3, (2, 2)), (4, 100, (1, 3)), (8, 2, (4, 4))]
)
def test_short_schedules_and_long_intervals(tiny_unet, sample, no_fallback, steps, interval, expected):
    sample(cached(tiny_unet, interval), 64, 64, steps=steps, sampler="lcm")
    assert counts() == expected


def test_img2img_counts_from_its_own_first_step(tiny_unet, sample, no_fallback):
    sample(cached(tiny_unet), steps=4, denoise=0.4, latent=torch.ones(1, 4, 9, 13))
    assert counts() == (2, 2)


# Streams


@pytest.mark.parametrize("sampler", ["euler", "heun"])
@pytest.mark.parametrize("mode", ["split", "switching"])
def test_split_and_switching_chunks_agree_with_joined_ones(tiny_unet, sample, no_fallback, sampler, mode):
    joined = sample(cached(tiny_unet), 160, 240, 2, steps=6, sampler=sampler)
    step = [0]
    model = cached(split_chunks(tiny_unet, lambda: mode == "split" or step[0] % 2 == 1))
    apart = sample(model, 160, 240, 2, steps=6, sampler=sampler, callback=lambda i, *rest: step.__setitem__(0, i + 1))
    assert_close(apart, joined)
    assert counts() == (2, 4)


def conds_that_change():
    late = tiny_models.conditioning(seed=5, start_percent=0.4)
    return tiny_models.conditioning(seed=1, end_percent=0.7) + late


def conds_with_areas():
    left = tiny_models.conditioning(seed=4, area=(16, 8, 0, 0), strength=1.0)
    right = tiny_models.conditioning(seed=5, area=(16, 8, 0, 8), strength=1.0)
    return left + right + tiny_models.conditioning(seed=1)


@pytest.mark.parametrize("positive", [conds_that_change, conds_with_areas])
def test_streams_that_come_and_go_or_cover_areas_agree_joined_and_split(tiny_unet, sample, no_fallback, positive):
    joined = sample(cached(tiny_unet), steps=6, positive=positive())
    apart = sample(cached(split_chunks(tiny_unet)), steps=6, positive=positive())
    assert_close(apart, joined)


def test_context_windows_are_streams_of_their_own(tiny_unet, sample, no_fallback):
    import comfy.context_windows as windows

    def with_windows(model):
        model.model_options["context_handler"] = windows.IndexListContextHandler(
            context_schedule=windows.get_matching_context_schedule(windows.ContextSchedules.STATIC_STANDARD),
            fuse_method=windows.get_matching_fuse_method(windows.ContextFuseMethods.FLAT),
            context_length=2,
            context_overlap=0,
        )
        return model

    model = with_windows(cached(tiny_unet))
    # As many noise levels as frames: core 0.3.75 compares the two element by element.
    whole = sample(model, batch=4, steps=3)
    assert counts() == (1, 2)
    # Windows that don't overlap are as good as batches of their own.
    assert_close(whole, sample(cached(tiny_unet), batch=4, steps=3))
