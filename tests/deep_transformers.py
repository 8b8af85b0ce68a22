"""Transformers of diffusers' classes, narrow but deep enough to leave blocks out, in pipelines of their own classes.

Imported by tests that have made sure that diffusers is there. Text encoders and VAEs are left out.
"""

import diffusers
import torch
from comfy_accel.accel.core.events import subscribe
from comfy_accel.accel.hosts.diffusers.deep_cache import deep_cache
from uniform_hold import uniform_hold

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


def sd3(layers=8):
    return seeded(
        lambda: diffusers.SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=layers,
            joint_attention_dim=WIDTH,
            caption_projection_dim=16,
            pooled_projection_dim=WIDTH,
            **HEADS,
        )
    )


def flux(doubles=3, singles=6, channels=16):
    return seeded(
        lambda: diffusers.FluxTransformer2DModel(
            in_channels=channels,
            num_layers=doubles,
            num_single_layers=singles,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            axes_dims_rope=(2, 2, 4),
            guidance_embeds=True,
            **HEADS,
        )
    )


def wan(layers=8, seed=0):
    return seeded(
        lambda: diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=WIDTH,
            freq_dim=16,
            ffn_dim=32,
            num_layers=layers,
            rope_max_seq_len=32,
        ),
        seed,
    )


def pixart():
    return seeded(
        lambda: diffusers.PixArtTransformer2DModel(
            sample_size=8,
            num_layers=8,
            patch_size=2,
            in_channels=4,
            out_channels=8,
            caption_channels=WIDTH,
            cross_attention_dim=16,
            use_additional_conditions=False,
            **HEADS,
        )
    )


def aura_flow():
    return seeded(
        lambda: diffusers.AuraFlowTransformer2DModel(
            sample_size=16,
            num_mmdit_layers=2,
            num_single_dit_layers=6,
            joint_attention_dim=WIDTH,
            caption_projection_dim=16,
            pos_embed_max_size=256,
            **HEADS,
        )
    )


def lumina2():
    return seeded(
        lambda: diffusers.Lumina2Transformer2DModel(
            sample_size=16,
            in_channels=4,
            hidden_size=16,
            num_layers=8,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=2,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(64, 64, 64),
            cap_feat_dim=WIDTH,
        )
    )


def z_image():
    return seeded(
        lambda: diffusers.ZImageTransformer2DModel(
            in_channels=4,
            dim=16,
            n_layers=8,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=WIDTH,
            axes_dims=[4, 2, 2],
            axes_lens=[256, 64, 64],
        )
    )


def qwen_image():
    return seeded(
        lambda: diffusers.QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=8,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(4, 2, 2),
            **HEADS,
        )
    )


def hunyuan_video():
    return seeded(
        lambda: diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_layers=3,
            num_single_layers=6,
            num_refiner_layers=1,
            text_embed_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            rope_axes_dim=(2, 2, 4),
            **HEADS,
        )
    )


def ltx():
    return seeded(
        lambda: diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_layers=8,
            cross_attention_dim=16,
            caption_channels=WIDTH,
            **HEADS,
        )
    )


_FLOW = "FlowMatchEulerDiscreteScheduler"
_MAKERS = {
    "StableDiffusion3": (sd3, _FLOW, {"shift": 3.0}),
    "Flux": (flux, _FLOW, {"shift": 3.0}),
    "Wan": (wan, "UniPCMultistepScheduler", {"prediction_type": "flow_prediction", "use_flow_sigmas": True}),
    "PixArt": (pixart, "DPMSolverMultistepScheduler", {}),
    "AuraFlow": (aura_flow, _FLOW, {"shift": 1.73}),
    "Lumina2": (lumina2, _FLOW, {"shift": 6.0}),
    "ZImage": (z_image, _FLOW, {"shift": 3.0}),
    "QwenImage": (qwen_image, _FLOW, {"shift": 3.0}),
    "HunyuanVideo": (hunyuan_video, _FLOW, {"shift": 7.0}),
    "LTX": (ltx, _FLOW, {}),
}
"""Beginning of a pipeline's name → its transformer, scheduler, and that one's settings."""

_ABSENT = [f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")]


def pipeline(kind, scheduler=None, **parts):
    """A pipeline of the class named `kind`; `parts` replace or add components and settings."""
    make = getattr(diffusers, kind)
    transformer, flow, settings = next(made for name, made in _MAKERS.items() if kind.startswith(name))
    if "transformer" not in parts:
        parts["transformer"] = transformer()
    scheduler = scheduler or getattr(diffusers, flow)(**settings)
    expected, _ = make._get_signature_keys(make)
    absent = dict.fromkeys(name for name in (*_ABSENT, "vae") if name in expected)
    made = make(**{**absent, "scheduler": scheduler, **parts})
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
        if kind.startswith(("StableDiffusion3", "Flux", "HunyuanVideo")):
            made[f"{prefix}pooled_prompt_embeds"] = torch.randn(batch, WIDTH, generator=random).to(dtype)
        if kind.startswith(("PixArt", "AuraFlow", "Lumina2", "HunyuanVideo", "LTX")):
            made[f"{prefix}prompt_attention_mask"] = torch.ones(batch, tokens, dtype=torch.long)
        if kind.startswith("QwenImage"):
            made[f"{prefix}prompt_embeds_mask"] = torch.ones(batch, tokens, dtype=torch.long)
        if kind.startswith("ZImage"):
            made[f"{prefix}prompt_embeds"] = list(made[f"{prefix}prompt_embeds"])
    if kind.startswith(("Wan", "HunyuanVideo", "LTX")):
        arguments = {"num_frames": 5, **arguments}
    if kind.startswith("PixArt"):
        arguments = {"use_resolution_binning": False, "negative_prompt": None, **arguments}
    made |= {"height": height, "width": width, "num_inference_steps": steps, "output_type": "latent"}
    return pipe(generator=torch.Generator().manual_seed(1), return_dict=False, **made | arguments)[0]


def sample_cached(pipe, settings=None, **arguments):
    """The latents of one call with DeepCache, and the full and skipped steps of its runs."""
    counts = []
    unsubscribe = subscribe(
        lambda name, data: name == "deep_cache_run" and counts.append((data["full_steps"], data["skipped_steps"]))
    )
    try:
        with deep_cache(pipe, settings or uniform_hold(3)):
            latents = sample(pipe, **arguments)
    finally:
        unsubscribe()
    return latents, counts
