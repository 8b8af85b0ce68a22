"""What an image takes of the device's memory, by torch's own allocator."""

import gc

from dev.tools.inprocess import boot

boot(cpu=False)

import comfy.model_patcher  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from comfy_accel.accel.cache.graph_cache import GraphCache  # noqa: E402
from comfy_accel.accel.core.compile_settings import CompileSettings  # noqa: E402
from comfy_accel.accel.core.fallbacks import fallbacks  # noqa: E402
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate  # noqa: E402
from kit import made_up_device as device  # noqa: E402
from kit import tiny_models  # noqa: E402
from kit.families import FAMILIES  # noqa: E402
from kit.tiny_models import Family  # noqa: E402

device.sample_without_values()

FAMILY = Family("", "WAN21_T2V", FAMILIES["Wan"].family.config | dict(dim=256, num_heads=2, ffn_dim=768), 48)
LATENT, ONE_OUTPUT = (1, 16, 9, 64, 64), 9 * 32 * 32 * 256 * 2
"""The shape of the video, and the bytes of what a block makes of it."""


def attention_of_a_node(own, *args, **kwargs):
    return own(*args, **kwargs)


@pytest.mark.parametrize("override", [None, attention_of_a_node])
def test_the_first_compiled_image_takes_an_output_more_than_an_uncompiled_one_at_most(override):
    """A video that just fits would otherwise fail in its first image alone."""
    card = torch.device("cuda", 0)
    model = comfy.model_patcher.ModelPatcher(FAMILY.build(torch.bfloat16, card), load_device=card, offload_device=card)
    if override is not None:
        model.model_options["transformer_options"]["optimized_attention_override"] = override
    _, plain = peak(model), peak(model)  # cuBLAS takes a workspace in the first
    compiled = accelerate(model, CompileSettings(backend="eager", measured=True), GraphCache())
    gc.collect()
    gc.disable()  # Python may collect no garbage in a whole image
    try:
        took = [peak(compiled) for _ in range(2)]
    finally:
        gc.enable()
    assert max(took) <= plain + ONE_OUTPUT
    assert fallbacks.rows() == []


def peak(model) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        prompts = FAMILY.conditioning(16, 1), FAMILY.conditioning(16, 2)
        tiny_models.sample_latent(model, torch.zeros(LATENT), *prompts, steps=1, cfg=1.0)
    return torch.cuda.max_memory_allocated() - before
