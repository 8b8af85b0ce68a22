"""The other classes of core's `comfy.supported_models` that are sampled, each with what its nodes give it.

`OTHERS` maps a name to how it is run, as `FAMILIES` does for the models that most people have; those that ComfyUI's
own templates use come first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.ops
import torch

from kit.families import FRAMES, IMAGE, TinyFamily, Vision
from kit.tiny_models import QWEN_IMAGE, Family
from kit.tiny_models import WAN as TWO_BLOCKS
from kit.zoo import ZOO, Noise, Size

NOT_SAMPLED = {"RT_DETR_v4", "SAM3", "SAM31", "DepthAnything3"}
"""Classes that find objects or depth in one call."""


def given(**what: Any) -> Callable:
    """A function that gives what the conditioning holds beside the text. A text is noise of that shape, as `Size.shape`
    reads it behind a batch of 1; a list has one or more; a function is called with size and noise."""

    def extras(shapes: Any, noise: Noise) -> dict[str, Any]:
        frames, height, width = (1, 1, *shapes[0][1:])[-3:]
        size = Size(height, width, frames)

        def made(value: Any) -> Any:
            if isinstance(value, str):
                return noise(1, *size.shape(value))
            if isinstance(value, list):
                return [made(one) for one in value]
            return value(size, noise) if callable(value) else value

        return {name: made(value) for name, value in what.items()}

    return extras


def seen(shape: str) -> Callable[[Size, Noise], Vision]:
    """What a CLIP vision model gives."""
    return lambda size, noise: Vision(noise(1, *size.shape(shape)))


def _of(model_class: str, config: dict, sizes: Any, context: int = 48, pooled: int | None = None, **how: Any):
    """how: further fields of `TinyFamily`, and what `given` takes."""
    family = Family(
        model_class, model_class, config, context, pooled, state=how.pop("state", dict), fixed=how.pop("fixed", {})
    )
    fields = {name: how.pop(name) for name in list(how) if name in TinyFamily.__dataclass_fields__}
    return TinyFamily(family, sizes, given(**how), **fields)


def _zoo(name: str, **changes: Any) -> dict:
    return ZOO[name].config | changes


def _batched(shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[tuple[int, ...]], ...]:
    return tuple((shape[1:],) for shape in shapes)


LATENT = ((4, 16, 16),), ((4, 15, 24),)
TALL = ((4, 64, 48),), ((4, 40, 64),)
PICTURE, VIDEO = _batched(IMAGE), _batched(FRAMES)
PIXELS = ((3, 32, 32),), ((3, 32, 48),)
WIDE_PIXELS = ((3, 64, 64),), ((3, 64, 96),)
SHAPE = ((64, 60),), ((64, 90),)
EVEN = ((16, 12, 12),), ((16, 10, 16),)
LARGE = ((128, 6, 6),), ((128, 5, 8),)
FRAME = ((16, 1, 12, 12),), ((16, 1, 9, 16),)

WAN = TWO_BLOCKS | {"num_layers": 4}
_FOUR, _DEEP = {"num_layers": 4}, {"num_blocks": 4}
_WIDE = {"model_channels": 64}
"""Core fixes 64 channels a head."""
_SD2 = _zoo("SD2", **_WIDE)
_LABELLED = _SD2 | {"num_classes": "sequential"}
_FOUR_LEVELS = dict(channel_mult=[1, 1, 1, 2], num_res_blocks=[1] * 4, transformer_depth=[0, 1, 0, 0])
_FOUR_LEVELS |= dict(transformer_depth_output=[0, 0, 0, 0, 1, 1, 0, 0])
_SDXL = _zoo("SDXL", **_WIDE)
_SVD = _zoo("SVD", **_WIDE)
_FRAMES = dict(tokens=(1, 1), rows=2)
_IMAGE_4 = {"concat_latent_image": "4 H W"}
_IMAGE_16 = {"concat_latent_image": "16 F H W"}
_FILLED = _IMAGE_16 | {"concat_mask": "1 F H W"}
_SEEN = _FILLED | {"clip_vision_output": seen("257 1280")}


def _unclip(width: int) -> dict:
    how = {"strength": 1.0, "noise_augmentation": 0.1}
    return {"unclip_conditioning": [lambda size, noise: {"clip_vision_output": Vision(noise(1, width))} | how]}


def _seconds(names: str, features: str = "learned") -> dict[str, torch.Tensor]:
    """Weights that Stable Audio's checkpoints have beside the model: of what embeds lengths."""
    from comfy.ldm.audio.embedders import NumberConditioner

    weights = NumberConditioner(768, fourier_features_type=features).state_dict()
    weights = {name: Noise(0)(*weight.shape) / 8 for name, weight in weights.items()}
    return {f"conditioner.conditioners.{one}.{name}": w for one in names.split() for name, w in weights.items()}


