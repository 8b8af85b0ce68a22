"""The trained test network: its layout, its prompts, its file. Import it after `inprocess.boot`.

`train_toy` makes it; `data/toy_unet.md` says what it is.
"""

from __future__ import annotations

from pathlib import Path

import comfy.model_management
import comfy.model_patcher
import comfy.sample
import comfy.supported_models
import safetensors.torch
import torch

from . import ROOT, Problem, toy_data
from .tiny_models import UNET

FILE = ROOT / "bench" / "data" / "toy_unet.safetensors"
SIZES = ((16, 16), (12, 20), (20, 12), (15, 17), (17, 15), (15, 20), (20, 15))
"""Height and width, in latent pixels, that it was trained at."""
TOKENS = 4
CONTEXT_DIM = 64
CFG = 3.0
NULL_CLASS = len(toy_data.CLASSES)
"""The class of no class: the negative prompt."""
LAYOUT = {
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


def new_model(dtype: torch.dtype = torch.float32):
    """Core's BaseModel of SD1.5 around a UNet of the layout, its weights not yet set."""
    config = comfy.supported_models.SD15({**LAYOUT, "dtype": dtype})
    return config.get_model({}, device=torch.device("cpu"))


def class_tokens() -> torch.Tensor:
    """What stands for a text encoder: [classes + 1, TOKENS, CONTEXT_DIM], fixed random features; the last is null."""
    return torch.randn(NULL_CLASS + 1, TOKENS, CONTEXT_DIM, generator=torch.Generator().manual_seed(1))


def load(file: Path = FILE, dtype: torch.dtype = torch.float32):
    """A ModelPatcher of the trained network.

    Raises:
        Problem: the file is not there.
    """
    if not file.is_file():
        raise Problem(f"{file} is missing: make it by `python -m bench.train_toy` or check the file out.")
    model = new_model(dtype)
    weights = safetensors.torch.load_file(file)
    model.diffusion_model.load_state_dict({name: value.to(dtype) for name, value in weights.items()})
    return comfy.model_patcher.ModelPatcher(
        model.eval(),
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )


def conditioning(classes: torch.Tensor) -> list:
    """Core's CONDITIONING for a batch of pictures of these classes [B]."""
    return [[class_tokens()[classes], {}]]


def sample(model, classes: torch.Tensor, height: int, width: int, steps: int, sampler: str, seed: int) -> torch.Tensor:
    """Latents [B, 4, height, width], one of each of the classes [B], by core's sampler from noise."""
    empty = torch.zeros(len(classes), 4, height, width)
    prompts = conditioning(classes), conditioning(torch.tensor([NULL_CLASS]))
    noise = comfy.sample.prepare_noise(empty, seed)
    latent = comfy.sample.sample(
        model, noise, steps, CFG, sampler, "normal", *prompts, empty, disable_pbar=True, seed=seed
    )
    return model.model.process_latent_in(latent)
