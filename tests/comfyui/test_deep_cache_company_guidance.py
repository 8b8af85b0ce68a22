"""DeepCache beside guidance that asks the model more than once a step, and wrappers that ask in tiles."""

import comfy.model_patcher
import comfy.sample
import comfy.samplers
import pytest
import tiny_models
import torch
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from deep_cache_reference import SMALL, assert_as_reference, assert_skipped_is_full, held, reference, still_answers
from deep_cache_runs import assert_close, counts, split_chunks
from uniform_hold import uniform_hold

SIZE = {"width": 72, "height": 88}


@pytest.fixture
def small_unet():
    return tiny_models.unet(**SMALL)


def perturbed_attention(model):
    from comfy_extras.nodes_pag import PerturbedAttentionGuidance

    return PerturbedAttentionGuidance.execute(model, 3.0).args[0]


def self_attention(model):
    from comfy_extras.nodes_sag import SelfAttentionGuidance

    return SelfAttentionGuidance.execute(model, 0.5, 2.0).args[0]


def perpendicular(model):
    from comfy_extras.nodes_perpneg import PerpNeg

    return PerpNeg.execute(model, tiny_models.conditioning(seed=6), 0.8).args[0]


def both_attentions(model):
    return self_attention(perturbed_attention(model))


def tiled(model):
    """A wrapper that has the model make the left and the right of the image in calls of their own."""

    def halves(apply_model, args):
        parts = [
            apply_model(part, args["timestep"], **args["c"])
            for part in (args["input"][..., :5], args["input"][..., 4:])
        ]
        return torch.cat((parts[0], parts[1][..., 1:]), -1)

    model = model.clone()
    model.set_model_unet_function_wrapper(halves)
    return model


def tiled_evenly(model):
    """The same with tiles of one shape, which are told apart by their order alone."""

    def halves(apply_model, args):
        whole = torch.zeros_like(args["input"])
        for start in (0, 4):
            tile = (..., slice(start, start + 5))
            whole[tile] = apply_model(args["input"][tile], args["timestep"], **args["c"])
        return whole

    model = model.clone()
    model.set_model_unet_function_wrapper(halves)
    return model


def reference_with_held_attention(model, interval, depth):
    """Self-attention guidance blurs where the middle block attends, which a skipped step does not ask anew."""
    model = reference(model, interval, depth)
    slow = model.get_attachment("slow")
    record = model.model_options["transformer_options"]["patches_replace"]["attn1"][("middle", 0, 0)]
    model.set_model_attn1_replace(lambda q, k, v, o: v if slow.skipping else record(q, k, v, o), "middle", 0, 0)
    return model


COMPANY = {
    "PAG": (perturbed_attention, reference),
    "SAG": (self_attention, reference_with_held_attention),
    "PAG and SAG": (both_attentions, reference_with_held_attention),
    "PerpNeg": (perpendicular, reference),
    "tiles": (tiled, reference),
    "even tiles": (tiled_evenly, reference),
}


@pytest.mark.parametrize("guide", [guide for guide, _ in COMPANY.values()], ids=COMPANY)
def test_skipped_step_equals_the_full_one_with_every_prompt_in_a_call_of_its_own(small_unet, guide):
    assert_skipped_is_full(guide(split_chunks(small_unet)), **SIZE, unlike={"model": small_unet})


@pytest.mark.parametrize(
    "settings", [{"between": "forecast"}, {"schedule": "adaptive"}, {"schedule": "adaptive", "between": "forecast"}]
)
def test_forecast_and_adaptive_schedule_keep_the_answers_apart_too(small_unet, settings):
    model = both_attentions(split_chunks(small_unet))
    (plain,) = still_answers(model, steps=1, **SIZE)
    answers = still_answers(apply_deep_cache(model, uniform_hold(2, 2, **settings)), steps=7, **SIZE)
    assert counts()[1] >= 2
    for answer in answers:
        assert_close(answer, plain)


def within(model, block, low, high):
    """Guidance that asks again without one block's attention, between two noise levels, as skip-layer guidance."""

    def guide(args):
        sigma, options = args["sigma"], args["model_options"].copy()
        if not low <= sigma[0].item() <= high:
            return args["denoised"]
        leave_out = lambda q, k, v, extra: v  # noqa: E731
        options = comfy.model_patcher.set_model_options_patch_replace(options, leave_out, "attn1", *block)
        (without,) = comfy.samplers.calc_cond_batch(args["model"], [args["cond"]], args["input"], sigma, options)
        return args["denoised"] + 0.7 * (args["cond_denoised"] - without)

    model = model.clone()
    model.set_model_sampler_post_cfg_function(guide)
    return model


def test_guidance_of_two_ranges_never_gets_the_others_feature(small_unet):
    model = within(small_unet, ("middle", 0), low=5.0, high=99.0)
    model = within(model, ("output", 0), low=0.0, high=99.0)
    # Half of the steps are left when the first range ends, on a skipped step.
    plain = still_answers(model, steps=8, **SIZE)
    answers = still_answers(held(model, 8), steps=8, **SIZE)
    assert counts() == (1, 7)
    assert not torch.equal(plain[0], plain[-1])
    assert [torch.equal(one, other) for one, other in zip(answers, plain, strict=True)] == [True] * 8


@pytest.mark.parametrize("guide, slow", COMPANY.values(), ids=COMPANY)
def test_run_is_as_if_every_layer_ran_in_either_order_of_the_nodes(small_unet, guide, slow):
    other_order = lambda depth: guide(held(small_unet, depth=depth))  # noqa: E731
    assert_as_reference(guide(small_unet), **SIZE, slow=slow, other_order=other_order)


def guided(make):
    """`tiny_models.sample` with the guider that `make` gives from a model."""

    def sample(model, steps, **size):
        guider = make(model)
        latent = torch.zeros(1, 4, size["height"] // 8, size["width"] // 8)
        sampling = model.get_model_object("model_sampling")
        sigmas = comfy.samplers.calculate_sigmas(sampling, "normal", steps)
        noise = comfy.sample.prepare_noise(latent, 0)
        return guider.sample(noise, latent, comfy.samplers.sampler_object("euler"), sigmas, disable_pbar=True, seed=0)

    return sample


def two_prompts(model, nested):
    from comfy_extras.nodes_custom_sampler import Guider_DualCFG

    guider = Guider_DualCFG(model)
    guider.set_conds(*(tiny_models.conditioning(seed=seed) for seed in (1, 5, 2)))
    guider.set_cfg(4.0, 2.0, nested)
    return guider


def perpendicular_guider(model):
    from comfy_extras.nodes_perpneg import Guider_PerpNeg

    guider = Guider_PerpNeg(model)
    guider.set_conds(*(tiny_models.conditioning(seed=seed) for seed in (1, 2, 6)))
    guider.set_cfg(5.0, 0.8)
    return guider


GUIDERS = {
    "two prompts": lambda model: two_prompts(model, False),
    "two prompts, nested": lambda model: two_prompts(model, True),
    "PerpNeg": perpendicular_guider,
}


@pytest.mark.parametrize("make", GUIDERS.values(), ids=GUIDERS)
def test_guiders_of_three_prompts_are_as_if_every_layer_ran(small_unet, make):
    assert_as_reference(small_unet, **SIZE, sample=guided(make))