def _without_faces(model: torch.nn.Module) -> None:
    """Wan Animate's encoders of faces take 512 x 512 pixels and most of the weights; no face is given."""
    model.motion_encoder = model.face_encoder = torch.nn.Identity()


def _narrow_sound(model: torch.nn.Module) -> None:
    """HuMo's encoder of sound, whose widths core fixes, narrow inside."""
    from comfy.ldm.wan.model import AudioProjModel

    how = dict(dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
    sizes = dict(seq_len=8, blocks=5, channels=1280, intermediate_dim=16, output_dim=1536, context_tokens=16)
    model.audio_proj = AudioProjModel(**sizes, **how)


def _narrow_music(model: torch.nn.Module) -> None:
    """MiniMax Music 3's transformer, whose width and depth core fixes, small: it is not yet filled in. Its attention is
    the one for a card: on a CPU core asks in each block how much memory is free."""
    from comfy.ldm.minimax_music import dit
    from comfy.ldm.modules.attention import optimized_attention

    dit.optimized_attention_for_device = lambda device: optimized_attention

    make, transformer = comfy.ops.disable_weight_init, model.diffusion_transformer.transformer
    transformer.project_in = make.Linear(2304, 64, bias=False)
    transformer.project_out = make.Linear(64, 128, bias=False)
    transformer.layers = torch.nn.ModuleList(
        dit.TransformerBlock(64, 32, 96, torch.float32, "cpu", make) for _ in "123"
    )
    time = model.diffusion_transformer.to_timestep_embed
    time[0], time[2] = make.Linear(256, 64), make.Linear(64, 64)


_I2V = WAN | dict(in_dim=36, out_dim=16)
_POSED = dict(reference_latents=["16 1 H W"], pose_video_latent="16 F H//2 W//2")
_T5 = dict(conditioning_mt5xl="256 64", attention_mask_mt5xl=torch.ones(1, 256), attention_mask=torch.ones(1, 77))
_T5 |= {"tokens": (77, 77)}
_MASK = dict(attention_mask=torch.ones(1, 24, dtype=torch.long), tokens=(24, 24))
_BOOGU = dict(hidden_size=96, num_layers=4, num_double_stream_layers=2, num_refiner_layers=1, num_attention_heads=3)
_BOOGU |= dict(num_kv_heads=1, axes_dim_rope=(8, 12, 12), instruction_feat_dim=48)
_JOY = dict(hidden_size=64, num_attention_heads=2, text_dim=48, num_layers=4)
_IDEOGRAM = dict(num_attention_heads=2, attention_head_dim=32, intermediate_size=96)
_IDEOGRAM |= dict(adaln_dim=32, llm_features_dim=48, mrope_section=(6, 5, 5))
_LENS = dict(num_layers=3, attention_head_dim=32, num_attention_heads=2, enc_hidden_dim=48, axes_dims_rope=(8, 12, 12))
_LENS |= dict(selected_layer_index=(0, 1))
_MAGE = QWEN_IMAGE | dict(in_channels=128, out_channels=128, num_layers=4)
_ERNIE = dict(hidden_size=64, num_attention_heads=2, num_layers=3, ffn_hidden_size=96, text_in_dim=48)
_ERNIE |= dict(rope_axes_dim=(8, 12, 12))
_KANDINSKY = dict(in_text_dim=48, in_text_dim2=56, time_dim=32, model_dim=64, ff_dim=96, num_text_blocks=2)
_KANDINSKY |= dict(num_visual_blocks=3, axes_dims=(8, 12, 12))
_COG = dict(num_attention_heads=2, attention_head_dim=32, time_embed_dim=32, text_embed_dim=48, num_layers=3)
_COG |= dict(use_rotary_positional_embeddings=True)
_Z_PIXEL = dict(
    _zoo("Z-Image", in_channels=3, patch_size=8, n_layers=4), decoder_in_channels=192, decoder_hidden_size=32
)
_Z_PIXEL |= dict(decoder_num_res_blocks=2, decoder_max_freqs=4)
_PIXEL_DIT = dict(
    num_groups=2, hidden_size=128, patch_size=8, pixel_attn_hidden_size=32, pixel_num_groups=2, patch_depth=6
)
_PIXEL_DIT |= dict(txt_embed_dim=48)
_PID = _PIXEL_DIT | dict(lq_hidden_dim=32, lq_num_res_blocks=1)
_HIDREAM_O1 = dict(  # of 3 heads: of 2, positions in a batch of 2 would look as if they were for the heads
    text_config_overrides=dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=3)
    | dict(num_key_value_heads=1, head_dim=32, rope_dims=[6, 5, 5]),
    vision_config_overrides=dict(hidden_size=32, num_heads=2, intermediate_size=48, depth=1)
    | dict(num_position_embeddings=64, deepstack_visual_indexes=()),
)
_SEEDVR = dict(norm_eps=1e-5, num_layers=4, mlp_type="swiglu", vid_dim=64, txt_in_dim=48, heads=2, head_dim=32)
_SEEDVR |= dict(mm_layers=2, rope_dim=32, vid_out_norm=True)
_TRIPOSPLAT = dict(q_token_length=64, model_channels=64, cond_channels=48, num_blocks=3, num_head_channels=32)
_TRELLIS = dict(resolution=32, model_channels=48, cond_channels=48, num_blocks=4, mlp_ratio=2)
_VOXELS = torch.arange(56)[:, None] * torch.tensor([0, 1, 3, 5]) % 32
_AUDIO_1 = _zoo("Stable Audio", depth=4, cond_token_dim=768, global_cond_dim=1536, embed_dim=768, num_heads=12)
_AUDIO_3 = _zoo(
    "Stable Audio", depth=4, cond_token_dim=768, global_cond_dim=768, io_channels=256, project_cond_tokens=True
)
_AUDIO_3 |= dict(local_add_cond_dim=257, global_cond_type="adaLN", global_cond_shared_embed=True, norm_type="rms_norm")
_AUDIO_3 |= dict(attn_kwargs={"qk_norm": "rms", "differential": False}, timestep_features_type="expo")

