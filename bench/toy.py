"""The trained test networks: their layouts, their prompts, their files. Import it after `inprocess.boot`.

`train_toy` makes them; `data/toy_unet.md` and `data/toy_dit.md` say what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import comfy.model_management
import comfy.model_patcher
import safetensors.torch
import torch
from comfy.model_sampling import CONST
from kit import tiny_models
from kit.tiny_models import FLUX, UNET, Family

from tools import ROOT, Problem

from . import toy_data

SIZES = ((16, 16), (12, 20), (20, 12), (15, 17), (17, 15), (15, 20), (20, 15))
"""Height and width, in latent pixels, that they were trained at."""
TOKENS = 4
CONTEXT_DIM = 64
CFG = 3.0
NULL_CLASS = len(toy_data.CLASSES)
"""The class of no class: the negative prompt."""
CHANNELS = len(toy_data.CHANNELS)


@dataclass(frozen=True)
class Network:
    """family: how core builds it. begins_as_zero: endings of the modules that training starts from zero, so that every
    block begins as the identity."""

    family: Family
    begins_as_zero: tuple[str, ...]

    @property
    def file(self) -> Path:
        return ROOT / "bench" / "data" / f"toy_{self.family.name}.safetensors"


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

NETWORKS = {
    "unet": Network(
        Family("unet", "SD15", _UNET_LAYOUT, CONTEXT_DIM),
        begins_as_zero=(".out_layers.3", ".proj_out", "out.2"),
    ),
    "dit": Network(
        Family("dit", "FluxSchnell", _DIT_LAYOUT, CONTEXT_DIM, pooled_dim=CONTEXT_DIM),
        # As in DiT (Peebles and Xie, arXiv 2212.09748), "adaLN-Zero".
        begins_as_zero=("_mod.lin", ".modulation.lin", ".adaLN_modulation.1", "final_layer.linear"),
    ),
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
        raise Problem(f"{file} is missing: make it by `python -m bench.train_toy --network {name}` or check it out.")
    model = network.family.build(dtype)
    weights = model.model_config.process_unet_state_dict(safetensors.torch.load_file(file))  # newer cores' names
    model.diffusion_model.load_state_dict({name: value.to(dtype) for name, value in weights.items()})
    return comfy.model_patcher.ModelPatcher(
        model,
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )


def is_flow(model_sampling) -> bool:
    """Whether it is rectified flow: noise levels are shares of noise, and the velocity is predicted."""
    return isinstance(model_sampling, CONST)


def conditioning(classes: torch.Tensor) -> list:
    """Core's CONDITIONING for a batch of pictures of these classes [B]."""
    tokens = class_tokens()[classes]
    return [[tokens, {"pooled_output": pooled(tokens)}]]


def sample(model, classes: torch.Tensor, height: int, width: int, steps: int, sampler: str, seed: int) -> torch.Tensor:
    """Latents [B, 4, height, width], one of each of the classes [B], by core's sampler from noise."""
    empty = torch.zeros(len(classes), CHANNELS, height, width)
    prompts = conditioning(classes), conditioning(torch.tensor([NULL_CLASS]))
    scheduler = "simple" if is_flow(model.model.model_sampling) else "normal"
    latent = tiny_models.sample_latent(model, empty, *prompts, steps, CFG, sampler, scheduler, seed)
    return model.model.process_latent_in(latent)
