"""What DeepCache costs on the trained networks: a stated distance to the uncached run, at every kind of size."""

import functools

import pytest
import torch
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.step_cache.config import FAST, DeepCacheSettings
from kit.deep_cache import assert_close, counts, last_run, split_chunks
from kit.thorough import thorough_except

from dev.bench import similarity, toy

SIZES = {
    "720x960": (24, 18, 1),
    "960x720": (18, 24, 2),
    "736x992": (28, 12, 1),
    "896x768": (24, 28, 3),
    "1280x720": (18, 32, 1),
    "728x720": (18, 19, 4),
    "544x576": (24, 20, 2),
    "both odd": (17, 23, 1),
}
"""Height, width, batch, in latent pixels: smaller than the pixels say, halved with a rest as often."""
STEPS, SEED = 20, 3
DEFAULT = DeepCacheSettings()

load = functools.cache(toy.load)


def sampled(model, height=16, width=16, batch=1, steps=STEPS, sampler="euler", seed=SEED, **how):
    with torch.inference_mode():
        return toy.sample(model, torch.arange(batch) + 2, height, width, steps, sampler, seed, **how)


@functools.cache
def plain(name, *size, **how):
    return sampled(load(name), *size, **how)


def reached(name, settings, *size, **how):
    """dB of each sample of the final latent to the uncached run's."""
    made = sampled(apply_deep_cache(load(name), settings), *size, **how)
    return similarity.latent_psnr(made, plain(name, *size, **how))


@pytest.mark.parametrize("size", thorough_except(SIZES, "both odd"))
@pytest.mark.parametrize("name", thorough_except(toy.NETWORKS, "unet", "mmdit"))
def test_cached_image_stays_near_the_uncached_one(name, size):
    decibels = reached(name, DEFAULT, *SIZES[size])
    assert counts()[1] >= 1
    assert decibels.min() >= DEFAULT.quality - 2, decibels


@pytest.mark.parametrize("sampler", thorough_except(["euler", "dpmpp_2m", "heun", "ddim", "uni_pc"], "dpmpp_2m"))
@pytest.mark.parametrize("name", thorough_except(toy.NETWORKS, "dit"))
def test_at_equal_work_an_image_is_closer_than_with_fewer_steps(name, sampler):
    for settings in (DEFAULT, DeepCacheSettings(FAST)):
        gains = []
        for seed in (2, 3, 4):
            decibels = reached(name, settings, steps=30, sampler=sampler, seed=seed)
            fewer = max(round(30 * (1 - last_run()["skipped_work"])), 1)
            short = plain(name, steps=fewer, sampler=sampler, seed=seed)
            gains.append(
                (decibels - similarity.latent_psnr(short, plain(name, steps=30, sampler=sampler, seed=seed))).item()
            )
        assert sum(gains) / len(gains) > 0, gains


def test_prompts_joined_and_forced_apart_agree():
    joined = sampled(apply_deep_cache(load("unet"), DEFAULT), 17, 23, 2)
    assert counts()[1] >= STEPS // 4
    assert_close(sampled(apply_deep_cache(split_chunks(toy.load("unet")), DEFAULT), 17, 23, 2), joined)


def test_more_decibels_skip_less():
    skipped = []
    for target in (30.0, 45.0, 65.0):
        sampled(apply_deep_cache(load("unet"), DeepCacheSettings(target)), steps=30)
        skipped.append(last_run()["skipped_work"])
        assert last_run()["target_db"] == target
    assert skipped == sorted(skipped, reverse=True) and skipped[0] > skipped[-1]


@pytest.mark.parametrize("sampler", thorough_except(["seeds_3", "dpm_2", "heunpp2"], "dpm_2"))
def test_samplers_that_evaluate_within_their_steps_stay_near_the_uncached_image(sampler):
    decibels = reached("unet", DeepCacheSettings(50.0), 15, 20, steps=20, sampler=sampler)
    assert decibels.min() >= 45


@pytest.mark.parametrize("name", thorough_except(toy.NETWORKS, "unet"))
def test_few_steps_are_computed_in_full(name, caplog):
    caplog.set_level("INFO")
    assert torch.equal(sampled(apply_deep_cache(load(name), DEFAULT), steps=4), plain(name, steps=4))
    assert counts() == (4, 0)
    assert "skipped none of 4 steps" in caplog.text


def test_more_is_skipped_late_of_an_image_that_has_settled_than_of_one_that_has_not():
    """The first one's predictions change most in its last steps."""
    letters = {}
    for seed in (50, 51):
        with torch.inference_mode():
            toy.sample(apply_deep_cache(load("unet"), DEFAULT), torch.tensor([seed % 8]), 16, 16, 20, "dpmpp_2m", seed)
        letters[seed] = records.deep_cache().steps_taken
    assert letters[50][14:].count("S") < letters[51][14:].count("S")


@pytest.mark.parametrize("name", thorough_except(toy.NETWORKS, "vpred"))
def test_about_half_of_the_work_is_left_at_20_steps(name):
    for settings, most in ((DEFAULT, 0.66), (DeepCacheSettings(FAST), 0.6)):
        decibels = reached(name, settings)
        assert 1 - last_run()["skipped_work"] <= most and decibels.min() >= settings.quality - 2


def test_skipping_decides_by_its_own_run_alone():
    """Equal runs skip equal steps, whatever was sampled between them."""
    model, made = apply_deep_cache(load("unet"), DEFAULT), []
    for seed in (3, 9, 3):
        made.append(sampled(model, seed=seed))
    assert torch.equal(made[0], made[2])
