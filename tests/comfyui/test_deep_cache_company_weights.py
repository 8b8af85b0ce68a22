"""DeepCache beside what changes the model itself: LoRAs, hooks that schedule them, layers injected for a run."""

import comfy.hooks
import comfy.sd
import pytest
import tiny_models
import torch
from comfy.patcher_extension import PatcherInjection
from deep_cache_reference import SMALL, assert_as_reference, assert_skipped_is_full, held
from deep_cache_runs import counts

from bench.tiny_models import lora as lora_file

SIZE = {"width": 72, "height": 88}


@pytest.fixture
def small_unet():
    return tiny_models.unet(**SMALL)


def lora(model, seed: int = 1, strength: float = 0.8):
    return comfy.sd.load_lora_for_models(model, None, lora_file(model, seed), strength, 0)[0]


def hooked(model, keyframes=((0.0, 1.0),), seed: int = 1, **conditioning):
    """The model that knows the hook of a LoRA, and conditioning that turns it on, with its strength at each percent."""
    hooks = comfy.hooks.create_hook_lora(lora=None, strength_model=0.8, strength_clip=0.0)
    patches = lora(model, seed).patches
    hooks.hooks[0].weights = {key: patch[0][1] for key, patch in patches.items()}
    hooks.hooks[0].need_weight_init = False
    frames = comfy.hooks.HookKeyframeGroup()
    for percent, strength in keyframes:
        frames.add(comfy.hooks.HookKeyframe(strength=strength, start_percent=percent))
    hooks.set_keyframes_on_hooks(frames)
    model = model.clone()
    model.register_all_hook_patches(hooks, comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Model))
    return model, tiny_models.conditioning(hooks=hooks, **conditioning)


# LoRA


def test_lora_is_as_if_every_layer_ran_in_either_order_of_the_nodes(small_unet):
    assert_as_reference(lora(small_unet), **SIZE, other_order=lambda depth: lora(held(small_unet, depth=depth)))


def test_lora_that_comes_changes_and_goes_leaves_no_feature_of_its_own(small_unet, sample):
    def image(model):
        return sample(held(model), **SIZE, steps=4)

    without, first, second = image(small_unet), image(lora(small_unet)), image(lora(small_unet, 2, 0.3))
    assert torch.equal(image(lora(small_unet)), first) and not torch.equal(first, second)
    assert torch.equal(image(small_unet), without) and not torch.equal(first, without)


# Hooks


@pytest.mark.parametrize("depth", [1, 3])
def test_skipped_step_with_a_hooked_lora_equals_the_full_one(small_unet, depth):
    model, positive = hooked(small_unet)
    assert_skipped_is_full(model, depth, **SIZE, positive=positive, unlike={"positive": None})


def test_lora_whose_strength_changes_on_a_skipped_step_acts_in_shallow_layers_at_once(small_unet):
    # Percents of the third step of four, and of the last, which is full.
    model, positive = hooked(small_unet, keyframes=((0.0, 1.0), (0.5, 0.1), (0.8, 0.6)))
    assert_as_reference(model, depth=3, **SIZE, positive=positive)


def test_loras_of_two_masked_prompts_keep_their_features_apart(small_unet):
    left, right = torch.zeros(2, 1, 11, 9)
    left[..., :5], right[..., 4:] = 1, 1
    model, first = hooked(small_unet, mask=left)
    model, second = hooked(model, ((0.0, 0.2), (0.3, 1.0)), seed=2, mask=right)
    assert_as_reference(model, **SIZE, positive=first + second)
    assert_skipped_is_full(model, **SIZE, positive=first, negative=hooked(small_unet, seed=2)[1])


# Injections


class Motion(torch.nn.Module):
    """Mixes neighbouring images of the batch, as an AnimateDiff layer does; it has no name that core knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.7 * x + 0.3 * x.roll(1, 0)


def injected(model, blocks):
    """The model with a layer at the end of output blocks, for as long as it is loaded."""
    layers = [Motion() for _ in blocks]

    def inject(patcher):
        for block, layer in zip(blocks, layers, strict=True):
            patcher.model.diffusion_model.output_blocks[block].append(layer)

    def eject(patcher):
        for block in blocks:
            del patcher.model.diffusion_model.output_blocks[block][-1]

    model = model.clone()
    model.set_injections("motion", [PatcherInjection(inject, eject)])
    return model


@pytest.mark.parametrize("depth", [1, 2])
def test_layer_injected_for_the_run_is_the_boundary_where_it_ends_the_deep_part(small_unet, depth):
    model = injected(small_unet, [1, 2, 3])
    assert_skipped_is_full(model, depth, **SIZE, batch=3, unlike={"model": small_unet})
    assert_as_reference(model, depth=depth, **SIZE, batch=3)


def test_injected_layers_come_and_go_between_runs_of_one_model(small_unet, sample):
    run = {**SIZE, "batch": 3, "steps": 4}
    without = sample(held(small_unet), **run)
    moving = sample(held(injected(small_unet, [1])), **run)
    assert torch.equal(sample(held(small_unet), **run), without)
    assert torch.equal(sample(held(injected(small_unet, [1])), **run), moving)
    assert counts() == (2, 2)
    assert not torch.equal(moving, without)
