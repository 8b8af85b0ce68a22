"""Tiny instances of every diffusion model class of ComfyUI's core, and realistic calls of them.

`ZOO` maps a name to a `Specimen`. Imported by tests that have put a ComfyUI tree on the path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import comfy.ops
import torch
from comfy.ldm.chroma.model import ChromaParams
from comfy.ldm.chroma_radiance.model import ChromaRadianceParams
from comfy.ldm.flux.model import FluxParams
from comfy.ldm.hunyuan_video.model import HunyuanVideoParams

from kit import tiny_models
from kit.tiny_models import QWEN_IMAGE, SD3, WAN, known_to


@dataclass(frozen=True)
class Size:
    """What varies from one image to the next; height and width of the latent, tokens of the prompt."""

    height: int = 16
    width: int = 16
    frames: int = 3
    batch: int = 1
    tokens: int = 24


class Noise:
    """Random tensors of a given shape, one after the other, the same in every run."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)


@dataclass(frozen=True)
class Specimen:
    """A model class made small.

    build: the diffusion model with random weights. inputs: from a size to its latent and what else
        the model's forward takes, as `BaseModel.apply_model` would give it.
    """

    build: Callable[[], torch.nn.Module]
    inputs: Callable[[Size, Noise], tuple[torch.Tensor, dict[str, Any]]]


ZOO: dict[str, Specimen] = {}


