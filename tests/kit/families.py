"""Tiny instances of ComfyUI's diffusion transformers as its samplers take them: four to seven blocks, 64 to 288 wide.

Imported by tests that have put a ComfyUI tree on the path; `kit.zoo` has more classes, without a sampler.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.supported_models
import torch

from kit.tiny_models import FLUX_FAMILY, QWEN_IMAGE, SD3, UNET_FAMILY, WAN, Family, randomize, sample_latent
from kit.zoo import CHROMA, COSMOS, FLUX, FLUX2, HIDREAM, HUNYUAN_VIDEO, LTXV, LUMINA, Noise


@dataclass(frozen=True)
class TinyDiT:
    """blocks: of the model. latents: two shapes to sample at, [1, C, (frames,) H, W]."""

    family: Family
    blocks: int
    latents: tuple[tuple[int, ...], tuple[int, ...]]

    def load(self, seed: int = 0):
        """A ModelPatcher."""
        return self.family.load(torch.float32, seed)

    def conditioning(self, seed: int, tokens: int = 24) -> list:
        features = self.family.conditioning(tokens, seed)
        if self.family.model_class == "LTXV":  # it cannot do without
            features[0][1]["attention_mask"] = torch.ones(1, tokens, dtype=torch.long)
        return features

    def sample(self, model: Any, size: int = 0, batch: int = 1, steps: int = 4, **conds: list) -> torch.Tensor:
        """The finished latent; `size` says which of `latents`."""
        shape = (batch, *self.latents[size][1:])
        conds = {"positive": self.conditioning(1), "negative": self.conditioning(2)} | conds
        return sample_latent(model, torch.zeros(shape), steps=steps, **conds)


def _tiny(model_class: str, config: dict, blocks: int, *latents: tuple[int, ...], context: int = 48, pooled=None):
    return TinyDiT(Family(model_class, model_class, config, context, pooled), blocks, latents)


IMAGE = (1, 16, 12, 12), (1, 16, 9, 16)
FRAMES = (1, 16, 3, 8, 8), (1, 16, 2, 6, 10)

_deep = dict(depth=3, depth_single_blocks=4)
_z_image = dict(
    dim=288, n_layers=4, n_refiner_layers=1, axes_dims=[32, 32, 32], z_image_modulation=True, pad_tokens_multiple=32
)

DITS = {
    "Flux": _tiny("Flux", {**FLUX, **_deep}, 7, *IMAGE, pooled=32),
    "Chroma": _tiny("Chroma", {**CHROMA, **_deep}, 7, *IMAGE, pooled=32),
    "SD3": _tiny("SD3", {**SD3, "num_blocks": 6}, 6, *IMAGE, pooled=32),
    "Qwen-Image": _tiny("QwenImage", {**QWEN_IMAGE, "num_layers": 6}, 6, (1, 16, 1, 12, 12), (1, 16, 1, 9, 16)),
    "Lumina2": _tiny("Lumina2", {**LUMINA, "n_layers": 6, "n_kv_heads": 1}, 6, *IMAGE),
    "Z-Image": _tiny("ZImage", {**LUMINA, **_z_image}, 4, *IMAGE),
    "Wan": _tiny("WAN21_T2V", {**WAN, "model_type": "t2v", "num_layers": 6}, 6, *FRAMES),
    "HunyuanVideo": _tiny("HunyuanVideo", {**HUNYUAN_VIDEO, **_deep}, 7, *FRAMES, pooled=32),
    "LTXV": _tiny("LTXV", {**LTXV, "num_layers": 6}, 6, *FRAMES),
}

CONTROLLED = TinyDiT(
    Family("Flux", "FluxSchnell", {**FLUX_FAMILY.config, "depth": 3, "depth_single_blocks": 4}, 64, 32), 7, IMAGE
)
"""The Flux that bench's ControlNet is for."""


Shapes = tuple[tuple[int, ...], ...]
"""Of one latent, without its batch: more than one where video and sound are sampled together."""


