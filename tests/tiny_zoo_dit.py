"""Tiny instances of ComfyUI's other diffusion transformers for pictures; see `tiny_zoo`."""

from __future__ import annotations

from dataclasses import replace

import torch
from kit.tiny_models import QWEN_IMAGE, SD3
from tiny_zoo import HIDREAM, LUMINA, ZOO, Noise, Size, Specimen, built, filled, image, vector


def _transformers() -> None:
    from comfy.ldm.aura.mmdit import MMDiT as AuraFlow
    from comfy.ldm.hidream.model import HiDreamImageTransformer2DModel
    from comfy.ldm.hydit.models import HunYuanDiT
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper
    from comfy.ldm.pixart.pixartms import PixArtMS

    sd3 = SD3 | {"num_blocks": 3}
    ZOO["SD3"] = Specimen(built(OpenAISignatureMMDITWrapper, **sd3 | {"qk_norm": None}), image(16, 48, y=vector(32)))
    ZOO["SD3.5 medium"] = Specimen(
        built(OpenAISignatureMMDITWrapper, **sd3, x_block_self_attn_layers=[0, 1]),
        image(16, 48, y=vector(32)),
    )
    ZOO["AuraFlow"] = Specimen(
        built(AuraFlow, dim=64, n_layers=4, n_double_layers=2, n_heads=2, global_conddim=64, cond_seq_dim=48),
        image(4, 48),
    )
    pixart = dict(hidden_size=96, depth=2, num_heads=4, caption_channels=48, model_max_length=300, input_size=64)
    sizes = dict(c_size=filled(512.0, 2), c_ar=filled(1.0, 1))

    def large(inputs):
        """Below a quarter of its first size this family divides by zero, and it takes whole patches only."""
        return lambda size, noise: inputs(replace(size, height=size.height * 4, width=size.width * 4), noise)

    ZOO["PixArt Alpha"] = Specimen(built(PixArtMS, **pixart, pe_interpolation=1), large(image(4, 48, **sizes)))
    ZOO["PixArt Sigma"] = Specimen(
        built(PixArtMS, **pixart, pe_interpolation=1, micro_condition=False), large(image(4, 48))
    )
    ZOO["HunyuanDiT"] = Specimen(
        built(
            HunYuanDiT,
            hidden_size=64,
            depth=6,
            num_heads=2,
            text_states_dim=48,
            text_states_dim_t5=64,
            size_cond=True,
            use_style_cond=True,
        ),
        # its text lengths are fixed: 77 for one encoder, 256 for the other
        lambda size, noise: (
            noise(size.batch, 4, size.height, size.width),
            {
                "context": noise(size.batch, 77, 48),
                "text_embedding_mask": torch.ones(size.batch, 77),
                "encoder_hidden_states_t5": noise(size.batch, 256, 64),
                "text_embedding_mask_t5": torch.ones(size.batch, 256),
                "image_meta_size": torch.full((size.batch, 6), 512.0),
            },
        ),
    )
    ZOO["HiDream"] = Specimen(
        built(HiDreamImageTransformer2DModel, **HIDREAM),
        image(
            16,
            48,
            y=vector(32),
            encoder_hidden_states_llama3=lambda size, noise: noise(size.batch, 2, size.tokens + 3, 56),
        ),
    )


def _more_transformers() -> None:
    from comfy.ldm.lumina.model import NextDiT
    from comfy.ldm.omnigen.omnigen2 import OmniGen2Transformer2DModel
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    tokens = dict(num_tokens=lambda size, noise: size.tokens)
    ZOO["Lumina2"] = Specimen(built(NextDiT, **LUMINA, n_kv_heads=1), image(16, 48, **tokens))
    ZOO["Z-Image"] = Specimen(
        built(
            NextDiT,
            **LUMINA | dict(dim=288, axes_dims=[32, 32, 32]),
            z_image_modulation=True,
            time_scale=1000.0,
            pad_tokens_multiple=32,
        ),
        image(16, 48, **tokens),
    )
    omnigen = built(
        OmniGen2Transformer2DModel,
        hidden_size=96,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        axes_dim_rope=(8, 12, 12),
        text_feat_dim=48,
    )
    ZOO["OmniGen2"] = Specimen(omnigen, image(16, 48, **tokens))
    ZOO["OmniGen2 edit"] = Specimen(
        omnigen, image(16, 48, **tokens, ref_latents=lambda size, noise: [noise(size.batch, 16, size.width, 10)])
    )

    def picture(size: Size, noise: Noise):
        return noise(size.batch, 16, 1, size.height, size.width), {"context": noise(size.batch, size.tokens, 48)}

    ZOO["Qwen-Image"] = Specimen(built(QwenImageTransformer2DModel, **QWEN_IMAGE), picture)


_transformers()
_more_transformers()
