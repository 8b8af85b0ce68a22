"""What DeepCache costs on the trained networks: a stated distance to the uncached run, at every kind of size."""

import comfy.sample
import comfy.samplers
import pytest
import torch
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from kit.deep_cache import assert_close, counts, last_run, split_chunks
from kit.step_cache import uniform_hold

from bench import similarity, toy_data

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
WAYS = {"defaults": (DeepCacheSettings(), 25.0, 38.0), "paper": (uniform_hold(3), 20.0, 27.0)}
"""Settings at interval 3, and the least mean PSNR in dB to the uncached run, of the images of a size and of all.
Measured 28 to 57, 43 of all, and 22 to 38, 31 of all; single images fall to 20 where both went different ways."""


@pytest.fixture(scope="module")
def network():
    from bench import toy

    return toy.load()


def sampled(model, height, width, batch, steps=STEPS):
    from bench import toy

    classes = torch.arange(batch) + 2
    with torch.inference_mode():
        return toy.sample(model, classes, height, width, steps, "euler", seed=SEED)


# Each takes seconds: every change is tested with these.
A_FEW = ("720x960", "896x768", "both odd")


@pytest.mark.parametrize(
    "way, names",
    [
        ("defaults", A_FEW),
        *(pytest.param(way, SIZES, marks=pytest.mark.thorough) for way in WAYS),
    ],  # each takes seconds
    ids=["defaults, a few sizes", *WAYS],
)
def test_cached_image_stays_near_the_uncached_one(network, way, names):
    settings, of_a_size, of_all = WAYS[way]
    decibels = []
    for size in map(SIZES.get, names):
        plain = toy_data.view(sampled(network, *size))
        made = toy_data.view(sampled(apply_deep_cache(network, settings), *size))
        assert counts()[1] >= STEPS // 4
        decibels.append(similarity.psnr(made, plain))
        assert decibels[-1].mean() >= of_a_size, size
    assert torch.cat(decibels).mean() >= of_all


def test_cached_image_of_a_transformer_stays_near_the_uncached_one():
    """Measured: 45 and 48 dB, for sizes that it was not trained at and one that its patches do not divide."""
    from bench import toy

    network = toy.load("dit")
    for size in ((18, 14, 2), (17, 19, 1)):
        plain = toy_data.view(sampled(network, *size, steps=30))
        made = toy_data.view(sampled(apply_deep_cache(network, DeepCacheSettings()), *size, steps=30))
        assert counts()[1] >= 10
        assert similarity.psnr(made, plain).min() >= 35


@pytest.mark.parametrize("settings", [settings for settings, *_ in WAYS.values()], ids=WAYS)
def test_prompts_joined_and_forced_apart_agree(network, settings):
    from bench import toy

    joined = sampled(apply_deep_cache(network, settings), 17, 23, 2)
    apart = sampled(apply_deep_cache(split_chunks(toy.load()), settings), 17, 23, 2)
    assert counts()[1] >= STEPS // 4
    assert_close(apart, joined)


@pytest.mark.parametrize(
    "target, sampler, skipped",
    [
        (40.0, "euler", 8),
        (32.0, "dpmpp_2m", 8),
        pytest.param(50.0, "heun", 4, marks=pytest.mark.thorough),
        pytest.param(40.0, "euler_ancestral", 4, marks=pytest.mark.thorough),
    ],  # each takes seconds
)
def test_quality_that_is_asked_for_is_reached_and_spent(network, target, sampler, skipped):
    """Of the final latent. Measured over four seeds at 30 steps: 40 dB asked gave 42 to 55, 32 dB 34 to 53."""
    from bench import toy

    def made(model):
        with torch.inference_mode():
            return toy.sample(model, torch.tensor([3]), 16, 16, 30, sampler, seed=1)

    plain = made(network)
    error = (made(apply_deep_cache(network, DeepCacheSettings(quality=target))) - plain).square().mean().sqrt()
    reached = 20 * torch.log10((plain.max() - plain.min()) / error)
    told = last_run()
    assert target - 1 <= reached <= target + 22
    assert (told["target_db"], told["skipped_steps"] >= skipped) == (target, True)
    assert told["estimated_db"] >= target - 1
    assert abs(told["estimated_db"] - reached) < 20
    halves = sum(letter == "H" for letter, *_ in told["plan"])
    assert bool(halves) == (sampler == "heun")
    assert 0 < told["skipped_work"] <= told["skipped_steps"] / 30 + halves / 59


