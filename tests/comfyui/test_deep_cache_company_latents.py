"""DeepCache beside masks, areas and windows: inpainting, Differential Diffusion, prompts for parts and for times."""

import comfy.sample
import pytest
import tiny_models
import torch
from deep_cache_reference import SMALL, assert_as_reference, assert_skipped_is_full, by_uuid, held, reference
from deep_cache_runs import counts, split_chunks

SIZE = {"width": 72, "height": 88}
SHAPE = (11, 9)


@pytest.fixture
def small_unet():
    return tiny_models.unet(**SMALL)


def picture(channels: int = 4, seed: int = 3) -> torch.Tensor:
    return torch.randn(1, channels, *SHAPE, generator=torch.Generator().manual_seed(seed))


def ramp() -> torch.Tensor:
    """A mask from 0 at the left to 1 at the right, [1, 1, H, W] in pixels."""
    return torch.linspace(0, 1, SHAPE[1] * 8).expand(1, 1, SHAPE[0] * 8, -1).clone()


def masked_sample(model, steps, noise_mask, latent, denoise=1.0, positive=None, negative=None):
    """Core's sampler on a latent of which only the mask is made anew."""
    noise = comfy.sample.prepare_noise(latent, 0)
    positive, negative = positive or tiny_models.conditioning(seed=1), negative or tiny_models.conditioning(seed=2)
    settings = {"denoise": denoise, "noise_mask": noise_mask, "disable_pbar": True, "seed": 0}
    return comfy.sample.sample(model, noise, steps, 5.0, "euler", "normal", positive, negative, latent, **settings)


# Masks


def test_inpainting_with_a_noise_mask_is_as_if_every_layer_ran(small_unet):
    mask = (ramp() > 0.4).float()
    run = {"noise_mask": mask, "latent": picture()}
    out = assert_as_reference(small_unet, sample=masked_sample, denoise=0.6, **run)
    kept = mask[..., ::8, ::8].expand_as(out) == 0
    assert torch.allclose(out[kept], picture()[kept], atol=1e-5)
    assert_skipped_is_full(small_unet, **run, unlike={"noise_mask": None})


def test_differential_diffusion_moves_its_mask_on_skipped_steps_too(small_unet):
    from comfy_extras.nodes_differential_diffusion import DifferentialDiffusion

    patch = lambda model: DifferentialDiffusion.execute(model, 0.8).args[0]  # noqa: E731
    run = {"noise_mask": ramp(), "latent": picture()}
    other_order = lambda depth: patch(held(small_unet, depth=depth))  # noqa: E731
    out = assert_as_reference(patch(small_unet), sample=masked_sample, **run, other_order=other_order)
    assert not torch.equal(out, masked_sample(held(small_unet), 4, **run))


def test_inpainting_model_of_nine_channels_gets_mask_and_picture_on_skipped_steps_too():
    model = tiny_models.unet(in_channels=9, **SMALL)
    mask = (ramp() > 0.4).float()
    # What core's InpaintModelConditioning puts there.
    extra = {"concat_latent_image": picture(seed=8), "concat_mask": mask}
    prompts = {name: tiny_models.conditioning(seed=i, **extra) for i, name in ((1, "positive"), (2, "negative"))}
    run = {"noise_mask": mask, "latent": picture(), **prompts}
    assert_as_reference(model, sample=masked_sample, **run)
    for depth in (1, 3):
        assert_skipped_is_full(model, depth, **run, unlike={"positive": None})


# Parts of the image


def in_areas():
    top = tiny_models.conditioning(seed=4, area=(6, 9, 0, 0), strength=0.8)
    bottom = tiny_models.conditioning(seed=5, area=(6, 9, 5, 0), strength=1.0)
    return top + bottom + tiny_models.conditioning(seed=1)


def in_masks():
    mask = torch.zeros(1, *SHAPE)
    mask[..., :5] = 1
    whole = tiny_models.conditioning(seed=4, mask=mask, mask_strength=0.9)
    bounds = tiny_models.conditioning(seed=5, mask=1 - mask, mask_strength=1.0, set_area_to_bounds=True)
    return whole + bounds + tiny_models.conditioning(seed=1)


@pytest.mark.parametrize("prompts, split", [(in_areas, False), (in_masks, True)])
def test_prompts_for_parts_of_the_image_are_streams_of_their_own(small_unet, prompts, split):
    model = split_chunks(small_unet) if split else small_unet
    assert_skipped_is_full(model, **SIZE, positive=prompts(), unlike={"positive": None})
    assert_as_reference(model, **SIZE, positive=prompts())


# Parts of the time


def by_uuid_reference(model, interval, depth):
    return reference(model, interval, depth, by_uuid)


@pytest.mark.parametrize("split, expected", [(False, (3, 1)), (True, (2, 2))], ids=["joined", "split"])
def test_prompt_that_begins_on_a_skipped_step_is_computed_and_the_others_are_not(small_unet, split, expected):
    model = split_chunks(small_unet) if split else small_unet
    # The second of four steps.
    late = tiny_models.conditioning(seed=5, start_percent=0.15)
    early = tiny_models.conditioning(seed=1)
    run = {"positive": early + late, "slow": by_uuid_reference, "expected": expected}
    assert_as_reference(model, **SIZE, **run)


# Context windows


def test_windows_that_stay_are_as_if_every_layer_ran(small_unet):
    # As many noise levels as frames: core 0.3.75 compares the two element by element.
    run = {"batch": 5, "steps": 4, "slow": by_uuid_reference}
    assert_as_reference(windowed(small_unet, "standard_static"), **SIZE, **run)


@pytest.mark.parametrize("schedule", ["standard_uniform", "looped_uniform"])
def test_windows_that_move_are_computed_where_they_are_new(small_unet, schedule):
    seen = []
    model = windowed(small_unet, schedule)
    out = tiny_models.sample(held(noticing(model, seen), 4, 2), **SIZE, batch=5, steps=4)
    expected = tiny_models.sample(by_uuid_reference(model, 4, 2), **SIZE, batch=5, steps=4)
    assert torch.equal(out, expected)
    # A step is a skipped one when one of its windows was there before.
    steps = [{frames for step, frames in seen if step == i} for i in range(4)]
    assert len(set.union(*steps)) > len(steps[0])
    before = set()
    skipped = 0
    for windows in steps:
        skipped += bool(windows & before)
        before |= windows
    assert counts() == (4 - skipped, skipped)


def windowed(model, schedule):
    from comfy_extras.nodes_context_windows import ContextWindowsManualNode

    later = {entry.id: entry.default for entry in ContextWindowsManualNode.define_schema().inputs[8:]}  # newer cores'
    return ContextWindowsManualNode.execute(model, 3, 1, schedule, 1, False, "pyramid", 0, **later).args[0]


def noticing(model, seen):
    """The model, noting (step, frames) of every call."""
    model = model.clone()

    def patch(emb, channels, options):
        steps = options["sample_sigmas"].tolist()
        seen.append((steps.index(options["sigmas"][0].item()), tuple(options["context_window"].index_list)))
        return emb

    model.set_model_emb_patch(patch)
    return model
