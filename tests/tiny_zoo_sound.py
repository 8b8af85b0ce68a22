"""Tiny instances of ComfyUI's diffusion model classes for sound and 3D; see `tiny_zoo`."""

from __future__ import annotations

import torch
from tiny_zoo import ZOO, Specimen, built


def _sound_and_3d() -> None:
    from comfy.ldm.ace.model import ACEStepTransformer2DModel
    from comfy.ldm.audio.dit import AudioDiffusionTransformer
    from comfy.ldm.hunyuan3d.model import Hunyuan3Dv2
    from comfy.ldm.hunyuan3dv2_1.hunyuandit import HunYuanDiTPlain

    ZOO["Stable Audio"] = Specimen(
        built(AudioDiffusionTransformer, embed_dim=64, cond_token_dim=64, global_cond_dim=56, depth=2, num_heads=2),
        lambda size, noise: (
            noise(size.batch, 64, size.height * size.width // 2),
            {"context": noise(size.batch, size.tokens, 64), "global_embed": noise(size.batch, 56)},
        ),
    )
    ZOO["ACE-Step"] = Specimen(
        built(
            ACEStepTransformer2DModel,
            num_layers=2,
            attention_head_dim=32,
            num_attention_heads=2,
            mlp_ratio=2.5,
            lyric_encoder_vocab_size=50,
            lyric_hidden_size=1024,
            max_width=4096,
        ),
        lambda size, noise: (
            noise(size.batch, 8, 16, size.width * 4),
            {
                "context": noise(size.batch, size.tokens, 768),
                "lyric_token_idx": torch.arange(size.tokens // 2).repeat(size.batch, 1),
                "speaker_embeds": torch.zeros(size.batch, 512),
                "lyrics_strength": 1.0,
            },
        ),
    )
    shapes = dict(in_channels=64, hidden_size=64, num_heads=4)
    ZOO["Hunyuan3D 2"] = Specimen(
        built(Hunyuan3Dv2, **shapes, context_in_dim=48, depth=2, depth_single_blocks=2, guidance_embed=True),
        lambda size, noise: (
            noise(size.batch, 64, size.height * 8),
            {"context": noise(size.batch, size.tokens, 48), "guidance": torch.full((size.batch,), 5.0)},
        ),
    )
    ZOO["Hunyuan3D 2.1"] = Specimen(
        built(HunYuanDiTPlain, **shapes, context_dim=48, depth=5, num_moe_layers=2, guidance_cond_proj_dim=None),
        # cond and uncond are always joined
        lambda size, noise: (
            noise(size.batch * 2, 64, size.height * 8),
            {"context": noise(size.batch * 2, size.tokens, 48), "guidance": torch.full((size.batch * 2,), 5.0)},
        ),
    )


_sound_and_3d()
