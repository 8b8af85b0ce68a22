"""Tiny instances of ComfyUI's diffusion model classes for video; see `tiny_zoo`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from kit.tiny_models import WAN
from tiny_zoo import COSMOS, HUNYUAN_VIDEO, LTXV, ZOO, Noise, Size, Specimen, built, filled, image, unet, vector

video = functools.partial(image, has_frames=True)


def whole(size: Size) -> tuple[int, int]:
    """Height and width rounded up to patches of two, as core pads the latent itself."""
    return (size.height + 1) // 2 * 2, (size.width + 1) // 2 * 2


def _svd() -> None:
    config = dict(
        in_channels=8,
        channel_mult=[1, 2],
        num_res_blocks=[0, 1],  # every ResBlock changes the number of channels: one kind
        transformer_depth=[1],
        transformer_depth_output=[0, 1, 1],
        transformer_depth_middle=-2,
        context_dim=1024,
        num_heads=-1,
        num_head_channels=16,
        use_linear_in_transformer=True,
        num_classes="sequential",
        adm_in_channels=768,
        extra_ff_mix_layer=True,
        use_spatial_context=True,
        merge_strategy="learned_with_images",
        merge_factor=0.0,
        video_kernel_size=[3, 1, 1],
        use_temporal_resblock=True,
        use_temporal_attention=True,
        disable_temporal_crossattention=False,
    )

    def inputs(size: Size, noise: Noise):
        frames = size.batch * size.frames
        return noise(frames, 8, size.height, size.width), {
            "context": noise(frames, 1, 1024),
            "y": noise(frames, 768),
            "num_video_frames": size.frames,
            "image_only_indicator": torch.zeros(1),
        }

    ZOO["SVD"] = Specimen(unet(**config), inputs)


def _wan() -> None:
    from comfy.ldm.wan.model import CameraWanModel, HumoWanModel, VaceWanModel, WanModel, WanModel_S2V
    from comfy.ldm.wan.model_animate import AnimateWanModel

    picture = dict(clip_fea=lambda size, noise: noise(size.batch, 257, 1280))
    ZOO["Wan t2v"] = Specimen(built(WanModel, **WAN), video(16, 48))
    ZOO["Wan i2v"] = Specimen(built(WanModel, **WAN | {"in_dim": 36}, model_type="i2v"), video(36, 48, **picture))
    ZOO["Wan VACE"] = Specimen(
        built(VaceWanModel, **WAN, vace_layers=1, vace_in_dim=96),
        video(
            16,
            48,
            vace_context=lambda size, noise: noise(size.batch, 1, 96, size.frames, *whole(size)),
            vace_strength=lambda size, noise: [0.8],
        ),
    )
    ZOO["Wan camera"] = Specimen(
        built(CameraWanModel, **WAN | {"in_dim": 32}),
        video(
            32,
            48,
            **picture,
            camera_conditions=lambda size, noise: noise(
                size.batch, 24, size.frames, *(side * 8 for side in whole(size))
            ),
        ),
    )
    ZOO["Wan HuMo"] = Specimen(
        built(HumoWanModel, **WAN),
        video(16, 48, audio_embed=lambda size, noise: noise(size.batch, size.frames, 8, 5, 1280)),
    )
    ZOO["Wan S2V"] = Specimen(
        built(WanModel_S2V, **WAN, audio_dim=64, audio_inject_layers=[0, 1]),
        video(
            16,
            48,
            audio_embed=lambda size, noise: noise(size.batch, 25, 64, size.frames * 4),
            reference_latent=lambda size, noise: noise(size.batch, 16, 1, *whole(size)),
        ),
    )
    ZOO["Wan animate"] = Specimen(
        built(AnimateWanModel, **WAN | {"in_dim": 36, "num_layers": 5}),
        video(
            36,
            48,
            **picture,
            pose_latents=lambda size, noise: noise(size.batch, 16, size.frames - 1, *whole(size)),
        ),
    )


def _hunyuan() -> None:
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    def even(channels: int, **others: Callable[[Size, Noise], Any]):
        """Core rounds the latents of this family to whole patches."""
        inputs = video(channels, 48, guidance=filled(6.0), **others)
        return lambda size, noise: inputs(replace(size, height=size.height // 2 * 2, width=size.width // 2 * 2), noise)

    masked = dict(attention_mask=lambda size, noise: torch.ones(1, size.tokens, dtype=torch.long))
    ZOO["HunyuanVideo"] = Specimen(built(HunyuanVideo, **HUNYUAN_VIDEO), even(16, y=vector(32), **masked))
    first_frame = even(33, y=vector(32), guiding_frame_index=filled(0.0))
    ZOO["HunyuanVideo i2v"] = Specimen(
        built(HunyuanVideo, **HUNYUAN_VIDEO | {"in_channels": 33, "guidance_embed": False}),
        lambda size, noise: first_frame(replace(size, batch=1), noise),  # core's own arithmetic fails at others
    )
    ZOO["HunyuanVideo 1.5"] = Specimen(
        built(
            HunyuanVideo,
            **HUNYUAN_VIDEO
            | dict(vec_in_dim=None, byt5=True, use_cond_type_embedding=True, vision_in_dim=40, patch_size=[1, 1, 1]),
        ),
        even(
            16,
            txt_byt5=lambda size, noise: noise(size.batch, 7, 1472),
            clip_fea=lambda size, noise: noise(size.batch, 9, 40),
        ),
    )
    ZOO["HunyuanImage 2.1"] = Specimen(
        built(
            HunyuanVideo, **HUNYUAN_VIDEO | dict(vec_in_dim=None, axes_dim=[16, 16], patch_size=[1, 1], meanflow=True)
        ),
        lambda size, noise: (
            noise(size.batch, 16, size.height, size.width),
            {"context": noise(size.batch, size.tokens, 48), "guidance": torch.full((size.batch,), 6.0)},
        ),
    )


def _video() -> None:
    from comfy.ldm.cosmos.model import GeneralDIT
    from comfy.ldm.cosmos.predict2 import MiniTrainDIT
    from comfy.ldm.genmo.joint_model.asymm_models_joint import AsymmDiTJoint
    from comfy.ldm.lightricks.model import LTXVModel

    ZOO["LTXV"] = Specimen(
        built(LTXVModel, **LTXV),
        video(16, 48, attention_mask=lambda size, noise: None, frame_rate=lambda size, noise: 25),
    )
    ZOO["Mochi"] = Specimen(
        built(
            AsymmDiTJoint,
            depth=3,
            num_heads=2,
            hidden_size_x=48,
            hidden_size_y=32,
            mlp_ratio_x=256.0,
            learn_sigma=False,
            in_channels=12,
            qk_norm=True,
            qkv_bias=False,
            timestep_scale=1000.0,
            use_t5=True,
            t5_feat_dim=64,
        ),
        lambda size, noise: (
            noise(size.batch, 12, size.frames, size.height // 2 * 2, size.width // 2 * 2),
            {
                "context": noise(size.batch, 40, 64),
                "attention_mask": torch.ones(size.batch, 40),
                "num_tokens": size.tokens,
            },
        ),
    )

    def even(size: Size, noise: Noise):
        latent = noise(size.batch, 16, size.frames, size.height // 2 * 2, size.width // 2 * 2)
        return latent, {"context": noise(size.batch, size.tokens, 48), "fps": None}

    ZOO["Cosmos"] = Specimen(
        built(
            GeneralDIT,
            **COSMOS,
            block_x_format="THWBD",
            affline_emb_norm=True,
            extra_per_block_abs_pos_emb_type="learnable",
        ),
        even,
    )
    ZOO["Cosmos predict2"] = Specimen(
        built(MiniTrainDIT, **COSMOS | dict(extra_per_block_abs_pos_emb=False), rope_enable_fps_modulation=False), even
    )


_svd()
_wan()
_hunyuan()
_video()