@dataclass(frozen=True)
class TinyFamily:
    """One way to run a model.

    family: how the model is made. sizes: latents to sample at, at least two. extras: what the conditioning holds beside
        the text, from (latent shapes, noise). mask: a denoise mask [F, H, W] or so, where the model takes it as time.
    cfg: 1 for the distilled ones, which are run without a negative prompt. needs: the module of core without which its
        class lacks something. prepare: changes the model that was built, before its weights are filled in.
    batches: of more than one image, where the model can. rows: of an image in the batch, as the frames of SVD.
    """

    family: Family
    sizes: tuple[Shapes, ...]
    extras: Callable[[Shapes, Noise], dict[str, Any]] = lambda shapes, noise: {}
    mask: Callable[[Shapes], torch.Tensor] | None = None
    cfg: float = 5.0
    tokens: tuple[int, int] = (24, 31)
    needs: str = ""
    prepare: Callable[[torch.nn.Module], None] | None = None
    batches: bool = True
    rows: int = 1

    @property
    def is_known(self) -> bool:
        """Whether this core has it."""
        known = hasattr(comfy.supported_models, self.family.model_class)
        return known and (not self.needs or is_there(self.needs))

    def load(self, seed: int = 0, stored: torch.dtype | None = None) -> Any:
        """A ModelPatcher, as from a checkpoint. stored: of the matrices, which core then casts in each call."""
        base = self.family.build(torch.float32, stored=stored)
        if self.prepare is not None:
            self.prepare(base.diffusion_model)
        for weight in base.diffusion_model.parameters():
            if stored is not None and weight.ndim < 2:  # norms and biases, as in files for fp8
                weight.data = weight.data.float()
        randomize(base.diffusion_model, seed)
        device = comfy.model_management.get_torch_device()
        return comfy.model_patcher.ModelPatcher(base, load_device=device, offload_device=torch.device("cpu"))

    def sample(
        self,
        model: Any,
        size: int = 0,
        batch: int = 1,
        tokens: int = 0,
        steps: int = 2,
        sampler: str = "euler",
        **others: Any,
    ) -> list[torch.Tensor]:
        """The finished latents; `size` and `tokens` say which of `sizes` and `tokens`. others: for the conditioning."""
        shapes = self.sizes[size]
        latent, noise = nested([torch.zeros(batch * self.rows, *shape) for shape in shapes]), Noise(size)
        conds = [self.family.conditioning(self.tokens[tokens], seed) for seed in (1, 2)]
        for features in conds:
            features[0][1].update(self.extras(shapes, noise) | others)
        with torch.inference_mode():  # as core runs nodes
            mask = None if self.mask is None else self.mask(shapes)
            finished = sample_latent(model, latent, *conds, steps, self.cfg, sampler, "simple", noise_mask=mask)
        return finished.unbind() if len(shapes) > 1 else [finished]


def is_there(module: str) -> bool:
    """Whether core has a module, and the packages that it is in."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def nested(parts: list[torch.Tensor]) -> Any:
    """Several latents that are sampled together, as core takes them."""
    if len(parts) == 1:
        return parts[0]
    from comfy.nested_tensor import NestedTensor  # later than 0.3.75

    return NestedTensor(parts)


def first_frame_given(shapes: Shapes) -> torch.Tensor:
    """The mask of an image-to-video run: the video's first frame is there already, and sound is not."""
    masks = []
    for number, shape in enumerate(shapes):
        mask = torch.ones(1, 1, *shape[1:])
        if number == 0:
            mask[:, :, 0] = 0
        masks.append(mask)
    return nested(masks)


def references(channels: int, *, video: bool = True, method: str | None = None):
    """One picture to edit, of another size than the latent."""

    def extras(shapes: Shapes, noise: Noise) -> dict[str, Any]:
        sides = shapes[0][-1] - 4, shapes[0][-2] + 2
        picture = noise(1, channels, 1, *sides) if video else noise(1, channels, *sides)
        return {"reference_latents": [picture]} | ({"reference_latents_method": method} if method else {})

    return extras


def _family(model_class: str, config: dict, context: int = 48, pooled: int | None = None) -> Family:
    return Family(model_class, model_class, config, context, pooled)


PICTURE = ((16, 12, 12),), ((16, 9, 16),)
PICTURE_AS_FRAME = ((16, 1, 12, 12),), ((16, 1, 9, 16),)
LARGE_PATCHES = ((128, 6, 6),), ((128, 5, 8),)
VIDEO = ((16, 3, 8, 8),), ((16, 2, 6, 10),)

