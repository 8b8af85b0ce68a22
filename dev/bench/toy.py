"""The trained test networks: their layouts, their prompts, their files. Import it after `inprocess.boot`.

`data/toy_unet.md` and the pages beside it say what they are and how they were trained; the script that did and the
pictures that it drew are in the repository's history, `bench/train_toy.py` and `dev/bench/toy_data.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import comfy.model_management
import comfy.model_patcher
import safetensors.torch
import torch
from comfy.model_base import ModelType, model_sampling
from comfy.model_sampling import CONST
from kit import tiny_models
from kit.tiny_models import FLUX, SD3, UNET, Family

from dev import ROOT, Problem

TOKENS = 4
CONTEXT_DIM = 64
CFG = 3.0
CLASSES = 8
"""Kinds of figure, or letters, that a network makes: numbers from 0 on."""
NULL_CLASS = CLASSES
"""The class of no class: the negative prompt."""
CHANNELS = 4
VIEW = ((0.17, 0.17, 0.17), (0.13, -0.11, 0.02), (0.07, 0.05, -0.16), (0.06, 0.06, 0.06))
"""Latent channel (light, red-green, yellow-blue, relief) → red, green, blue."""


@dataclass(frozen=True)
class Network:
    """family: how core builds it. predicts_v: whether it predicts v, as SD 2's, where core builds one that predicts the
    noise."""

    family: Family
    predicts_v: bool = False

    def build(self, dtype: torch.dtype):
        """Core's BaseModel, its weights as the memory was."""
        model = self.family.build(dtype)
        if self.predicts_v:
            model.model_type = ModelType.V_PREDICTION
            model.model_sampling = model_sampling(model.model_config, model.model_type)
        return model

    @property
    def file(self) -> Path:
        return ROOT / "dev" / "bench" / "data" / f"toy_{self.family.name}.safetensors"


_UNET_LAYOUT = {
    **UNET,
    "model_channels": 32,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 2, 3],
    "transformer_depth": [0, 0, 0, 1, 0, 1],
    "transformer_depth_output": [0, 0, 0, 0, 0, 1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": CONTEXT_DIM,
}
"""SD1.5's class on three levels, with attention on the lower two."""

_DIT_LAYOUT = {
    **FLUX,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "vec_in_dim": CONTEXT_DIM,
    "context_in_dim": CONTEXT_DIM,
    "hidden_size": 112,
    "depth": 2,
    "depth_single_blocks": 8,
    "axes_dim": [8, 10, 10],
}
"""Flux's class, ten blocks: a token is 2 by 2 latent pixels."""

_MMDIT_LAYOUT = {
    **SD3,
    "in_channels": CHANNELS,
    "num_blocks": 5,
    "num_patches": 16 * 16,
    "pos_embed_max_size": 16,
    "adm_in_channels": CONTEXT_DIM,
    "context_embedder_config": {
        "target": "torch.nn.Linear",
        "params": {"in_features": CONTEXT_DIM, "out_features": 128},
    },
}
"""SD3's class, five joint blocks."""

_VPRED_LAYOUT = {
    **UNET,
    "model_channels": 32,
    "num_res_blocks": [1, 1, 2],
    "channel_mult": [1, 2, 3],
    "transformer_depth": [1, 1, 1, 1],
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1],
    "num_heads": -1,
    "num_head_channels": 16,
    "use_linear_in_transformer": True,
    "context_dim": CONTEXT_DIM,
}
"""SD 2's kind of UNet, with cross-attention on every level."""

NETWORKS = {
    "unet": Network(Family("unet", "SD15", _UNET_LAYOUT, CONTEXT_DIM)),
    "dit": Network(Family("dit", "FluxSchnell", _DIT_LAYOUT, CONTEXT_DIM, pooled_dim=CONTEXT_DIM)),
    "mmdit": Network(Family("mmdit", "SD3", _MMDIT_LAYOUT, CONTEXT_DIM, pooled_dim=CONTEXT_DIM)),
    "vpred": Network(Family("vpred", "SD15", _VPRED_LAYOUT, CONTEXT_DIM), predicts_v=True),
}


def class_tokens() -> torch.Tensor:
    """What stands for a text encoder: [classes + 1, TOKENS, CONTEXT_DIM], fixed random features; the last is null."""
    return torch.randn(NULL_CLASS + 1, TOKENS, CONTEXT_DIM, generator=torch.Generator().manual_seed(1))


def pooled(tokens: torch.Tensor) -> torch.Tensor:
    """The second text encoder's summary [B, CONTEXT_DIM] of `tokens` [B, TOKENS, CONTEXT_DIM]."""
    return tokens.mean(1) * TOKENS**0.5


def load(name: str = "unet", dtype: torch.dtype = torch.float32):
    """A ModelPatcher of the trained network of that name in NETWORKS.

    Raises:
        Problem: the file is not there.
    """
    network = NETWORKS[name]
    file = network.file
    if not file.is_file():
        raise Problem(f"{file} is missing: check it out again.")
    model = network.build(dtype)
    weights = model.model_config.process_unet_state_dict(safetensors.torch.load_file(file))  # newer cores' names
    model.diffusion_model.load_state_dict({name: value.to(dtype) for name, value in weights.items()})
    return comfy.model_patcher.ModelPatcher(
        model,
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )


def conditioning(classes: torch.Tensor) -> list:
    """Core's CONDITIONING for a batch of pictures of these classes [B]."""
    tokens = class_tokens()[classes]
    return [[tokens, {"pooled_output": pooled(tokens)}]]


def sample(
    model,
    classes: torch.Tensor,
    height: int,
    width: int,
    steps: int,
    sampler: str,
    seed: int,
    cfg: float = CFG,
    scheduler: str | None = None,
) -> torch.Tensor:
    """Latents [B, 4, height, width], one of each of the classes [B], by core's sampler from noise. scheduler: another
    one than users of such a network choose."""
    empty = torch.zeros(len(classes), CHANNELS, height, width)
    prompts = conditioning(classes), conditioning(torch.tensor([NULL_CLASS]))
    scheduler = scheduler or ("simple" if isinstance(model.model.model_sampling, CONST) else "normal")
    latent = tiny_models.sample_latent(model, empty, *prompts, steps, cfg, sampler, scheduler, seed)
    return model.model.process_latent_in(latent)


def view(latent: torch.Tensor) -> torch.Tensor:
    """Red, green and blue in 0..1, [B, 3, H, W], of latents [B, 4, H, W]: a fixed linear map, as previews are."""
    colours = torch.einsum("bchw,cr->brhw", latent, torch.tensor(VIEW, dtype=latent.dtype, device=latent.device))
    return (colours + 0.5).clamp(0, 1)
