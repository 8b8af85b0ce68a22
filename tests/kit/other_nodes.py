"""What other nodes do to a model, its prompts or its run, for the tests of DeepCache beside them.

Imported by tests that have put a ComfyUI tree on the path.
"""

import importlib

import comfy.controlnet
import comfy.hooks
import comfy.model_patcher
import comfy.sample
import comfy.samplers
import comfy.sd
import comfy.supported_models
import torch
from comfy.ldm.modules.attention import optimized_attention

import nodes
from kit import tiny_models
from kit.tiny_models import lora as lora_file

# Nodes of core


def find(name: str) -> type | None:
    """The class of a node of core by its module and name, as `nodes_pag.PerturbedAttentionGuidance`."""
    module, _, cls = name.rpartition(".")
    importlib.import_module("comfy_extras.nodes_post_processing")  # it and nodes_latent import each other: it first
    try:
        module = nodes if module == "nodes" else importlib.import_module(f"comfy_extras.{module}")
    except ModuleNotFoundError:
        return None
    return getattr(module, cls, None)


def caller(name: str):
    """What runs a node of core."""
    cls = find(name)
    return cls.execute if hasattr(cls, "execute") else getattr(cls(), cls.FUNCTION)


def core(name: str, *inputs):
    """A node of core on a model, with these inputs behind it."""

    def on(model):
        out = caller(name)(model, *inputs)
        return getattr(out, "args", out)[0]

    return on


perturbed_attention = core("nodes_pag.PerturbedAttentionGuidance", 3.0)
self_attention = core("nodes_sag.SelfAttentionGuidance", 0.5, 2.0)
easy_cache = core("nodes_easycache.EasyCacheNode", 0.2, 0.1, 0.95, False)
lazy_cache = core("nodes_easycache.LazyCacheNode", 0.2, 0.1, 0.95, False)


# Attention, and patches between blocks

BLOCKS = [("input", 1), ("input", 3), ("middle", 0), ("output", 2), ("output", 3), ("output", 4), ("output", 5)]
"""Those of the tiny UNet that have a transformer."""


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def image_prompt(model, start=float("inf"), seen=None, blocks=BLOCKS):
    """What IP-Adapter puts in a cross-attention's place: tokens of an image for cond and uncond, besides the prompt's.

    start: the noise level from which on it acts. seen: takes the name of every block that asked it. blocks: with it.
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
    for block in blocks:
        model.set_model_attn2_replace(patch, *block)
    return model


# Guidance


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


def guided(make):
    """`tiny_models.sample` with the guider that `make` gives from a model."""

    def sample(model, width, height, steps):
        guider = make(model)
        latent = torch.zeros(1, 4, height // 8, width // 8)
        sampling = model.get_model_object("model_sampling")
        sigmas = comfy.samplers.calculate_sigmas(sampling, "normal", steps)
        noise = comfy.sample.prepare_noise(latent, 0)
        return guider.sample(noise, latent, comfy.samplers.sampler_object("euler"), sigmas, disable_pbar=True, seed=0)

    return sample


def two_prompts(model):
    from comfy_extras.nodes_custom_sampler import Guider_DualCFG

    guider = Guider_DualCFG(model)
    guider.set_conds(*(tiny_models.conditioning(seed=seed) for seed in (1, 5, 2)))
    guider.set_cfg(4.0, 2.0, True)
    return guider


def perpendicular_guider(model):
    from comfy_extras.nodes_perpneg import Guider_PerpNeg

    guider = Guider_PerpNeg(model)
    guider.set_conds(*(tiny_models.conditioning(seed=seed) for seed in (1, 2, 6)))
    guider.set_cfg(5.0, 0.8)
    return guider


# ControlNets and T2I-Adapters

SD15 = {
    "num_res_blocks": [2] * 4,
    "channel_mult": [1, 2, 4, 4],
    "transformer_depth": [1] * 6 + [0] * 2,
    "transformer_depth_output": [1] * 9 + [0] * 3,
}
"""All twelve levels of SD1.5, 32 channels wide, which is what the place of a T2I-Adapter's residuals is made for."""


def controlled(*controls, ends=(1.0, 1.0), both=True, seed=1):
    """Conditioning with the controls chained, each up to its percent; for the negative prompt too if `both`."""
    hint = torch.rand(1, 3, 120, 96, generator=torch.Generator().manual_seed(4))
    chain = None
    for control, end in zip(controls, ends, strict=False):
        chain = control.copy().set_cond_hint(hint, 0.8, (0.0, end)).set_previous_controlnet(chain)
    return tiny_models.conditioning(seed=seed, control=chain, control_apply_to_uncond=both)


# Masks, areas, times and windows

SHAPE = (11, 9)


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


def differential_diffusion(model):
    from comfy_extras.nodes_differential_diffusion import DifferentialDiffusion

    return DifferentialDiffusion.execute(model, 0.8).args[0]


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


def windowed(model, schedule):
    from comfy_extras.nodes_context_windows import ContextWindowsManualNode

    later = {entry.id: entry.default for entry in ContextWindowsManualNode.define_schema().inputs[8:]}  # newer cores'
    return ContextWindowsManualNode.execute(model, 3, 1, schedule, 1, False, "pyramid", 0, **later).args[0]


# LoRAs and hooks


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