def built(cls: type, **config: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        model = cls(**config, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init).eval()
        tiny_models.randomize(model)
        return model.requires_grad_(False)

    return build


def image(channels: int, context: int, has_frames: bool = False, **others: Callable[[Size, Noise], Any]):
    """Inputs of a model: a latent of [B, channels, (F,) H, W] and a context of [B, tokens, context]."""

    def inputs(size: Size, noise: Noise):
        given = {"context": noise(size.batch, size.tokens, context)} if context else {}
        given.update({name: make(size, noise) for name, make in others.items()})
        return noise(size.batch, channels, *[size.frames] * has_frames, size.height, size.width), given

    return inputs


def vector(width: int):
    """One vector an image: [B, width]."""
    return lambda size, noise: noise(size.batch, width)


def filled(value: float, *shape: int):
    """[B, *shape], all of one value."""
    return lambda size, noise: torch.full((size.batch, *shape), value)


def unet(**changes: Any) -> Callable[[], torch.nn.Module]:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    config = tiny_models.unet_config(**changes)
    return built(UNetModel, **config)


def _unets() -> None:
    levels = dict(channel_mult=[1, 2], num_res_blocks=[1, 1])  # two, and attention on one of them: each is kinds more
    sd = levels | dict(transformer_depth=[0, 1], transformer_depth_output=[0, 0, 1, 1])
    ZOO["SD1.5"] = Specimen(unet(**sd), image(4, 768))
    ZOO["SD1.5 inpaint"] = Specimen(unet(**sd, in_channels=9), image(9, 768))
    linear = {"use_linear_in_transformer": True, "num_heads": -1, "num_head_channels": 16}
    ZOO["SD2"] = Specimen(unet(**sd, context_dim=1024, **linear), image(4, 1024))
    sdxl = dict(
        **levels,
        transformer_depth=[0, 2],
        transformer_depth_output=[0, 0, 2, 2],
        transformer_depth_middle=3,
        num_classes="sequential",
        **linear,
    )
    ZOO["SDXL"] = Specimen(
        unet(context_dim=2048, adm_in_channels=2816, **sdxl),
        image(4, 2048, y=vector(2816)),
    )
    ZOO["SDXL refiner"] = Specimen(
        unet(context_dim=1280, adm_in_channels=2560, **(sdxl | {"transformer_depth_middle": 2})),
        image(4, 1280, y=vector(2560)),
    )


def _cascade() -> None:
    from comfy.ldm.cascade.stage_b import StageB
    from comfy.ldm.cascade.stage_c import StageC

    ZOO["Stable Cascade C"] = Specimen(
        built(StageC, c_hidden=[64, 64], c_cond=64, nhead=[2, 2], blocks=[[1, 2], [2, 1]], stable_cascade_stage="c"),
        image(
            16,
            0,
            clip_text=lambda size, noise: noise(size.batch, size.tokens, 1280),
            clip_text_pooled=lambda size, noise: noise(size.batch, 1, 1280),
            clip_img=filled(0.0, 1, 768),
            sca=filled(0.0),
            crp=filled(0.0),
        ),
    )
    ZOO["Stable Cascade B"] = Specimen(
        built(
            StageB,
            c_hidden=[64, 64, 64, 64],
            c_cond=64,
            nhead=[-1, -1, 2, 2],
            blocks=[[1, 1, 2, 1], [1, 2, 1, 1]],
            block_repeat=[[1, 1, 1, 1], [2, 2, 2, 2]],
            stable_cascade_stage="b",
        ),
        lambda size, noise: (
            noise(size.batch, 4, size.height * 4, size.width * 4),
            {
                "clip": noise(size.batch, 1, 1280),
                "effnet": noise(size.batch, 16, size.height, size.width),
                "sca": torch.zeros(size.batch),
            },
        ),
    )


FLUX = dict(
    in_channels=16,
    out_channels=16,
    vec_in_dim=32,
    context_in_dim=48,
    hidden_size=64,
    mlp_ratio=4.0,
    num_heads=2,
    depth=2,
    depth_single_blocks=2,
    axes_dim=[8, 12, 12],
    theta=10000,
    patch_size=2,
    qkv_bias=True,
    guidance_embed=True,
)
CHROMA = {name: value for name, value in FLUX.items() if name not in ("vec_in_dim", "guidance_embed")}
HUNYUAN_VIDEO = FLUX | dict(theta=256, patch_size=[1, 2, 2], byt5=False, meanflow=False, vision_in_dim=None)
HUNYUAN_VIDEO |= dict(use_cond_type_embedding=False) | known_to(HunyuanVideoParams, meanflow_sum=False)
FLUX |= known_to(FluxParams, txt_ids_dims=[])
CHROMA |= dict(in_channels=64, out_channels=64, in_dim=64, out_dim=64, hidden_dim=96, n_layers=2)
CHROMA |= known_to(ChromaParams, txt_ids_dims=[], vec_in_dim=None)
FLUX2 = FLUX | dict(in_channels=128, out_channels=128, vec_in_dim=None, axes_dim=[8, 8, 8, 8], patch_size=1)
FLUX2 |= dict(qkv_bias=False, ops_bias=False, global_modulation=True, mlp_silu_act=True, mlp_ratio=3.0)
FLUX2 |= dict(default_ref_method="index")
LUMINA = dict(in_channels=16, dim=96, n_layers=2, n_heads=3, qk_norm=True, cap_feat_dim=48, axes_dims=[8, 12, 12])
LTXV = dict(in_channels=16, cross_attention_dim=64, attention_head_dim=16, num_attention_heads=4, num_layers=2)
LTXV |= dict(caption_channels=48)
HIDREAM = dict(patch_size=2, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32)
HIDREAM |= dict(num_attention_heads=2, caption_channels=[48, 56], text_emb_dim=32, axes_dims_rope=[16, 8, 8])
HIDREAM |= dict(llama_layers=[0, 1, 1, 1])
COSMOS = dict(max_img_h=48, max_img_w=48, max_frames=16, in_channels=16, out_channels=16, patch_spatial=2)
COSMOS |= dict(patch_temporal=1, model_channels=96, num_blocks=2, num_heads=4, crossattn_emb_channels=48)
COSMOS |= dict(pos_emb_cls="rope3d", use_adaln_lora=True, adaln_lora_dim=16, extra_per_block_abs_pos_emb=True)
RADIANCE = CHROMA | dict(
    **dict(in_channels=3, out_channels=3, patch_size=8, nerf_hidden_size=16, nerf_mlp_ratio=4, nerf_depth=2),
    **dict(nerf_max_freqs=8, nerf_tile_size=512, nerf_final_head_type="conv", nerf_embedder_dtype=torch.float32),
    **known_to(ChromaRadianceParams, use_x0=False, use_sequential_txt_ids=False),
)


def _flux() -> None:
    from comfy.ldm.chroma.model import Chroma
    from comfy.ldm.chroma_radiance.model import ChromaRadiance
    from comfy.ldm.flux.model import Flux

    flux = image(16, 48, y=vector(32), guidance=filled(3.5))
    ZOO["Flux"] = Specimen(built(Flux, **FLUX), flux)
    ZOO["Flux Kontext"] = Specimen(
        built(Flux, **FLUX),
        image(
            16, 48, y=vector(32), guidance=filled(3.5), ref_latents=lambda size, noise: [noise(size.batch, 16, 9, 6)]
        ),
    )
    ZOO["Flux 2"] = Specimen(built(Flux, **FLUX2), image(128, 48, guidance=filled(3.5)))
    ZOO["Chroma"] = Specimen(built(Chroma, **CHROMA), image(16, 48, guidance=filled(0.0)))
    ZOO["Chroma Radiance"] = Specimen(
        built(ChromaRadiance, **RADIANCE),
        lambda size, noise: (
            noise(size.batch, 3, size.height * 8, size.width * 8),
            {"context": noise(size.batch, size.tokens, 48), "guidance": torch.zeros(size.batch)},
        ),
    )


_unets()
_cascade()
_flux()


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
