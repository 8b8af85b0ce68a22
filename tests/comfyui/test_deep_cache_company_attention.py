"""DeepCache beside what replaces attention or works between blocks: image prompts, FreeU, HyperTile and others."""

import pytest
import tiny_models
import torch
from comfy.ldm.modules.attention import optimized_attention
from comfy_accel.accel.step_cache.config import BETWEEN, POLICIES
from deep_cache_reference import assert_as_reference, assert_skipped_is_full, held
from deep_cache_runs import cached, counts, said_of_fallbacks

SIZE = {"width": 72, "height": 88}
WAYS = [{"schedule": schedule, "between": between} for schedule in POLICIES for between in BETWEEN]
BLOCKS = [("input", 1), ("input", 3), ("middle", 0), ("output", 2), ("output", 3), ("output", 4), ("output", 5)]
"""Those of the tiny UNet that have a transformer."""
SHALLOW = {1: [BLOCKS[-1]], 2: [BLOCKS[0], *BLOCKS[-2:]], 4: [*BLOCKS[:2], *BLOCKS[3:]]}
"""By depth, those of them that run on a skipped step, in this order."""


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def image_prompt(model, start=float("inf"), seen=None):
    """What IP-Adapter puts in a cross-attention's place: tokens of an image for cond and uncond, besides the prompt's.

    start: the noise level from which on it acts. seen: takes the name of every block that asked it.
    """

    def patch(q, k, v, options):
        if seen is not None:
            seen.append((options["block"], options["transformer_index"]))
        out = optimized_attention(q, k, v, options["n_heads"])
        if options["sigmas"][0] > start:
            return out
        width, streams = q.shape[-1], options["cond_or_uncond"]
        images = q.shape[0] // len(streams)
        keys, values = (torch.cat([noise(images, 4, width, seed=seed + i) for i in streams]) for seed in (5, 7))
        return out + 0.7 * optimized_attention(q, keys, values, options["n_heads"])

    model = model.clone()
    for block in BLOCKS:
        model.set_model_attn2_replace(patch, *block)
    return model


def more_context(model):
    """Tokens added to the prompt's in every cross-attention."""

    def patch(q, k, v, options):
        extra = noise(1, 3, k.shape[-1], seed=9).expand(k.shape[0], -1, -1)
        return q, torch.cat((k, extra), 1), torch.cat((v, extra), 1)

    model = model.clone()
    model.set_model_attn2_patch(patch)
    return model


def every_patch(model):
    """A patch at every place that core has for one: each moves what it is given."""
    model = model.clone()
    model.set_model_attn1_patch(lambda q, k, v, options: (q * 1.1, k, v))
    model.set_model_attn1_output_patch(lambda n, options: n * 0.9)
    model.set_model_attn2_output_patch(lambda n, options: n * 1.2)
    model.set_model_patch(lambda x, options: x * 0.95, "middle_patch")
    model.set_model_emb_patch(lambda emb, channels, options: emb * 1.05)
    model.set_model_input_block_patch(lambda h, options: h * 1.03)
    model.set_model_input_block_patch_after_skip(lambda h, options: h * 0.97)
    model.set_model_output_block_patch(lambda h, hsp, options: (h * 1.02, hsp * 0.9))
    return model


def in_place(model):
    """Patches that change what they are given instead of making something new."""
    model = model.clone()
    model.set_model_input_block_patch(lambda h, options: h.mul_(1.03))
    model.set_model_input_block_patch_after_skip(lambda h, options: h.mul_(0.97))
    model.set_model_output_block_patch(lambda h, hsp, options: (h.mul_(1.02), hsp.mul_(0.9)))
    return model


def free_u(model):
    from comfy_extras.nodes_freelunch import FreeU_V2

    return FreeU_V2().patch(model, 1.3, 1.4, 0.9, 0.2)[0]


def rolled_dice(model):
    """Chance falls alike in every block; to be patched in before the patch that plays."""

    def patch(q, k, v, options):
        torch.manual_seed(0)
        return q, k, v

    model = model.clone()
    model.set_model_attn1_patch(patch)
    return model


def hyper_tile(model):
    from comfy_extras.nodes_hypertile import HyperTile

    return HyperTile.execute(model, 64, 3, 1, False)[0]


def token_merging(model):
    from comfy_extras.nodes_tomesd import TomePatchModel

    return TomePatchModel.execute(model, 0.4).args[0]


