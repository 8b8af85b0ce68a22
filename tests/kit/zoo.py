"""Tiny instances of every diffusion model class of ComfyUI's core, and realistic calls of them.

`ZOO` maps a name to a `Specimen`. Imported by tests that have put a ComfyUI tree on the path.
"""

from __future__ import annotations

import importlib
import operator
import re
from dataclasses import dataclass
from typing import Any

import comfy.ops
import torch
from comfy.ldm.chroma.model import ChromaParams
from comfy.ldm.chroma_radiance.model import ChromaRadianceParams
from comfy.ldm.flux.model import FluxParams
from comfy.ldm.hunyuan_video.model import HunyuanVideoParams

from kit.tiny_models import QWEN_IMAGE, SD3, UNET, WAN, known_to, randomize


@dataclass(frozen=True)
class Size:
    """What varies from one image to the next; height and width of the latent, tokens of the prompt."""

    height: int = 16
    width: int = 16
    frames: int = 3
    batch: int = 1
    tokens: int = 24

    def shape(self, text: str) -> list[int]:
        """The sizes that a text names, as "16 F H*2 W": of B, T, F, H and W, the last two also as whole patches of 2.

        HU and WU are rounded up, as core pads the latent itself; HD and WD down.
        """
        names = {"B": self.batch, "T": self.tokens, "F": self.frames, "H": self.height, "W": self.width}
        names |= {f"{name}D": names[name] // 2 * 2 for name in "HW"}
        names |= {f"{name}U": (names[name] + 1) // 2 * 2 for name in "HW"}
        return [_size(part, names) for part in text.split()]


_OPERATIONS = {"*": operator.mul, "//": operator.floordiv, "+": operator.add, "-": operator.sub}


def _size(text: str, names: dict[str, int]) -> int:
    """What "H*W//2" comes to, from left to right."""
    first, *others = (names.get(part) or part for part in re.split(r"(\*|//|[+-])", text))
    size = int(first)
    for operation, other in zip(others[::2], others[1::2], strict=True):
        size = _OPERATIONS[operation](size, int(other))
    return size


class Noise:
    """Random tensors of a given shape, one after the other, the same in every run."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)


@dataclass(frozen=True)
class Specimen:
    """A model class made small.

    blocks, kinds: that are found in it. path: of the class, under `comfy.ldm`; config: what it is made with. latent:
    its shape behind the batch, as `Size.shape` reads it. given: what else the model's forward takes, as
    `BaseModel.apply_model` would give it: a text is noise of that shape, a float one number for each row, and a
    function is called with size and noise. Those that no test calls have neither.
    """

    blocks: int
    kinds: int
    path: str
    config: dict[str, Any]
    latent: str
    given: dict[str, Any]

    def build(self) -> torch.nn.Module:
        """The diffusion model with random weights."""
        module, _, name = self.path.rpartition(".")
        cls = getattr(importlib.import_module(f"comfy.ldm.{module}"), name)
        how = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init}
        model = cls(**self.config, **how).eval()
        randomize(model)
        return model.requires_grad_(False)

    def inputs(self, size: Size, noise: Noise) -> tuple[torch.Tensor, dict[str, Any]]:
        """A latent, and what else the model takes."""

        def made(what: Any) -> Any:
            if isinstance(what, str):
                return noise(*size.shape(f"B {what}"))
            if isinstance(what, float):
                return torch.full((size.batch,), what)
            return what(size, noise) if callable(what) else what

        return made(self.latent), {name: made(what) for name, what in self.given.items()}


def _of(blocks: int, kinds: int, path: str, config: dict, latent: str = "", **given: Any) -> Specimen:
    return Specimen(blocks, kinds, path, config, latent, given)


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

_UNET = "modules.diffusionmodules.openaimodel.UNetModel"
_LEVELS = UNET | dict(channel_mult=[1, 2], num_res_blocks=[1, 1])
# Attention on one of the two levels: each is kinds more.
_SD = _LEVELS | dict(transformer_depth=[0, 1], transformer_depth_output=[0, 0, 1, 1])
_LINEAR = {"use_linear_in_transformer": True, "num_heads": -1, "num_head_channels": 16}
_SDXL = _LEVELS | dict(transformer_depth=[0, 2], transformer_depth_output=[0, 0, 2, 2], transformer_depth_middle=3)
_SDXL |= dict(num_classes="sequential", context_dim=2048, adm_in_channels=2816) | _LINEAR
_REFINER = _SDXL | dict(context_dim=1280, adm_in_channels=2560, transformer_depth_middle=2)
# Every ResBlock changes the number of channels: one kind.
_SVD = UNET | dict(in_channels=8, channel_mult=[1, 2], num_res_blocks=[0, 1], transformer_depth=[1])
_SVD |= dict(transformer_depth_output=[0, 1, 1], transformer_depth_middle=-2, context_dim=1024, adm_in_channels=768)
_SVD |= dict(num_classes="sequential", extra_ff_mix_layer=True, use_spatial_context=True, merge_factor=0.0)
_SVD |= dict(merge_strategy="learned_with_images", video_kernel_size=[3, 1, 1], use_temporal_resblock=True)
_SVD |= dict(use_temporal_attention=True, disable_temporal_crossattention=False) | _LINEAR

_CASCADE_C = dict(c_hidden=[64, 64], c_cond=64, nhead=[2, 2], blocks=[[1, 2], [2, 1]], stable_cascade_stage="c")
_CASCADE_B = dict(c_hidden=[64] * 4, c_cond=64, nhead=[-1, -1, 2, 2], blocks=[[1, 1, 2, 1], [1, 2, 1, 1]])
_CASCADE_B |= dict(block_repeat=[[1, 1, 1, 1], [2, 2, 2, 2]], stable_cascade_stage="b")

_SD3, _MMDIT = SD3 | {"num_blocks": 3}, "modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper"
_AURA = dict(dim=64, n_layers=4, n_double_layers=2, n_heads=2, global_conddim=64, cond_seq_dim=48)
_PIXART = dict(hidden_size=96, depth=2, num_heads=4, caption_channels=48, model_max_length=300, input_size=64)
_HUNYUAN_DIT = dict(hidden_size=64, depth=6, num_heads=2, text_states_dim=48, text_states_dim_t5=64, size_cond=True)
_Z_IMAGE = LUMINA | dict(dim=288, axes_dims=[32, 32, 32], z_image_modulation=True, time_scale=1000.0)
_OMNIGEN = dict(hidden_size=96, num_layers=2, num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1)
_OMNIGEN |= dict(axes_dim_rope=(8, 12, 12), text_feat_dim=48)
_HUNYUAN_15 = HUNYUAN_VIDEO | dict(vec_in_dim=None, byt5=True, use_cond_type_embedding=True, vision_in_dim=40)
_HUNYUAN_IMAGE = HUNYUAN_VIDEO | dict(vec_in_dim=None, axes_dim=[16, 16], patch_size=[1, 1], meanflow=True)
_MOCHI = dict(depth=3, num_heads=2, hidden_size_x=48, hidden_size_y=32, mlp_ratio_x=256.0, learn_sigma=False)
_MOCHI |= dict(in_channels=12, qk_norm=True, qkv_bias=False, timestep_scale=1000.0, use_t5=True, t5_feat_dim=64)
_COSMOS = COSMOS | dict(block_x_format="THWBD", affline_emb_norm=True, extra_per_block_abs_pos_emb_type="learnable")
_COSMOS2 = COSMOS | dict(extra_per_block_abs_pos_emb=False, rope_enable_fps_modulation=False)
_AUDIO = dict(embed_dim=64, cond_token_dim=64, global_cond_dim=56, depth=2, num_heads=2)
_ACE = dict(num_layers=2, attention_head_dim=32, num_attention_heads=2, mlp_ratio=2.5, lyric_encoder_vocab_size=50)
_ACE |= dict(lyric_hidden_size=1024, max_width=4096)
_SHAPES = dict(in_channels=64, hidden_size=64, num_heads=4)
_SHAPES_2 = _SHAPES | dict(context_in_dim=48, depth=2, depth_single_blocks=2, guidance_embed=True)
_SHAPES_21 = _SHAPES | dict(context_dim=48, depth=5, num_moe_layers=2, guidance_cond_proj_dim=None)

_TEXT = {"context": "T 48"}
_GUIDED = _TEXT | {"y": "32", "guidance": 3.5}

ZOO: dict[str, Specimen] = {
    "SD1.5": _of(12, 3, _UNET, _SD),
    "SD1.5 inpaint": _of(12, 3, _UNET, _SD | {"in_channels": 9}),
    "SD2": _of(12, 3, _UNET, _SD | {"context_dim": 1024} | _LINEAR),
    "SDXL": _of(17, 3, _UNET, _SDXL, "4 H W", context="T 2048", y="2816"),
    "SDXL refiner": _of(16, 3, _UNET, _REFINER),
    "SVD": _of(10, 3, _UNET, _SVD),
    "Stable Cascade C": _of(18, 3, "cascade.stage_c.StageC", _CASCADE_C),
    "Stable Cascade B": _of(26, 4, "cascade.stage_b.StageB", _CASCADE_B),
    "Flux": _of(4, 2, "flux.model.Flux", FLUX, "16 H W", **_GUIDED),
    "Flux 2": _of(4, 2, "flux.model.Flux", FLUX2),
    "Chroma": _of(6, 3, "chroma.model.Chroma", CHROMA),
    "Chroma Radiance": _of(8, 4, "chroma_radiance.model.ChromaRadiance", RADIANCE),
    "SD3": _of(3, 2, _MMDIT, _SD3 | {"qk_norm": None}),
    "SD3.5 medium": _of(3, 2, _MMDIT, _SD3 | {"x_block_self_attn_layers": [0, 1]}),
    "AuraFlow": _of(4, 2, "aura.mmdit.MMDiT", _AURA),
    "PixArt Alpha": _of(2, 1, "pixart.pixartms.PixArtMS", _PIXART | {"pe_interpolation": 1}),
    "PixArt Sigma": _of(2, 1, "pixart.pixartms.PixArtMS", _PIXART | dict(pe_interpolation=1, micro_condition=False)),
    "HunyuanDiT": _of(6, 2, "hydit.models.HunYuanDiT", _HUNYUAN_DIT | {"use_style_cond": True}),
    "HiDream": _of(26, 3, "hidream.model.HiDreamImageTransformer2DModel", HIDREAM),
    "Lumina2": _of(
        6,
        2,
        "lumina.model.NextDiT",
        LUMINA | {"n_kv_heads": 1},
        "16 H W",
        **_TEXT,
        num_tokens=lambda size, noise: size.tokens,
    ),
    "Z-Image": _of(6, 2, "lumina.model.NextDiT", _Z_IMAGE | {"pad_tokens_multiple": 32}),
    "OmniGen2": _of(5, 2, "omnigen.omnigen2.OmniGen2Transformer2DModel", _OMNIGEN),
    "Qwen-Image": _of(2, 1, "qwen_image.model.QwenImageTransformer2DModel", QWEN_IMAGE, "16 1 H W", **_TEXT),
    "Wan t2v": _of(2, 1, "wan.model.WanModel", WAN, "16 F H W", **_TEXT),
    "Wan i2v": _of(2, 1, "wan.model.WanModel", WAN | dict(in_dim=36, model_type="i2v")),
    "Wan VACE": _of(3, 2, "wan.model.VaceWanModel", WAN | dict(vace_layers=1, vace_in_dim=96)),
    "Wan camera": _of(2, 1, "wan.model.CameraWanModel", WAN | {"in_dim": 32}),
    "Wan HuMo": _of(2, 1, "wan.model.HumoWanModel", WAN),
    "Wan S2V": _of(6, 3, "wan.model.WanModel_S2V", WAN | dict(audio_dim=64, audio_inject_layers=[0, 1])),
    "Wan animate": _of(13, 7, "wan.model_animate.AnimateWanModel", WAN | dict(in_dim=36, num_layers=5)),
    "HunyuanVideo": _of(6, 3, "hunyuan_video.model.HunyuanVideo", HUNYUAN_VIDEO),
    "HunyuanVideo i2v": _of(
        6, 3, "hunyuan_video.model.HunyuanVideo", HUNYUAN_VIDEO | dict(in_channels=33, guidance_embed=False)
    ),
    "HunyuanVideo 1.5": _of(6, 3, "hunyuan_video.model.HunyuanVideo", _HUNYUAN_15 | {"patch_size": [1, 1, 1]}),
    "HunyuanImage 2.1": _of(6, 3, "hunyuan_video.model.HunyuanVideo", _HUNYUAN_IMAGE),
    "LTXV": _of(2, 1, "lightricks.model.LTXVModel", LTXV),
    "Mochi": _of(3, 2, "genmo.joint_model.asymm_models_joint.AsymmDiTJoint", _MOCHI),
    "Cosmos": _of(7, 4, "cosmos.model.GeneralDIT", _COSMOS),
    "Cosmos predict2": _of(2, 1, "cosmos.predict2.MiniTrainDIT", _COSMOS2, "16 F HD WD", **_TEXT, fps=None),
    "Stable Audio": _of(2, 1, "audio.dit.AudioDiffusionTransformer", _AUDIO),
    "ACE-Step": _of(8, 2, "ace.model.ACEStepTransformer2DModel", _ACE),
    "Hunyuan3D 2": _of(4, 2, "hunyuan3d.model.Hunyuan3Dv2", _SHAPES_2),
    "Hunyuan3D 2.1": _of(25, 4, "hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain", _SHAPES_21),
}
