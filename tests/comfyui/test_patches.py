"""Patches of all sorts on an accelerated model: the eager image, and no compilation for what changes values alone."""

import inspect

import comfy.ops
import comfy.sd
import comfy.utils
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.versions import traceable
from kit import tiny_models
from kit.thorough import thorough_except
from kit.tiny_models import conditioning, sample
from torch._dynamo.utils import counters

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


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


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

        if sort == "lokr":
            file[f"{key}.lokr_w1"], file[f"{key}.lokr_w2"] = matrix(2, 2), matrix(rows // 2, shape[1] // 2, *shape[2:])
        else:
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


# To the engine lokr is lora in other words: both are added to the weights before a block is called.
@pytest.mark.parametrize("sort", thorough_except(["lora", "lokr", "dora"], "lora", "dora"))
def test_lora_added_changed_swapped_and_removed_compiles_nothing(model, sort):
    before = image(model)
    for seed, strength in [(1, 0.8), (1, 0.5), (2, 0.8)]:
        assert_same_image(lora(model, seed, strength, sort), model)
    assert torch.equal(image(fast(model)), before)
    assert graphs() == 0 and fallbacks.rows() == []


def test_two_loras_after_another_compile_nothing(model):
    assert_same_image(lora(model, 2, 0.4, base=lora(model, 1, 0.7)), model)
    assert graphs() == 0 and fallbacks.rows() == []


def test_lora_on_a_partly_loaded_model_gives_the_eager_image_with_the_reason(model):
    patched = lora(model, 1, 0.8)
    expected = image(patched)
    patched.detach()
    patched.load(torch.device("cpu"), lowvram_model_memory=int(patched.model_size() * 0.8))
    try:
        reasons = {str(reason) for _, reason in survey(model.model.diffusion_model).left_eager}
        assert reasons and all("weight_function holds" in reason for reason in reasons)
        x, t = torch.randn(2, 4, 12, 15), torch.tensor([5.0, 5.0])
        context = torch.randn(2, 77, tiny_models.CONTEXT_DIM)

        def call(options):
            with torch.inference_mode():
                return model.model.apply_model(x, t, c_crossattn=context, transformer_options=options)

        hits = cache.statistics()["hits"]
        wrapped = {"wrappers": fast(patched).wrappers}
        assert torch.equal(call(wrapped), call({}))
        assert cache.statistics()["hits"] > hits  # the blocks that are loaded whole
    finally:
        patched.detach()
    assert torch.equal(image(patched), expected)


def test_freeu_v2_leaves_every_block_compiled(model):
    from comfy_extras.nodes_freelunch import FreeU_V2

    (patched,) = FreeU_V2().patch(model, 1.3, 1.4, 0.9, 0.2)
    assert torch.equal(image(fast(patched)), image(patched))
    assert graphs() == 0 and fallbacks.rows() == []


def test_perturbed_attention_runs_eagerly_where_it_acts(model):
    from comfy_extras.nodes_pag import PerturbedAttentionGuidance

    assert_same_image(PerturbedAttentionGuidance.execute(model, 3.0).result[0], model)
    assert {row["reason"] for row in fallbacks.rows()} == {"another node replaces its attention (attn1)"}
    assert graphs() == 0


def test_self_attention_guidance_gives_the_eager_image(model):
    from comfy_extras.nodes_sag import SelfAttentionGuidance

    assert_same_image(SelfAttentionGuidance.execute(model, 0.5, 2.0).result[0], model)
    assert graphs() == 0


def test_hypertile_runs_attention_eagerly_and_comes_back_when_removed(model):
    from comfy_extras.nodes_hypertile import HyperTile

    def with_fixed_dice(model, **changes):
        torch.manual_seed(0)
        return image(model, **changes)

    (patched,) = HyperTile.execute(model, 64, 1, 0, False)
    expected = with_fixed_dice(patched)
    assert torch.equal(with_fixed_dice(fast(patched)), expected)
    assert {row["block"] for row in fallbacks.rows()} == {"BasicTransformerBlock"}
    fallbacks.clear()
    assert torch.equal(image(fast(model)), image(model))
    assert graphs() == 0 and fallbacks.rows() == []


def test_token_merging_gives_the_eager_image(model):
    from comfy_extras.nodes_tomesd import TomePatchModel

    patched = TomePatchModel.execute(model, 0.3).result[0]
    torch.manual_seed(0)
    expected = image(patched)
    torch.manual_seed(0)
    assert torch.equal(image(fast(patched)), expected)
    assert graphs() == 0


def test_image_prompt_attention_replaces_only_what_it_names(model):
    patched = model.clone()
    patched.set_model_attn2_replace(lambda q, k, v, options: q * 0.5, "input", 1)
    assert_same_image(patched, model)
    assert [row["calls"] for row in fallbacks.rows()] and graphs() == 0


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


def test_context_windows_compile_nothing(model):
    from comfy_extras.nodes_context_windows import ContextWindowsManualNode

    windows = {"context_length": 2, "context_overlap": 1, "context_schedule": "standard_static", "context_stride": 1}
    how = {"closed_loop": False, "fuse_method": "pyramid", "dim": 0, "freenoise": False}
    known = inspect.signature(ContextWindowsManualNode.execute).parameters  # cores of 0.3.75 have no freenoise
    how = {name: value for name, value in how.items() if name in known}
    patched = ContextWindowsManualNode.execute(model, **windows, **how).result[0]
    assert_same_image(patched, batch=5, steps=4)  # core compares its 5 sigmas with the batch, one by one
    assert graphs() == 0 and fallbacks.rows() == []


def test_merged_models_compile_nothing(model):
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    (merged,) = ModelMergeSimple().merge(model, unet(seed=5), 0.3)
    assert_same_image(merged, model)
    assert graphs() == 0 and fallbacks.rows() == []


def test_model_sampling_compiles_nothing(model):
    from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete, RescaleCFG

    (patched,) = ModelSamplingDiscrete().patch(model, "v_prediction", True)
    assert_same_image(patched, model)
    assert_same_image(RescaleCFG().patch(patched, 0.7)[0], patched)
    assert graphs() == 0 and fallbacks.rows() == []


def test_hook_scheduled_lora_compiles_nothing(model):
    import comfy.hooks

    patched = lora(model, 1, 0.8)
    weights = {key: patch[0][1] for key, patch in patched.patches.items()}
    hooks = comfy.hooks.create_hook_lora(lora=None, strength_model=0.8, strength_clip=0.0)
    hooks.hooks[0].weights, hooks.hooks[0].need_weight_init = weights, False
    frames = comfy.hooks.HookKeyframeGroup()
    frames.add(comfy.hooks.HookKeyframe(strength=1.0, start_percent=0.0))
    frames.add(comfy.hooks.HookKeyframe(strength=0.2, start_percent=0.5))
    hooks.set_keyframes_on_hooks(frames)
    positive = [[conditioning(77, seed=3)[0][0], {"hooks": hooks}]]
    registered = model.clone()
    registered.register_all_hook_patches(hooks, comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Model))
    expected = image(registered, positive=positive, steps=3)
    assert not torch.equal(image(model, positive=conditioning(77, seed=3), steps=3), expected)
    assert torch.equal(image(fast(registered), positive=positive, steps=3), expected)
    assert graphs() == 0 and fallbacks.rows() == []


def test_controlnet_on_and_off_compiles_nothing(model):
    import comfy.controlnet
    import comfy.ops
    from comfy.cldm.cldm import ControlNet

    config = dict(model.model.model_config.unet_config, hint_channels=3, operations=comfy.ops.disable_weight_init)
    for name in ("out_channels", "transformer_depth_output"):
        config.pop(name)
    network = ControlNet(**config | {"dtype": torch.float32}).eval()
    tiny_models.randomize(network)
    control = comfy.controlnet.ControlNet(network, load_device=torch.device("cpu"))
    hint = torch.rand(1, 3, 120, 96)

    def controlled(strength):
        return [
            [features, extra | {"control": control.copy().set_cond_hint(hint, strength)}] for features, extra in plain
        ]

    plain = conditioning(77, seed=3)
    for strength in (0.8, 0.3):
        assert_same_image(model, positive=controlled(strength))
    assert not torch.equal(image(model, positive=controlled(0.8)), image(model, positive=plain))
    assert_same_image(model, positive=plain)
    assert graphs() == 0 and fallbacks.rows() == []


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