# 24 wide: one, two or three tiles of 8, of which HyperTile throws a die.
WIDE = {"width": 192, "height": 64}
COMPANY = {
    "image prompt": (image_prompt, SIZE),
    "more context": (more_context, SIZE),
    "every patch": (every_patch, SIZE),
    "in place": (in_place, SIZE),
    "FreeU": (free_u, SIZE),
    "HyperTile": (hyper_tile, WIDE),
    "ToMe": (token_merging, SIZE),
}
company = pytest.mark.parametrize("patch, run", COMPANY.values(), ids=COMPANY)


@company
@pytest.mark.parametrize("depth", [1, 4])
def test_skipped_step_equals_the_full_one(tiny_unet, patch, run, depth):
    model = rolled_dice(tiny_unet)
    assert_skipped_is_full(patch(model), depth, **run, unlike={"model": model})


@company
def test_run_is_as_if_every_layer_ran_in_either_order_of_the_nodes(tiny_unet, patch, run):
    # At depth 2 no dice are thrown in the deep part, so that chance takes the same course with and without it.
    assert_as_reference(patch(tiny_unet), **run, other_order=lambda depth: patch(held(tiny_unet, depth=depth)))


@pytest.mark.parametrize("depth", SHALLOW)
def test_attention_patch_is_asked_by_shallow_blocks_alone_under_their_usual_names(tiny_unet, depth):
    seen = []
    tiny_models.sample(held(image_prompt(tiny_unet, seen=seen), depth=depth), **SIZE, steps=2)
    full, skipped = seen[: len(BLOCKS)], seen[len(BLOCKS) :]
    assert full == [(block, index) for index, block in enumerate(BLOCKS)]
    assert skipped == [(block, BLOCKS.index(block)) for block in SHALLOW[depth]]


def test_image_prompt_that_begins_on_a_skipped_step_acts_in_shallow_blocks_at_once(tiny_unet):
    sampling = tiny_unet.get_model_object("model_sampling")
    patched = image_prompt(tiny_unet, start=sampling.percent_to_sigma(0.3))
    assert_as_reference(patched, **SIZE)


def test_tiles_that_differ_from_step_to_step_need_no_other_feature(tiny_unet):
    picked = []

    def watch(n, options):
        picked.append((options["block"], n.shape[0]))
        return n

    model = tiny_unet.clone()
    model.set_model_attn1_output_patch(watch)
    # A square of 24 has three ways to be cut in each direction.
    out = tiny_models.sample(held(hyper_tile(model), 4, 2), 192, 192, steps=4)
    assert counts() == (1, 3) and out.isfinite().all()
    tiles = [count for block, count in picked if block == ("output", 5)]
    assert len(tiles) == 4 and len(set(tiles)) > 1


# Deep Shrink works on another size for the first part of sampling.


def deep_shrink(model, after_skip, end, method="bilinear"):
    from comfy_extras.nodes_model_downscale import PatchModelAddDownscale

    return PatchModelAddDownscale.execute(model, 3, 2.0, 0.0, end, after_skip, method, method).args[0]


@pytest.mark.parametrize("after_skip", [True, False])
@pytest.mark.parametrize("depth, end", [(2, 0.6), (4, 0.8)])
def test_deep_shrink_acts_as_if_every_layer_ran(tiny_unet, after_skip, depth, end):
    # At depth 4 the shrunk block is shallow: it ends on a full step, since a skipped one would be computed anew.
    assert_as_reference(deep_shrink(tiny_unet, after_skip, end), depth=depth, **SIZE)


@pytest.mark.parametrize("interval", [2, 3, 5])
@pytest.mark.parametrize("settings", WAYS, ids=lambda settings: "-".join(settings.values()))
def test_deep_shrink_of_a_shallow_block_that_ends_in_mid_run_fails_nothing(tiny_unet, caplog, interval, settings):
    model = cached(deep_shrink(tiny_unet, True, end=0.5), interval, 5, threshold=9.0, **settings)
    assert tiny_models.sample(model, **SIZE, steps=8).isfinite().all()
    assert counts()[1] >= 2
    assert said_of_fallbacks(caplog) == []


@pytest.mark.parametrize("end", [0.15, 0.3])
def test_deep_shrink_may_end_where_a_second_prompt_begins(tiny_unet, caplog, end):
    late = tiny_models.conditioning(seed=5, start_percent=end)
    model = held(deep_shrink(tiny_unet, True, end), 4, 5)
    out = tiny_models.sample(model, **SIZE, steps=4, positive=tiny_models.conditioning(seed=1) + late)
    assert out.isfinite().all()
    assert said_of_fallbacks(caplog) == []
