"""Which of core's samplers are corrected, what that brings on the trained networks, and where it must not be done."""

import comfy.model_sampling
import comfy.samplers
import pytest
import torch
from comfy_accel.accel.hosts.comfyui.models import deep_cache as host
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.hosts.comfyui.models.samplers import sampler_response
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.accel.step_cache.predictions.correction import Correction
from comfy_accel.accel.step_cache.run import DeepCacheRun
from comfy_extras.nodes_custom_sampler import SamplerCustom
from kit import tiny_models

from bench import similarity, toy

CORRECTED = {
    *("euler", "ddim", "lms", "ipndm", "ipndm_v", "deis", "dpmpp_2m", "res_multistep", "gradient_estimation"),
    *("uni_pc", "uni_pc_bh2"),
}
"""They evaluate each step once, add no noise, and are linear in their predictions."""

SEEDS = (11, 12, 13, 14)


@pytest.fixture(scope="module")
def network():
    return toy.load("unet")


@pytest.fixture
def noted_at_end(monkeypatch):
    """Makes a list to which each run from now on adds a fact of itself when it ends. fact: gives it."""

    def noted(fact):
        seen = []

        class Watched(DeepCacheRun):
            def close(self):
                seen.append(fact(self))
                super().close()

        monkeypatch.setattr(host, "DeepCacheRun", Watched)
        return seen

    return noted


@pytest.fixture
def corrections(noted_at_end):
    """Whether each run from now on corrects, when it ends."""
    return noted_at_end(lambda run: run.correction is not None)


@pytest.fixture
def counted_on(noted_at_end):
    """Whether the quality of each run from now on counts on corrections, when it ends."""
    return noted_at_end(lambda run: run.target.carried.is_corrected)


def sampled(model, sampler, steps=24):
    with torch.inference_mode():
        return [toy.sample(model, torch.tensor([seed % 5]), 16, 16, steps, sampler, seed) for seed in SEEDS]


def a_few_steps(network, sampler="euler", change=lambda model: None, settings=None, **others):
    """The latent of four steps, every second one skipped."""
    model = apply_deep_cache(network, DeepCacheSettings(interval=2, schedule="uniform", **settings or {}))
    change(model)
    prompts = (toy.conditioning(torch.tensor([which])) for which in (1, toy.NULL_CLASS))
    return tiny_models.sample_latent(model, torch.zeros(1, 4, 16, 16), *prompts, 4, toy.CFG, sampler, **others)


@pytest.mark.parametrize("sampler", comfy.samplers.SAMPLER_NAMES)
def test_samplers_that_evaluate_each_step_once_are_corrected(network, corrections, sampler):
    a_few_steps(network, sampler)
    assert corrections == [sampler in CORRECTED]


@pytest.mark.parametrize("name", ["unet", "dit"])
def test_corrected_images_are_closer(monkeypatch, name):
    """Mean of four seeds, in dB over the same steps uncorrected; docs/lab/deepcache.md quotes the bounds."""
    model, closer = toy.load(name), []
    cached = apply_deep_cache(model, DeepCacheSettings(interval=2, schedule="uniform", start_percent=0.3))
    for sampler in ("euler", "dpmpp_2m"):
        plain, corrected = sampled(model, sampler), sampled(cached, sampler)
        with monkeypatch.context() as without:
            without.setattr(host, "_correct", lambda *_: None)
            uncorrected = sampled(cached, sampler)
        decibels = (similarity.latent_psnr(torch.cat(made), torch.cat(plain)) for made in (corrected, uncorrected))
        closer.append((next(decibels) - next(decibels)).mean())
    assert min(closer) > 0.5, closer
    assert sum(closer) / 2 > 1.5, closer


@pytest.mark.parametrize("name", ["unet", "dit"])
def test_corrected_images_of_pipelines_are_closer(monkeypatch, name):
    """The same in diffusers' own schedulers."""
    pytest.importorskip("diffusers", reason="needs the package diffusers: tests/requirements.txt")
    from comfy_accel.accel.hosts.diffusers import deep_cache as pipelines
    from kit import toy_pipelines

    def made(pipe, **settings):
        with pipelines.deep_cache(pipe, DeepCacheSettings(**settings)):
            return torch.cat([pipe(20, seed) for seed in SEEDS])

    closer, kept = [], []
    for make in toy_pipelines.SCHEDULERS[name].values():
        pipe = toy_pipelines.ToyPipeline(name, make())
        plain = made(pipe, interval=1)
        corrected = similarity.latent_psnr(made(pipe), plain)
        with monkeypatch.context() as without:
            without.setattr(pipelines._Cache, "_response", lambda *_: None)
            closer.append((corrected - similarity.latent_psnr(made(pipe), plain)).mean())
        kept.append(similarity.latent_psnr(made(pipe, quality=40.0), plain).min())
    assert min(closer) > 0.5 and sum(closer) / len(closer) > 1.5, closer
    assert min(kept) > 39, kept