OTHERS = {
    "SDXL": _of("SDXL", _SDXL, LATENT, 2048, 1280, width=1024, height=768),
    "Flux fill": _of(
        *("FluxInpaint", _zoo("Flux", in_channels=96), PICTURE, 48, 32),
        **dict(concat_latent_image="16 H W", concat_mask="1 H*8 W*8"),
    ),
    "Wan i2v": _of("WAN21_I2V", _zoo("Wan i2v", out_dim=16, **_FOUR), VIDEO, **_SEEN),
    "Wan VACE": _of(
        *("WAN21_Vace", _zoo("Wan VACE", **_FOUR), VIDEO),
        **dict(vace_frames=["32 F H W"], vace_mask=["64 F H W"], vace_strength=lambda size, noise: [0.8]),
    ),
    "Wan Fun control": _of(
        "WAN21_FunControl2V", WAN | dict(in_dim=48, out_dim=16, model_type="t2v"), VIDEO, concat_latent_image="32 F H W"
    ),
    "Wan camera": _of(
        "WAN21_Camera", _I2V | {"model_type": "camera"}, VIDEO, **_SEEN, camera_conditions="24 F H*8 W*8"
    ),
    "Wan 2.2 camera": _of(
        "WAN22_Camera", _I2V | {"model_type": "camera_2.2"}, VIDEO, **_FILLED, camera_conditions="24 F H*8 W*8"
    ),
    "Wan 2.2 S2V": _of(
        "WAN22_S2V", _zoo("Wan S2V", **_FOUR), VIDEO, audio_embed="25 64 F*4", reference_latents=["16 1 H W"]
    ),
    "Wan 2.2 Animate": _of(
        *("WAN22_Animate", _zoo("Wan animate", out_dim=16), VIDEO),
        **_SEEN,
        **dict(pose_video_latent="16 F-1 H W", prepare=_without_faces),
    ),
    "Wan Animate 2": _of("WAN_Animate2", _I2V, VIDEO, **_SEEN, pose_video_latent="16 F-1 H W"),
    "Wan HuMo": _of(
        "WAN21_HuMo",
        _zoo("Wan HuMo", in_dim=36, **_FOUR),
        VIDEO,
        audio_embed="F 8 5 1280",
        reference_latents=["16 1 H W"],
        prepare=_narrow_sound,
    ),
    "Wan SCAIL": _of("WAN21_SCAIL", WAN | {"in_dim": 20}, VIDEO, **_POSED, clip_vision_output=seen("257 1280")),
    "Wan SCAIL 2": _of(
        *("WAN21_SCAIL2", WAN | {"in_dim": 20}, VIDEO),
        **_POSED,
        clip_vision_output=seen("257 1280"),
        **dict(driving_mask_28ch="F 28 H//2 W//2", ref_mask_28ch="F+1 28 H W", ref_mask_flag=True),
    ),
    "Wan FlowRVS": _of("WAN21_FlowRVS", WAN, VIDEO),
    "Wan Dancer": _of(
        "WAN22_WanDancer",
        *(
            _I2V | dict(audio_inject_layers=[0, 1], music_dim=32, music_latent_dim=32),
            (((16, 3, 8, 8),), ((16, 2, 8, 12),)),
        ),
        **_SEEN,
        **dict(audio_embed="F*4 35", fps=30),
    ),
    "Wan causal": _of("WAN21_CausalAR_T2V", WAN, VIDEO),
    "HunyuanVideo i2v": _of(
        "HunyuanVideoI2V", _zoo("HunyuanVideo i2v"), VIDEO, 48, 32, **_IMAGE_16, guiding_frame_index=0, batches=False
    ),
    "SkyReels i2v": _of("HunyuanVideoSkyreelsI2V", _zoo("HunyuanVideo", in_channels=32), VIDEO, 48, 32, **_IMAGE_16),
    "HunyuanVideo 1.5 upscaler": _of(
        *("HunyuanVideo15_SR_Distilled", _zoo("HunyuanVideo 1.5", in_channels=98, out_channels=32)),
        *((((32, 3, 6, 6),), ((32, 2, 4, 8),)), 48, 32),
        **dict(concat_latent_image="66 F H W", conditioning_byt5small="7 1472"),
    ),
    "HunyuanImage 2.1": _of(
        *("HunyuanImage21", _zoo("HunyuanImage 2.1", in_channels=64, out_channels=64, byt5=True)),
        *((((64, 12, 12),), ((64, 9, 16),)),),
        conditioning_byt5small="7 1472",
    ),
    "HunyuanImage 2.1 refiner": _of(
        "HunyuanImage21Refiner",
        _zoo("HunyuanVideo 1.5", in_channels=128, out_channels=64, axes_dim=[8, 12, 12], byt5=False),
        (((64, 2, 8, 8),), ((64, 3, 6, 10),)),
        concat_latent_image="32 F*2-1 H W",
    ),
    "Kandinsky 5": _of("Kandinsky5", _KANDINSKY, VIDEO, 48, 56),
    "Kandinsky 5 image": _of("Kandinsky5Image", _KANDINSKY | {"visual_embed_dim": 64}, EVEN, 48, 56),
    "LongCat-Image": _of(
        "LongCatImage", _zoo("Flux", vec_in_dim=None, guidance_embed=False, txt_ids_dims=[1, 2]), PICTURE
    ),
    "Ernie": _of("ErnieImage", _ERNIE, LARGE),
    "CogVideoX": _of("CogVideoX_T2V", _COG, VIDEO),
    "CogVideoX i2v": _of("CogVideoX_I2V", _COG | {"in_channels": 32}, VIDEO, **_IMAGE_16),
    "CogVideoX 1.5 i2v": _of(
        "CogVideoX_I2V", _COG | dict(in_channels=32, patch_size_t=2, ofs_embed_dim=32), VIDEO, **_IMAGE_16
    ),
    "CogVideoX inpaint": _of("CogVideoX_Inpaint", _COG | {"in_channels": 48}, VIDEO, concat_latent_image="32 F H W"),
    "Ideogram 4": _of("Ideogram4", {"in_channels": 128, "num_layers": 3}, LARGE, fixed=_IDEOGRAM, **_MASK),
    "Mage Flow": _of("MageFlow", _MAGE, LARGE),
    "Mage Flow edit": _of("MageFlow", _MAGE, LARGE, reference_latents=["128 4 7"]),
    "JoyImage": _of("JoyImage", _JOY, FRAME, fixed={"rope_dim_list": [8, 12, 12]}, reference_latents=["16 1 8 10"]),
    "Boogu": _of("Boogu", _BOOGU, PICTURE, **_MASK),
    "Boogu edit": _of("Boogu", _BOOGU, PICTURE, **_MASK, reference_latents=["16 W 10"]),
    "Lens": _of("Lens", _LENS, LARGE, 96, **_MASK),
    "PixelDiT": _of("PixelDiTT2I", _PIXEL_DIT, WIDE_PIXELS),
    "PiD": _of("PiD", _PID, WIDE_PIXELS, lq_latent="16 H//32 W//32", degrade_sigma=torch.tensor([0.3])),
    "Chroma Radiance": _of("ChromaRadiance", _zoo("Chroma Radiance"), PIXELS),
    "Z-Image pixel space": _of("ZImagePixelSpace", _Z_PIXEL, PIXELS),
    "HiDream-O1": _of(
        *("HiDreamO1", _HIDREAM_O1, (((3, 96, 96),), ((3, 64, 128),))),
        text_input_ids=torch.tensor([[*range(40, 60), 151673]]),
    ),
    "OmniGen2": _of("Omnigen2", _zoo("OmniGen2", **_FOUR), PICTURE, **_MASK),
    "OmniGen2 edit": _of("Omnigen2", _zoo("OmniGen2", **_FOUR), PICTURE, **_MASK, reference_latents=["16 W 10"]),
    "SeedVR2": _of("SeedVR2", _SEEDVR, VIDEO, condition="17 F H W"),
    "ACE-Step": _of(
        *("ACEStep", _zoo("ACE-Step"), (((8, 16, 60),), ((8, 16, 90),)), 768),
        conditioning_lyrics=torch.arange(12)[None],
    ),
    "Stable Audio": _of(
        *("StableAudio", _AUDIO_1, SHAPE, 768),
        **dict(seconds_start=0, seconds_total=47, state=lambda: _seconds("seconds_start seconds_total")),
    ),
    "Stable Audio 3": _of(
        *("StableAudio3", _AUDIO_3, (((256, 60),), ((256, 90),)), 768),
        **dict(seconds_total=47, state=lambda: _seconds("seconds_total", "expo")),
    ),
    "MiniMax Music 3": _of(
        *("MiniMaxMusic3", {}, (((128, 60),), ((128, 90),)), 32768),
        **dict(conditioning_scale=torch.ones(1, 1, 1), prepare=_narrow_music),
    ),
    "Hunyuan3D 2": _of("Hunyuan3Dv2", _zoo("Hunyuan3D 2"), SHAPE),
    "Hunyuan3D 2 mini": _of("Hunyuan3Dv2mini", _zoo("Hunyuan3D 2", depth=3), SHAPE),
    "Hunyuan3D 2.1": _of("Hunyuan3Dv2_1", _zoo("Hunyuan3D 2.1"), SHAPE),
    "TripoSplat": _of("TripoSplat", _TRIPOSPLAT, (((64, 16), (1, 5)),) * 2, reference_latents=["128 4 5"]),
    "Trellis2": _of(
        *("Trellis2", _TRELLIS, (((32, 40, 1),), ((32, 56, 1),))),
        **dict(fixed={"num_heads": 2}, embeds="9 48", trellis2_generation_mode=lambda size, noise: "shape_generation"),
        trellis2_coords=lambda size, noise: _VOXELS[: size.height].int(),
        trellis2_coord_counts=lambda size, noise: torch.tensor([size.height]),
    ),
    "Lotus": _of("LotusD", _LABELLED | {"adm_in_channels": 4}, LATENT, 1024, cfg=1.0),
    "SVD": _of("SVD_img2vid", _SVD, LATENT, 1024, **_IMAGE_4, **_FRAMES),
    "SV3D u": _of("SV3D_u", _SVD | {"adm_in_channels": 256}, LATENT, 1024, **_IMAGE_4, **_FRAMES),
    "SV3D p": _of(
        *("SV3D_p", _SVD | {"adm_in_channels": 1280}, LATENT, 1024),
        **_IMAGE_4,
        **_FRAMES,
        **dict(elevation=[10.0, 10.0], azimuth=[0.0, 30.0]),
    ),
    "Stable Zero123": _of(
        *("Stable_Zero123", _zoo("SD1.5", in_channels=8), LATENT, 772),
        **_IMAGE_4,
        tokens=(1, 1),
        state=lambda: {"cc_projection.weight": torch.eye(768, 772), "cc_projection.bias": torch.zeros(768)},
    ),
    "Mochi": _of(
        *("GenmoMochi", _zoo("Mochi"), (((12, 3, 8, 8),), ((12, 2, 6, 10),)), 64),
        **dict(tokens=(40, 40), attention_mask=torch.ones(1, 40, dtype=torch.long)),
    ),
    "Cosmos": _of("CosmosT2V", _zoo("Cosmos", **_DEEP), VIDEO),
    "Cosmos i2v": _of("CosmosI2V", _zoo("Cosmos", **_DEEP, in_channels=17), VIDEO),
    "Cosmos predict2": _of("CosmosT2IPredict2", _zoo("Cosmos predict2", **_DEEP), VIDEO),
    "Cosmos predict2 i2v": _of("CosmosI2VPredict2", _zoo("Cosmos predict2", **_DEEP, in_channels=17), VIDEO),
    "AuraFlow": _of("AuraFlow", _zoo("AuraFlow"), LATENT),
    "PixArt Alpha": _of("PixArtAlpha", _zoo("PixArt Alpha", depth=4), TALL, width=1024, height=768),
    "PixArt Sigma": _of("PixArtSigma", _zoo("PixArt Sigma", depth=4), TALL),
    "HunyuanDiT": _of("HunyuanDiT", _zoo("HunyuanDiT", size_cond=None, use_style_cond=False), LATENT, **_T5),
    "HunyuanDiT 1.0": _of("HunyuanDiT1", _zoo("HunyuanDiT"), LATENT, **_T5),
    "Stable Cascade C": _of("Stable_Cascade_C", _zoo("Stable Cascade C"), PICTURE, 1280, 1280),
    "Stable Cascade B": _of(
        *("Stable_Cascade_B", _zoo("Stable Cascade B"), (((4, 32, 32),), ((4, 28, 40),)), 1280, 1280),
        stable_cascade_prior="16 H//4 W//4",
    ),
    "SDXL refiner": _of("SDXLRefiner", _zoo("SDXL refiner", **_WIDE), LATENT, 1280, 1280, aesthetic_score=6.0),
    "SDXL InstructPix2Pix": _of("SDXL_instructpix2pix", _SDXL | {"in_channels": 8}, LATENT, 2048, 1280, **_IMAGE_4),
    "SSD-1B": _of("SSD1B", _SDXL | {"transformer_depth_middle": -1}, LATENT, 2048, 1280),
    "Segmind Vega": _of(
        "Segmind_Vega",
        _SDXL | dict(transformer_depth=[0, 1], transformer_depth_output=[0, 0, 1, 1], transformer_depth_middle=-1),
        *(LATENT, 2048, 1280),
    ),
    "KOALA 700M": _of("KOALA_700M", _SDXL | {"transformer_depth_middle": -2}, LATENT, 2048, 1280),
    "KOALA 1B": _of("KOALA_1B", _SDXL | {"transformer_depth_middle": 4}, LATENT, 2048, 1280),
    "SD1.5 InstructPix2Pix": _of("SD15_instructpix2pix", _zoo("SD1.5", in_channels=8), LATENT, 768, **_IMAGE_4),
    "SD2": _of("SD20", _SD2, LATENT, 1024),
    "SD2.1 unCLIP L": _of("SD21UnclipL", _LABELLED | {"adm_in_channels": 1536}, LATENT, 1024, **_unclip(768)),
    "SD2.1 unCLIP H": _of("SD21UnclipH", _LABELLED | {"adm_in_channels": 2048}, LATENT, 1024, **_unclip(1024)),
    "SD x4 upscaler": _of(
        *("SD_X4Upscaler", _SD2 | _FOUR_LEVELS | {"in_channels": 7}, LATENT, 1024),
        **dict(concat_image="3 H W", noise_augmentation=0.1),
    ),
}
