"""LoRAs, areas and types of weights on an accelerated model: the eager image, and no compilation for values alone.

Core's own nodes are in test_core_nodes.py.
"""

import functools

import comfy.ops
import comfy.sd
import comfy.utils
import pytest
import torch
from comfy.ldm.modules.attention import BasicTransformerBlock
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.tracing import traceable
from kit import tiny_models
from kit.compiled import graphs
from kit.other_nodes import hooked
from kit.tiny_models import conditioning, sample

cache = GraphCache()
"""One for the file: what a patch leaves alone is compiled in the first test and never again."""


def unet(**changes):
    """Three kinds: attention, of the upper level and the middle, is of one width and so of one kind."""
    attention = dict(transformer_depth=[1, 0], transformer_depth_output=[1, 1, 0, 0], transformer_depth_middle=1)
    return tiny_models.small_unet(channel_mult=[1, 1], num_res_blocks=[1, 1], **attention, **changes)


@pytest.fixture(scope="module")
def model():
    model = unet()
    sample(fast(model), 96, 96)
    return model


def fast(model):
    return accelerate(model, CompileSettings(backend="eager"), cache)


def image(model, **changes) -> torch.Tensor:
    return sample(model, **({"width": 96, "height": 120, "steps": 2} | changes))


def assert_same_image(patched, plain=None, **changes) -> None:
    """The accelerated image equals the eager one; and the patch does something, compared to the plain model."""
    expected = image(patched, **changes)
    assert torch.equal(image(fast(patched), **changes), expected)
    if plain is not None:
        assert not torch.equal(image(plain, **changes), expected)


def targets(model) -> list[str]:
    weights = model.model.diffusion_model.state_dict()
    return [name for name in weights if name.endswith(("to_q.weight", "to_v.weight", "in_layers.2.weight"))]


def lora(model, seed: int, strength: float, sort: str = "lora", base=None):
    """A clone with a LoRA of core's own formats on attention and convolutions."""
    generator = torch.Generator().manual_seed(seed)
    weights = model.model.diffusion_model.state_dict()
    file = {}
    for name in targets(model):
        shape, key = weights[name].shape, "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
        rows = shape[0]

        def matrix(*size):
            return torch.randn(*size, generator=generator) * 0.1

        file[f"{key}.lora_up.weight"] = matrix(rows, 4, *[1] * (len(shape) - 2))
        file[f"{key}.lora_down.weight"] = matrix(4, *shape[1:])
        file[f"{key}.alpha"] = torch.tensor(4.0)
        if sort == "dora":
            file[f"{key}.dora_scale"] = (
                weights[name].reshape(rows, -1).norm(dim=1).reshape(rows, *[1] * (len(shape) - 1))
            )
    patched, _ = comfy.sd.load_lora_for_models(base or model, None, file, strength, 0)
    assert patched.patches
    return patched


@pytest.mark.parametrize("sort", ["lora", "dora"])
def test_lora_added_changed_swapped_and_removed_compiles_nothing(model, sort):
    before = image(model)
    for seed, strength in [(1, 0.8), (1, 0.5), (2, 0.8)]:
        assert_same_image(lora(model, seed, strength, sort), model)
    assert torch.equal(image(fast(model)), before)
    assert graphs() == 0 and fallbacks.rows() == []


def test_two_loras_after_another_compile_nothing(model):
    assert_same_image(lora(model, 2, 0.4, base=lora(model, 1, 0.7)), model)
    assert graphs() == 0 and fallbacks.rows() == []


def test_area_and_masked_conditioning_compile_nothing(model):
    first, second = conditioning(77, seed=3), conditioning(77, seed=4)
    area = [[first[0][0], {"area": (10, 6, 0, 2), "strength": 0.7}], *second]
    mask = torch.zeros(1, 15, 12)
    mask[:, :, :5] = 1
    masked = [[first[0][0], {"mask": mask, "mask_strength": 1.0, "set_area_to_bounds": True}], *second]
    for positive in (area, masked):
        assert_same_image(model, positive=positive)
    assert graphs() == 0 and fallbacks.rows() == []


def test_inpaint_model_shares_the_blocks_of_the_plain_one(model):
    assert_same_image(unet(in_channels=9))
    assert graphs() == 0 and fallbacks.rows() == []


def test_hook_scheduled_lora_compiles_nothing(model):
    registered, positive = hooked(model, keyframes=((0.0, 1.0), (0.5, 0.2)), seed=3)
    assert_same_image(registered, positive=positive, steps=3)
    assert not torch.equal(
        image(model, positive=conditioning(seed=1), steps=3), image(registered, positive=positive, steps=3)
    )
    assert graphs() == 0 and fallbacks.rows() == []


def noting_options(function, seen):
    @functools.wraps(function)
    def forward(self, x, context=None, transformer_options=None):
        seen["options"] = transformer_options
        return function(self, x, context=context, transformer_options=transformer_options)

    return forward


def test_pack_that_wraps_a_class_of_blocks_when_it_is_installed_compiles_nothing(model, monkeypatch):
    seen = {}
    monkeypatch.setattr(BasicTransformerBlock, "forward", noting_options(BasicTransformerBlock.forward, seen))
    assert_same_image(model)
    assert graphs() == 0 and fallbacks.rows() == []
    assert "sigmas" in seen["options"]


def test_fp8_weights_with_manual_cast_match_eager():
    model = tiny_models.small_unet(inference_dtypes=(torch.float8_e4m3fn, torch.float32))
    assert_same_image(model)
    compiled = graphs()
    assert compiled > 0 and fallbacks.rows() == []
    assert_same_image(model, width=136, batch=2)
    assert graphs() == compiled


def test_core_s_casting_stays_traceable_until_the_last_thread_is_done(monkeypatch):
    """An extension hides it from torch for the whole process, and models on two devices may be traced at once."""
    own = comfy.ops.cast_bias_weight
    hidden = torch._dynamo.disable(own)
    monkeypatch.setattr(comfy.ops, "cast_bias_weight", hidden)
    one, other = traceable(), traceable()
    for entered in (one, other):
        entered.__enter__()
        assert comfy.ops.cast_bias_weight is own
    one.__exit__(None, None, None)
    assert comfy.ops.cast_bias_weight is own
    other.__exit__(None, None, None)
    assert comfy.ops.cast_bias_weight is hidden
