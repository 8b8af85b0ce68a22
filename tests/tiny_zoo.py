"""Tiny instances of every diffusion model class of ComfyUI's core, and realistic calls of them: UNets and Flux.

`ZOO` maps a name to a `Specimen`. Imported by tests that have put a ComfyUI tree on the path;
`tiny_zoo_dit` adds the other transformers for pictures, `tiny_zoo_video` and `tiny_zoo_sound` the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.ops
import tiny_models
import torch
from comfy.ldm.chroma.model import ChromaParams
from comfy.ldm.chroma_radiance.model import ChromaRadianceParams
from comfy.ldm.flux.model import FluxParams
from comfy.ldm.hunyuan_video.model import HunyuanVideoParams
from kit.tiny_models import known_to


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