@pytest.mark.parametrize("sampler", ["euler", "heun"])
def test_quality_counts_on_corrections_where_there_are_some(network, counted_on, sampler):
    a_few_steps(network, sampler, settings={"quality": 40.0})
    assert counted_on == [sampler in CORRECTED]


@pytest.mark.parametrize("leaves", ["by failing", "by leaving the response"])
def test_quality_no_longer_counts_on_corrections_that_ended(network, counted_on, monkeypatch, leaves):
    if leaves == "by failing":
        monkeypatch.setattr(Correction, "corrected", lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(Correction, "_fits", lambda *_: False)
    a_few_steps(network, settings={"quality": 40.0})
    assert counted_on == [False]


def test_settings_that_skip_nothing_are_bit_identical_beside_it(network, corrections):
    cached = apply_deep_cache(network, DeepCacheSettings(schedule="adaptive", threshold=0.0))
    assert all(map(torch.equal, sampled(cached, "dpmpp_2m", steps=6), sampled(network, "dpmpp_2m", steps=6)))
    assert corrections == [True] * len(SEEDS)


def test_finding_a_response_draws_no_random_numbers_and_calls_no_model(network):
    guider, state = comfy.samplers.CFGGuider(network), torch.get_rng_state()
    for name in sorted(CORRECTED):
        sampler_response(comfy.samplers.sampler_object(name), guider, torch.tensor([14.0, 5.0, 1.0, 0.0]))
    assert torch.equal(torch.get_rng_state(), state)


def guided_by_another_node(model):
    model.set_model_sampler_post_cfg_function(lambda args: args["denoised"])


def predicts_v(model):
    class Sampling(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.V_PREDICTION):
        pass

    model.add_object_patch("model_sampling", Sampling(model.model.model_config))


@pytest.mark.parametrize(
    "how",
    [
        {"settings": {"depth": 1}},
        {"settings": {"between": "hold"}},
        {"change": guided_by_another_node},
        {"change": predicts_v},
        {"noise_mask": torch.ones(1, 1, 16, 16)},
    ],
    ids=["depth", "hold", "guidance", "v prediction", "mask"],
)
def test_run_is_not_corrected_with(network, corrections, how):
    a_few_steps(network, **how)
    assert corrections == [False]


def test_failing_correction_leaves_the_image(network, caplog, monkeypatch):
    """It is made as without it from there on."""
    monkeypatch.setattr(host.Correction, "corrected", lambda *_: 1 / 0)
    assert a_few_steps(network, "dpmpp_2m").isfinite().all()
    assert "corrects nothing from here on: ZeroDivisionError" in caplog.text


def test_denoised_output_of_half_a_run_is_the_prediction_alone(network, monkeypatch):
    """Without what the sampler is given for the latent's sake, it is closer; the latent is the same."""
    sampler = comfy.samplers.sampler_object("euler")
    sigmas = comfy.samplers.calculate_sigmas(network.get_model_object("model_sampling"), "normal", 24)[:14]
    cached = apply_deep_cache(network, DeepCacheSettings(interval=2, schedule="uniform"))

    def outputs(model):
        found = []
        for seed in SEEDS:
            prompts = (toy.conditioning(torch.tensor([which])) for which in (seed % 5, toy.NULL_CLASS))
            latent = {"samples": torch.zeros(1, 4, 16, 16)}
            out = SamplerCustom.execute(model, True, seed, toy.CFG, *prompts, sampler, sigmas, latent).args
            found.append([one["samples"] for one in out])
        return [torch.cat(samples) for samples in zip(*found, strict=True)]

    with torch.inference_mode():
        _, expected = outputs(network)
        latent, denoised = outputs(cached)
        monkeypatch.setattr(host, "_showing", lambda run, args: args)
        same, given = outputs(cached)
    assert torch.equal(latent, same)
    closer = similarity.latent_psnr(denoised, expected) - similarity.latent_psnr(given, expected)
    assert closer.mean() > 2, closer
