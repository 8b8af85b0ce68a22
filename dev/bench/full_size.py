"""Ten models at the size of their published checkpoints, as core's own detection would describe these.

Import it after `inprocess.boot`. Nothing is downloaded: weights are random, made where they are to lie.
"""

from __future__ import annotations

import comfy.ldm.flux.model
import comfy.ldm.hunyuan_video.model
from kit.tiny_models import Family, known_to

_UNET = {
    "use_checkpoint": False,
    "image_size": 32,
    "use_spatial_transformer": True,
    "legacy": False,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "use_temporal_resblock": False,
    "use_temporal_attention": False,
}

SD15 = Family(
    "SD1.5",
    "SD15",
    {
        **_UNET,
        "adm_in_channels": None,
        "num_res_blocks": [2, 2, 2, 2],
        "channel_mult": [1, 2, 4, 4],
        "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
        "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "transformer_depth_middle": 1,
        "use_linear_in_transformer": False,
        "context_dim": 768,
        "num_heads": 8,
        "num_head_channels": -1,
    },
    context_dim=768,
)

SDXL = Family(
    "SDXL",
    "SDXL",
    {
        **_UNET,
        "num_classes": "sequential",
        "adm_in_channels": 2816,
        "num_res_blocks": [2, 2, 2],
        "channel_mult": [1, 2, 4],
        "transformer_depth": [0, 0, 2, 2, 10, 10],
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
        "transformer_depth_middle": 10,
        "use_linear_in_transformer": True,
        "context_dim": 2048,
        "num_heads": -1,
        "num_head_channels": 64,
    },
    context_dim=2048,
    pooled_dim=1280,
)

FLUX = Family(
    "Flux",
    "Flux",
    {
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "vec_in_dim": 768,
        "context_in_dim": 4096,
        "hidden_size": 3072,
        "mlp_ratio": 4.0,
        "num_heads": 24,
        "depth": 19,
        "depth_single_blocks": 38,
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "qkv_bias": True,
        "guidance_embed": True,
        **known_to(comfy.ldm.flux.model.FluxParams, txt_ids_dims=[], yak_mlp=False, txt_norm=False),
    },
    context_dim=4096,
    pooled_dim=768,
    control={"depth": 5, "depth_single_blocks": 10},
)
"""As Flux-dev; its ControlNet as deep as published ones."""

QWEN_IMAGE = Family(
    "Qwen-Image",
    "QwenImage",
    {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60},
    context_dim=3584,
)

WAN = Family(
    "Wan",
    "WAN21_T2V",
    {
        "image_model": "wan2.1",
        "model_type": "t2v",
        "dim": 1536,
        "out_dim": 16,
        "num_heads": 12,
        "ffn_dim": 8960,
        "num_layers": 30,
        "patch_size": (1, 2, 2),
        "freq_dim": 256,
        "window_size": (-1, -1),
        "qk_norm": True,
        "cross_attn_norm": True,
        "eps": 1e-6,
        "in_dim": 16,
    },
    context_dim=4096,
)
"""As Wan 2.1, text to video, 1.3B."""

Z_IMAGE = Family(
    "Z-Image",
    "ZImage",
    {
        "image_model": "lumina2",
        "patch_size": 2,
        "in_channels": 16,
        "dim": 3840,
        "cap_feat_dim": 2560,
        "n_layers": 30,
        "qk_norm": True,
        "n_heads": 30,
        "n_kv_heads": 30,
        "axes_dims": [32, 48, 48],
        "axes_lens": [1536, 512, 512],
        "rope_theta": 256.0,
        "ffn_dim_multiplier": 8.0 / 3.0,
        "z_image_modulation": True,
        "time_scale": 1000.0,
        "pad_tokens_multiple": 32,
    },
    context_dim=2560,
)

SD3 = Family(
    "SD3",
    "SD3",
    {
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "depth": 38,
        "input_size": None,
        "adm_in_channels": 2048,
        "context_embedder_config": {
            "target": "torch.nn.Linear",
            "params": {"in_features": 4096, "out_features": 2432},
        },
        "num_patches": 192 * 192,
        "pos_embed_max_size": 192,
        "pos_embed_scaling_factor": None,
        "qk_norm": "rms",
        "x_block_self_attn_layers": [],
    },
    context_dim=4096,
    pooled_dim=2048,
)
"""As Stable Diffusion 3.5 large."""

FLUX2 = Family(
    "Flux.2",
    "Flux2",
    {
        **FLUX.config,
        **{"image_model": "flux2", "in_channels": 128, "out_channels": 128, "patch_size": 1, "vec_in_dim": None},
        **{"context_in_dim": 15360, "hidden_size": 6144, "num_heads": 48, "depth": 8, "depth_single_blocks": 48},
        **{"axes_dim": [32, 32, 32, 32], "theta": 2000, "mlp_ratio": 3.0, "qkv_bias": False, "ops_bias": False},
        **{"global_modulation": True, "mlp_silu_act": True, "default_ref_method": "index", "ref_index_scale": 10.0},
        **known_to(comfy.ldm.flux.model.FluxParams, txt_ids_dims=[3]),
    },
    context_dim=15360,
)
"""As Flux.2 dev."""

HUNYUAN_VIDEO = Family(
    "HunyuanVideo",
    "HunyuanVideo",
    {
        **{"image_model": "hunyuan_video", "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2]},
        **{"vec_in_dim": 768, "axes_dim": [16, 56, 56], "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0},
        **{"num_heads": 24, "depth": 20, "depth_single_blocks": 40, "theta": 256, "qkv_bias": True, "byt5": False},
        **{"guidance_embed": True, "meanflow": False, "use_cond_type_embedding": False, "vision_in_dim": None},
        **known_to(comfy.ldm.hunyuan_video.model.HunyuanVideoParams, meanflow_sum=False),
    },
    context_dim=4096,
    pooled_dim=768,
)

LTX_2 = Family(
    "LTX 2",
    "LTXAV",
    {"image_model": "ltxav", "num_layers": 48, "attention_head_dim": 128, "cross_attention_dim": 4096}
    | {"rope_type": "split"},
    context_dim=2 * 3840,
)
"""With prompts as its text encoder's node hands them out."""