_FLUX2 = FLUX2 | {"depth_single_blocks": 4}
_QWEN = DITS["Qwen-Image"].family
_WAN = DITS["Wan"].family
_WAN_5B = _family("WAN22_T2V", {**_WAN.config, "in_dim": 48, "out_dim": 48})
_LTXV = DITS["LTXV"].family
_LTX2 = _family(
    "LTXAV",
    LTXV
    | dict(num_layers=4, audio_in_channels=128, audio_cross_attention_dim=64, audio_attention_head_dim=16)
    | dict(audio_num_attention_heads=4, connector_attention_head_dim=16, connector_num_attention_heads=3)
    | dict(connector_num_layers=1),
)
_KREA2 = _family(
    "Krea2",
    dict(
        **dict(features=64, tdim=32, txtdim=32, heads=2, kvheads=1, multiplier=2, layers=4),
        **dict(txtlayers=3, txtheads=2, txtkvheads=2),
    ),
    context=96,
)
_HUNYUAN_15 = {
    **DITS["HunyuanVideo"].family.config,
    **dict(patch_size=[1, 1, 1], byt5=True, use_cond_type_embedding=True, vision_in_dim=40, vec_in_dim=None),
    **dict(in_channels=65, out_channels=32, guidance_embed=False, depth=4, depth_single_blocks=0),
}
_ANIMA = COSMOS | dict(num_blocks=4, extra_per_block_abs_pos_emb=False)
_ANIMA |= dict(rope_enable_fps_modulation=False, concat_padding_mask=True)
_HIDREAM = HIDREAM | dict(num_single_layers=3, llama_layers=[0, 1, 1, 1, 1])
_ACE_STEP_15 = dict(
    **dict(in_channels=192, hidden_size=64, text_hidden_dim=48, num_dit_layers=6, num_lyric_layers=1),
    **dict(num_timbre_layers=1, num_tokenizer_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, fsq_dim=64),
    **dict(intermediate_size=192, encoder_hidden_size=64, encoder_intermediate_size=96, encoder_num_heads=4),
)
_MINIMAX_H3 = dict(
    **dict(hidden_size=64, num_layers=4, token_refiner_num_layers=2, num_attention_heads=2, attention_head_dim=32),
    **dict(ffn_hidden_size=96, text_dim=48, timestep_input_dim=32, time_embed_hidden_size=64, time_embed_dim=32),
    rope_inv_freq_len=4,
)


def _narrow_adapter(model: torch.nn.Module) -> None:
    """Anima's text adapter, whose widths core fixes, as narrow as the rest."""
    from comfy.ldm.anima.model import LLMAdapter

    widths = dict(source_dim=48, target_dim=48, model_dim=48, num_layers=2, num_heads=2)
    model.llm_adapter = LLMAdapter(
        **widths, device="cpu", dtype=torch.float32, operations=comfy.ops.disable_weight_init
    )


def _rotary(model: torch.nn.Module) -> None:
    model.rope.inv_freq.copy_(10000.0 ** -torch.linspace(0, 1, len(model.rope.inv_freq)))


@dataclass
class Vision:
    """What a CLIP vision model gives."""

    last_hidden_state: torch.Tensor

    @property
    def penultimate_hidden_states(self) -> torch.Tensor:
        return self.last_hidden_state

    @property
    def image_embeds(self) -> torch.Tensor:
        return self.last_hidden_state


