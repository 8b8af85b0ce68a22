"""DeepCache on the other UNets of core: SDXL and its refiner with their vectors, SVD with its frames in time."""

import comfy.model_patcher
import comfy.supported_models
import pytest
import tiny_models
import torch
from deep_cache_reference import assert_as_reference, assert_skipped_is_full

LINEAR = {"use_linear_in_transformer": True, "num_heads": -1, "num_head_channels": 16, "num_classes": "sequential"}
XL = {
    "transformer_depth": [0, 1, 2],
    "transformer_depth_output": [0, 0, 1, 1, 2, 2],
    "transformer_depth_middle": 2,
    **LINEAR,
}
VIDEO = {
    "in_channels": 8,
    "channel_mult": [1, 2],
    "num_res_blocks": [1, 1],
    "transformer_depth": [1, 0],
    "transformer_depth_output": [1, 1, 0, 0],
    "context_dim": 1024,
    "adm_in_channels": 768,
    "extra_ff_mix_layer": True,
    "use_spatial_context": True,
    "merge_strategy": "learned_with_images",
    "merge_factor": 0.0,
    "video_kernel_size": [3, 1, 1],
    "use_temporal_resblock": True,
    "use_temporal_attention": True,
    "disable_temporal_crossattention": False,
    **LINEAR,
    "model_channels": 64,
}
"""Wider, since core's class sets 64 channels a head."""


def patcher(family: str, **changes):
    """A ModelPatcher over one of core's model classes with a small UNet."""
    config = getattr(comfy.supported_models, family)(tiny_models.unet_config(dtype=torch.float32, **changes))
    device = torch.device("cpu")
    model = config.get_model({}, device=device)
    tiny_models.randomize(model.diffusion_model)
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


def prompts(width: int, tokens: int, **extra):
    """Two prompts with all that the families take besides tokens."""
    vector = torch.randn(2, 1, 1280, generator=torch.Generator().manual_seed(7))
    make = tiny_models.conditioning
    return {
        "positive": make(tokens, 1, width, pooled_output=vector[0], width=720, height=960, **extra),
        "negative": make(tokens, 2, width, pooled_output=vector[1], width=512, height=512, prompt_type="negative"),
    }


def sdxl():
    return patcher("SDXL", context_dim=2048, adm_in_channels=2816, **XL), prompts(2048, 77) | {"batch": 2}


def refiner():
    return patcher("SDXLRefiner", context_dim=1280, adm_in_channels=2560, **XL), prompts(1280, 77)


def svd():
    frame = torch.randn(1, 4, 11, 9, generator=torch.Generator().manual_seed(8))
    return patcher("SVD_img2vid", **VIDEO), prompts(1024, 1, concat_latent_image=frame) | {"batch": 3}


LAYOUTS = {"SDXL": (sdxl, (1, 3, 5)), "SDXL refiner": (refiner, (5,)), "SVD": (svd, (1, 3))}
"""With depths to try, the last the largest there is."""


@pytest.mark.parametrize("build, depths", LAYOUTS.values(), ids=LAYOUTS)
def test_skipped_step_equals_the_full_one(build, depths):
    model, run = build()
    for depth in depths:
        assert_skipped_is_full(model, depth, 72, 88, **run)


@pytest.mark.parametrize("build", [build for build, _ in LAYOUTS.values()], ids=LAYOUTS)
def test_run_is_as_if_every_layer_ran(build):
    model, run = build()
    assert_as_reference(model, **run, width=72, height=88)


def test_video_of_one_frame():
    model, run = svd()
    assert_skipped_is_full(model, 2, 72, 88, **run | {"batch": 1})
