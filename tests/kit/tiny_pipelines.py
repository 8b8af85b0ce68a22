"""Stable Diffusion pipelines of diffusers' own classes, tiny and random, without text encoder and VAE.

Imported by tests that have made sure that diffusers is there.
"""

import diffusers
import torch

CONTEXT_DIM = 16
STEPS = 6

SD = {
    "block_out_channels": (16, 32, 32),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
}


def unet(**layout):
    torch.manual_seed(0)
    size = {"sample_size": 8, "norm_num_groups": 8, "attention_head_dim": 4, "cross_attention_dim": CONTEXT_DIM}
    return diffusers.UNet2DConditionModel(**size, **(layout or SD)).eval()


def pipeline(scheduler="DDIMScheduler", kind="StableDiffusionPipeline", layout=SD, **parts):
    """A pipeline of the class named `kind`; `parts` replace or add models."""
    schedule = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
    if scheduler in ("DDIMScheduler", "LCMScheduler"):
        schedule["clip_sample"] = False
    if scheduler == "PNDMScheduler":
        schedule["skip_prk_steps"] = True
    absent = dict.fromkeys(["vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor"])
    models = {"unet": parts.pop("unet", None) or unet(**layout), **parts}
    models["scheduler"] = getattr(diffusers, scheduler)(**schedule)
    made = getattr(diffusers, kind)(**absent, **models, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


def sample(pipe, height=64, width=64, batch=1, steps=STEPS, **arguments):
    """Latents [batch, 4, height / 8, width / 8] of one call with guidance, the same for the same arguments."""
    random = torch.Generator().manual_seed(3)
    cond, uncond = (torch.randn(batch, 5, CONTEXT_DIM, generator=random) for _ in range(2))
    size = {} if "image" in arguments and "strength" in arguments else {"height": height, "width": width}
    return pipe(
        prompt_embeds=cond,
        negative_prompt_embeds=uncond,
        num_inference_steps=steps,
        output_type="latent",
        generator=torch.Generator().manual_seed(1),
        **size,
        **arguments,
    ).images


def difference(actual, expected):
    """Largest difference, as a share of the largest value expected."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()