FAMILIES = {
    "SD1.5": TinyFamily(UNET_FAMILY, (((4, 16, 16),), ((4, 15, 24),))),
    "Flux": TinyFamily(CONTROLLED.family, PICTURE),
    "Flux Kontext": TinyFamily(DITS["Flux"].family, PICTURE, references(16, video=False)),
    "Flux.2": TinyFamily(_family("Flux2", _FLUX2), LARGE_PATCHES),
    "Flux.2 Klein": TinyFamily(
        _family("Flux2", _FLUX2 | {"guidance_embed": False}), LARGE_PATCHES, references(128, video=False), cfg=1.0
    ),
    "Chroma": TinyFamily(DITS["Chroma"].family, PICTURE),
    "SD3": TinyFamily(DITS["SD3"].family, PICTURE),
    "Lumina2": TinyFamily(
        DITS["Lumina2"].family,
        PICTURE,
        lambda shapes, noise: {"attention_mask": (torch.arange(24) < 20).long()[None]},
        tokens=(24, 24),
    ),
    "Z-Image": TinyFamily(DITS["Z-Image"].family, PICTURE),
    "Z-Image Turbo": TinyFamily(DITS["Z-Image"].family, PICTURE, cfg=1.0),
    "Qwen-Image": TinyFamily(_QWEN, PICTURE_AS_FRAME),
    "Qwen-Image-Edit": TinyFamily(_QWEN, PICTURE_AS_FRAME, references(16)),
    "Qwen-Image-Edit 2511": TinyFamily(
        _QWEN, PICTURE_AS_FRAME, references(16, method="index_timestep_zero"), needs="comfy.ldm.krea2.model"
    ),
    "Krea 2": TinyFamily(_KREA2, PICTURE_AS_FRAME, needs="comfy.ldm.krea2.model"),
    "Krea 2 edit": TinyFamily(
        _KREA2, PICTURE_AS_FRAME, references(16, method="index_timestep_zero"), needs="comfy.ldm.krea2.model"
    ),
    "Anima": TinyFamily(
        _family("Anima", _ANIMA),
        PICTURE_AS_FRAME,
        lambda shapes, noise: {"t5xxl_ids": torch.arange(9), "t5xxl_weights": torch.ones(9)},
        needs="comfy.ldm.anima.model",
        prepare=_narrow_adapter,
    ),
    "HiDream": TinyFamily(
        _family("HiDream", _HIDREAM, pooled=32),
        PICTURE,
        lambda shapes, noise: {"conditioning_llama3": noise(1, 2, 27, 56)},
    ),
    "Wan": TinyFamily(_WAN, VIDEO),
    "Wan 2.2 14B i2v": TinyFamily(
        _family("WAN21_T2V", {**_WAN.config, "in_dim": 36, "out_dim": 16}),
        VIDEO,
        lambda shapes, noise: {"concat_latent_image": noise(1, *shapes[0]), "concat_mask": noise(1, 1, *shapes[0][1:])},
    ),
    "Wan 2.2 5B": TinyFamily(_WAN_5B, (((48, 3, 8, 8),), ((48, 2, 6, 10),))),
    "Wan 2.2 5B ti2v": TinyFamily(_WAN_5B, (((48, 3, 8, 8),), ((48, 2, 6, 10),)), mask=first_frame_given),
    "HunyuanVideo": TinyFamily(DITS["HunyuanVideo"].family, VIDEO),
    "HunyuanVideo 1.5": TinyFamily(
        _family("HunyuanVideo15", _HUNYUAN_15, pooled=32),
        (((32, 3, 6, 6),), ((32, 2, 4, 8),)),
        lambda shapes, noise: {
            "clip_vision_output": Vision(noise(1, 9, 40)),
            "conditioning_byt5small": noise(1, 7, 1472),
        },
    ),
    "LTXV": TinyFamily(
        _LTXV, VIDEO, lambda shapes, noise: {"attention_mask": torch.ones(1, 24, dtype=torch.long)}, tokens=(24, 24)
    ),
    "LTXV i2v": TinyFamily(
        _LTXV,
        VIDEO,
        lambda shapes, noise: {"attention_mask": torch.ones(1, 24, dtype=torch.long)},
        tokens=(24, 24),
        mask=first_frame_given,
    ),
    "LTX 2": TinyFamily(
        _LTX2, (((16, 3, 8, 8), (8, 7, 16)), ((16, 2, 6, 10), (8, 5, 16))), needs="comfy.ldm.lightricks.av_model"
    ),
    "LTX 2 i2v": TinyFamily(
        _LTX2,
        (((16, 3, 8, 8), (8, 7, 16)), ((16, 2, 6, 10), (8, 5, 16))),
        mask=first_frame_given,
        needs="comfy.ldm.lightricks.av_model",
    ),
    "MiniMax H3": TinyFamily(
        _family("MiniMaxH3", _MINIMAX_H3),
        (((24, 3, 8, 8), (32, 2, 7)), ((24, 2, 6, 10), (32, 2, 5))),
        needs="comfy.ldm.minimax.model",
        prepare=_rotary,
        batches=False,
    ),
    "ACE-Step 1.5": TinyFamily(
        _family("ACEStep15", _ACE_STEP_15),
        (((64, 60),), ((64, 90),)),
        lambda shapes, noise: {"conditioning_lyrics": noise(1, 11, 48)},
        needs="comfy.ldm.ace.ace_step15",
    ),
}
