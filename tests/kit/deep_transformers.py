"""Transformers of diffusers' classes, narrow, in pipelines of their own classes.

Imported by tests that have made sure that diffusers is there. Text encoders and VAEs are left out.
"""

import diffusers
import torch
from comfy_accel.accel.hosts.diffusers.deep_cache import deep_cache

from kit.blocks import heard
from kit.step_cache import every

WIDTH = 16
"""Of text features, pooled ones too."""

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}


def seeded(make, seed=0):
    """What `make` makes, with the same weights every time; what is zero or one until it has learned is random too."""
    torch.manual_seed(seed)
    made = make().eval()
    for parameter in made.parameters():
        if parameter.ndim == 1 or not parameter.any():
            torch.nn.init.normal_(parameter, mean=float(parameter.flatten()[0] == 1), std=0.2)
    return made


_FLOW = "FlowMatchEulerDiscreteScheduler"
KINDS = {
    "StableDiffusion3": (
        "SD3Transformer2DModel",
        dict(sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=8, joint_attention_dim=WIDTH)
        | dict(caption_projection_dim=16, pooled_projection_dim=WIDTH, **HEADS),
        _FLOW,
        {"shift": 3.0},
    ),
    "Flux": (
        "FluxTransformer2DModel",
        dict(in_channels=16, num_layers=3, num_single_layers=6, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH)
        | dict(axes_dims_rope=(2, 2, 4), guidance_embeds=True, **HEADS),
        _FLOW,
        {"shift": 3.0},
    ),
    "Wan": (
        "WanTransformer3DModel",
        dict(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4)
        | dict(text_dim=WIDTH, freq_dim=16, ffn_dim=32, num_layers=8, rope_max_seq_len=32),
        "UniPCMultistepScheduler",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True},
    ),
    "PixArt": (
        "PixArtTransformer2DModel",
        dict(sample_size=8, num_layers=8, patch_size=2, in_channels=4, out_channels=8, caption_channels=WIDTH)
        | dict(cross_attention_dim=16, use_additional_conditions=False, **HEADS),
        "DPMSolverMultistepScheduler",
        {},
    ),
    "ZImage": (
        "ZImageTransformer2DModel",
        dict(in_channels=4, dim=16, n_layers=8, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=WIDTH)
        | dict(axes_dims=[4, 2, 2], axes_lens=[256, 64, 64]),
        _FLOW,
        {"shift": 3.0},
    ),
}
"""Beginning of a pipeline's name → its transformer's class and layout, its scheduler, and that one's settings."""


def layout(kind):
    """What `KINDS` has for the pipeline named `kind`."""
    return next(known for name, known in KINDS.items() if kind.startswith(name))


def transformer(kind, seed=0, **changes):
    name, config, *_ = layout(kind)
    return seeded(lambda: getattr(diffusers, name)(**config | changes), seed)


_ABSENT = [f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")]


def absent(make):
    """The text encoders that a pipeline's class takes, as None."""
    expected, _ = make._get_signature_keys(make)
    return dict.fromkeys(name for name in _ABSENT if name in expected)


def pipeline(kind, scheduler=None, **parts):
    """A pipeline of the class named `kind`; `parts` replace or add components and settings."""
    make = getattr(diffusers, kind)
    *_, flow, settings = layout(kind)
    if "transformer" not in parts:
        parts["transformer"] = transformer(kind)
    scheduler = scheduler or getattr(diffusers, flow)(**settings)
    made = make(**{**absent(make), "vae": None, "scheduler": scheduler, **parts})
    made.set_progress_bar_config(disable=True)
    return made


def sample(pipe, height=64, width=96, steps=6, batch=1, texts=(5, 5), dtype=torch.float32, **arguments):
    """The latents of one call, the same for the same arguments; guided where that takes a negative prompt.

    texts: tokens of the prompt and of the negative one.
    """
    random = torch.Generator().manual_seed(3)
    kind = type(pipe).__name__
    made = {}
    for prefix, tokens in zip(("", "negative_"), texts, strict=True):
        made[f"{prefix}prompt_embeds"] = torch.randn(batch, tokens, WIDTH, generator=random).to(dtype)
        if kind.startswith(("StableDiffusion3", "Flux")):
            made[f"{prefix}pooled_prompt_embeds"] = torch.randn(batch, WIDTH, generator=random).to(dtype)
        if kind.startswith("PixArt"):
            made[f"{prefix}prompt_attention_mask"] = torch.ones(batch, tokens, dtype=torch.long)
        if kind.startswith("ZImage"):
            made[f"{prefix}prompt_embeds"] = list(made[f"{prefix}prompt_embeds"])
    if kind.startswith("Wan"):
        arguments = {"num_frames": 5, **arguments}
    if kind.startswith("PixArt"):
        arguments = {"use_resolution_binning": False, "negative_prompt": None, **arguments}
    made |= {"height": height, "width": width, "num_inference_steps": steps, "output_type": "latent"}
    return pipe(generator=torch.Generator().manual_seed(1), return_dict=False, **made | arguments)[0]


def sample_cached(pipe, settings=None, sample=sample, **arguments):
    """The latents of one call of `sample` with DeepCache, and the full and skipped steps of its runs."""
    with heard("deep_cache_run") as runs, deep_cache(pipe, settings or every(3)):
        latents = sample(pipe, **arguments)
    return latents, [(run["skipping"].full_steps, run["skipping"].skipped_steps) for run in runs]