def test_quality_is_kept_where_a_sampler_evaluates_within_its_steps(network):
    """Which is farther from the last full step than a step's beginning. Measured 8 dB below the 50 asked where only
    that was counted."""
    from bench import toy

    def made(model):
        with torch.inference_mode():
            return toy.sample(model, torch.tensor([1, 4]), 15, 20, 12, "seeds_3", seed=1)

    plain = made(network)
    error = (made(apply_deep_cache(network, DeepCacheSettings(quality=50.0))) - plain).square().mean((1, 2, 3))
    peak = plain.amax((1, 2, 3)) - plain.amin((1, 2, 3))
    assert (20 * torch.log10(peak / error.sqrt())).min() >= 49


def test_quality_is_left_to_samplers_that_are_told_to_extrapolate_farther(network):
    from bench import toy

    sampler = comfy.samplers.ksampler("lms", {"order": 7})
    sigmas = torch.cat([torch.logspace(1, -1, 12), torch.zeros(1)])
    prompts = (toy.conditioning(torch.tensor([which])) for which in (1, toy.NULL_CLASS))
    latent = torch.zeros(1, 4, 16, 16)
    model = apply_deep_cache(network, DeepCacheSettings(quality=32.0))
    comfy.sample.sample_custom(model, torch.randn_like(latent), 3.0, sampler, sigmas, *prompts, latent, seed=0)
    assert counts() == (12, 0)
    assert "order is above 4" in records.deep_cache().why_full


def test_quality_at_few_steps_skips_nothing_that_would_cost_more(network, caplog):
    caplog.set_level("INFO")
    plain = sampled(network, 16, 16, 1, steps=4)
    assert torch.equal(sampled(apply_deep_cache(network, DeepCacheSettings(quality=50.0)), 16, 16, 1, steps=4), plain)
    assert counts() == (4, 0)
    assert last_run()["estimated_db"] is None
    assert "nothing to gain at the 50 dB asked" in caplog.text


def test_few_steps_are_computed_in_full_by_default(network, caplog):
    caplog.set_level("INFO")
    plain = sampled(network, 16, 16, 1, steps=4)
    assert torch.equal(sampled(apply_deep_cache(network, DeepCacheSettings()), 16, 16, 1, steps=4), plain)
    assert counts() == (4, 0)
    assert "skipped none of 4 steps" in caplog.text


def test_tenth_image_skips_more_than_the_first(network, tmp_path, monkeypatch):
    """What an error of the feature does to the prediction is learnt from the images before, and kept."""
    import folder_paths

    from bench import toy

    def made(model, seed):
        with torch.inference_mode():
            return toy.sample(model, torch.tensor([3]), 16, 16, 30, "euler_ancestral", seed=seed)

    monkeypatch.delenv("ACCEL_STORE")
    monkeypatch.setattr(folder_paths, "get_user_directory", lambda: str(tmp_path))
    asked, told = apply_deep_cache(network, DeepCacheSettings(quality=40.0)), []
    for seed in (1, *range(20, 28), 1):
        last = made(asked, seed)
        told.append(last_run())
    assert told[0]["probes"] >= 2 > told[-1]["probes"]
    assert told[-1]["skipped_work"] > told[0]["skipped_work"]
    assert (tmp_path / "__accel" / "sensitivity.json").stat().st_size < 2000
    plain = made(network, 1)
    error = (last - plain).square().mean().sqrt()
    assert 20 * torch.log10((plain.max() - plain.min()) / error) >= 39
    monkeypatch.setenv("ACCEL_STORE", "off")
    made(asked, 1)
    assert last_run()["probes"] == told[0]["probes"], "nothing is kept, so nothing is known"


@pytest.mark.parametrize("name", ["unet", "dit"])
@pytest.mark.parametrize("sampler", sorted({"heun", "exp_heun_2_x0"} & set(comfy.samplers.SAMPLER_NAMES)))
def test_heun_leaves_out_second_evaluations(sampler, name):
    """Measured: 45 to 60 dB. exp_heun_2_x0 is of newer cores."""
    from bench import toy

    model, decibels = toy.load(name), []
    for seed in range(3):
        with torch.inference_mode():
            plain, made = (
                toy.sample(one, torch.tensor([seed]), 16, 16, 24, sampler, seed)
                for one in (model, apply_deep_cache(model, DeepCacheSettings(quality=40.0)))
            )
        told = last_run()
        halves = sum(letter == "H" for letter, *_ in told["plan"])
        assert halves >= 3 and told["skipped_work"] == pytest.approx(told["skipped_steps"] / 24 + halves / 47)
        decibels.append(similarity.latent_psnr(made, plain).item())
    assert min(decibels) >= 39, decibels
