"""Which of core's samplers are corrected, what that brings on the trained networks, and where it must not be done."""

import comfy.model_sampling
import comfy.samplers
import pytest
import torch
from comfy_accel.accel.hosts.comfyui.models import deep_cache as host
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.hosts.comfyui.models.samplers import facts_of
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.accel.step_cache.correction import Correction
from comfy_accel.accel.step_cache.run import DeepCacheRun
from comfy_accel.accel.step_cache.sampler_facts import SamplerFacts
from comfy_extras.nodes_custom_sampler import SamplerCustom
from kit import tiny_models
from kit.step_cache import every
from kit.thorough import thorough_except

from dev.bench import similarity, toy

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
    return noted_at_end(lambda run: run._correction is not None)


def sampled(model, sampler, steps=24):
    with torch.inference_mode():
        return [toy.sample(model, torch.tensor([seed % 5]), 16, 16, steps, sampler, seed) for seed in SEEDS]


def a_few_steps(network, sampler="euler", change=lambda model: None, settings=None, **others):
    """The latent of four steps, every second one skipped."""
    model = apply_deep_cache(network, every(2, **{"points": 2} | (settings or {})))
    change(model)
    prompts = (toy.conditioning(torch.tensor([which])) for which in (1, toy.NULL_CLASS))
    return tiny_models.sample_latent(model, torch.zeros(1, 4, 16, 16), *prompts, 4, toy.CFG, sampler, **others)


@pytest.mark.parametrize("sampler", comfy.samplers.SAMPLER_NAMES)
def test_samplers_that_evaluate_each_step_once_are_corrected(network, corrections, sampler):
    a_few_steps(network, sampler)
    assert corrections == [sampler in CORRECTED]


# What the kind of a prediction or a network changes is tested of each below.
@pytest.mark.parametrize("name", thorough_except(toy.NETWORKS, "unet"))
def test_corrected_images_are_closer(monkeypatch, name):
    """Mean of four seeds, in dB over the same steps uncorrected; docs/deepcache.md quotes the bounds."""
    model, closer = toy.load(name), []
    cached = apply_deep_cache(model, every(2, points=2, start_percent=0.3))
    for sampler in ("euler", "dpmpp_2m"):
        plain, corrected = sampled(model, sampler), sampled(cached, sampler)
        with monkeypatch.context() as without:
            without.setattr(host, "_follows", lambda *_: None)
            uncorrected = sampled(cached, sampler)
        decibels = (similarity.latent_psnr(torch.cat(made), torch.cat(plain)) for made in (corrected, uncorrected))
        closer.append((next(decibels) - next(decibels)).mean())
    assert min(closer) > 0.5, closer
    assert sum(closer) / 2 > 1.5, closer


@pytest.mark.parametrize("name", thorough_except(["unet", "dit"], "dit"))
def test_corrected_images_of_pipelines_are_closer(monkeypatch, name):
    """The same in diffusers' own schedulers."""
    pytest.importorskip("diffusers", reason="needs the package diffusers: tests/requirements.txt")
    from comfy_accel.accel.hosts.diffusers import deep_cache as pipelines
    from kit import toy_pipelines

    def made(pipe, settings):
        with pipelines.deep_cache(pipe, settings):
            return torch.cat([pipe(20, seed) for seed in SEEDS])

    closer, kept = [], []
    for make in toy_pipelines.SCHEDULERS[name].values():
        pipe = toy_pipelines.ToyPipeline(name, make())
        plain = made(pipe, every(1))
        kept.append(similarity.latent_psnr(made(pipe, DeepCacheSettings()), plain).min())
        fixed = every(3, points=2)  # a plan of its own skips other steps where nothing is corrected
        corrected = similarity.latent_psnr(made(pipe, fixed), plain)
        with monkeypatch.context() as without:
            without.setattr(pipelines, "follows_of", lambda *_: 1 / 0)
            uncorrected = made(pipe, fixed)
            closer.append((corrected - similarity.latent_psnr(uncorrected, plain)).mean())
    assert min(closer) > 0 and sum(closer) / len(closer) > 0.5, closer
    assert min(kept) > 39, kept


def test_settings_that_skip_nothing_are_bit_identical_beside_it(network, corrections):
    cached = apply_deep_cache(network, DeepCacheSettings(300.0))
    assert all(map(torch.equal, sampled(cached, "dpmpp_2m", steps=6), sampled(network, "dpmpp_2m", steps=6)))
    assert corrections == [True] * len(SEEDS)


def test_measuring_a_sampler_draws_no_random_numbers_and_calls_no_model(network):
    guider, state = comfy.samplers.CFGGuider(network), torch.get_rng_state()
    for name in sorted(CORRECTED):
        assert facts_of(comfy.samplers.sampler_object(name), guider, (14.0, 5.0, 1.0, 0.0), False).response
    assert torch.equal(torch.get_rng_state(), state)


def guided_by_another_node(model):
    model.set_model_sampler_post_cfg_function(lambda args: args["denoised"])


PREDICTIONS = [
    name
    for name in ("EPS", "V_PREDICTION", "EDM", "X0", "CONST", "COSMOS_RFLOW")
    if hasattr(comfy.model_sampling, name)
]


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_every_kind_of_prediction_is_corrected_as_far_as_it_follows_the_latent(network, kind):
    predicted = getattr(comfy.model_sampling, kind)

    class Sampling(comfy.model_sampling.ModelSamplingDiscrete, predicted):
        pass

    sampling, levels = Sampling(network.model.model_config), (0.9, 0.4, 0.1)
    follows = host._follows(sampling, SamplerFacts(levels, False, False))
    latent, output = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    for level, expected in zip(levels, follows, strict=True):
        sigma = torch.tensor([level])
        one, other = (sampling.calculate_denoised(sigma, output, latent + moved) for moved in (0.0, 0.5))
        assert torch.allclose(other - one, torch.full_like(one, 0.5 * expected), atol=1e-5)

    def change(model):
        model.add_object_patch("model_sampling", Sampling(network.model.model_config))

    assert a_few_steps(network, change=change).isfinite().all()


@pytest.mark.parametrize(
    "how",
    [
        {"settings": {"points": 1}},
        {"change": guided_by_another_node},
        {"noise_mask": torch.ones(1, 1, 16, 16)},
    ],
    ids=["hold", "guidance", "mask"],
)
def test_run_is_not_corrected_with(network, corrections, how):
    a_few_steps(network, **how)
    assert corrections == [False]


def test_failing_correction_leaves_the_image(network, caplog, monkeypatch):
    """It is made as without it from there on."""
    monkeypatch.setattr(Correction, "corrected", lambda *_: 1 / 0)
    assert a_few_steps(network, "dpmpp_2m").isfinite().all()
    assert "its predictions cannot be compared (ZeroDivisionError" in caplog.text


def test_denoised_output_of_half_a_run_is_the_prediction_alone(network, monkeypatch):
    """Without what the sampler is given for the latent's sake, it is closer; the latent is the same."""
    sampler = comfy.samplers.sampler_object("euler")
    sigmas = comfy.samplers.calculate_sigmas(network.get_model_object("model_sampling"), "normal", 24)[:14]
    cached = apply_deep_cache(network, every(2, points=2))

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
        monkeypatch.setattr(host._Sampling, "showing", lambda self, args: args)
        same, given = outputs(cached)
    assert torch.equal(latent, same)
    closer = similarity.latent_psnr(denoised, expected) - similarity.latent_psnr(given, expected)
    assert closer.mean() > 2, closer
