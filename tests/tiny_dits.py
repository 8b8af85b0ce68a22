"""Tiny instances of ComfyUI's diffusion transformers as its samplers take them: four to seven blocks, 64 to 288 wide.

Imported by tests that have put a ComfyUI tree on the path; `tiny_zoo` has more classes, without a sampler.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from kit.tiny_models import FLUX_FAMILY, QWEN_IMAGE, SD3, WAN, Family, sample
from tiny_zoo import CHROMA, FLUX, HUNYUAN_VIDEO, LTXV, LUMINA, ZOO


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
        return sample(model, torch.zeros(shape), steps=steps, **conds)


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


def lengthened(name: str) -> torch.nn.Module:
    """A model of the zoo with three blocks at least where it has its blocks in one list."""
    model = ZOO[name].build()
    for path in ("blocks", "layers", "transformer_blocks", "transformer.layers"):
        parent, _, list_name = path.rpartition(".")
        holder = getattr(model, parent, None) if parent else model
        blocks = getattr(holder, list_name, None)
        if isinstance(blocks, torch.nn.ModuleList) and len(blocks) == 2:
            copies = [copy.deepcopy(blocks[1]) for _ in range(5)]
            setattr(holder, list_name, torch.nn.ModuleList([blocks[0], *copies, blocks[1]]))
        elif isinstance(blocks, torch.nn.ModuleDict) and len(blocks) == 2:
            for index in range(2, 7):
                blocks[f"block{index}"] = copy.deepcopy(blocks["block1"])
    return model
