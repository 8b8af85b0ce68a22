"""SD1.5, SDXL and Flux at their full depth and a fraction of their width. Import it after `inprocess.boot`."""

from dataclasses import replace

from kit.tiny_models import FLUX, UNET, Family

from . import full_size

_NARROW = {"model_channels": UNET["model_channels"], "context_dim": 64}

SD15 = replace(
    full_size.SD15, config={**full_size.SD15.config, **_NARROW, "num_heads": UNET["num_heads"]}, context_dim=64
)
"""16 transformer blocks and 22 ResBlocks."""

SDXL = replace(full_size.SDXL, config={**full_size.SDXL.config, **_NARROW, "num_head_channels": 16}, context_dim=64)
"""70 transformer blocks and 17 ResBlocks."""

FLUX_DEV = Family(
    "Flux",
    "Flux",
    {**FLUX, "depth": 19, "depth_single_blocks": 38, "guidance_embed": True},
    context_dim=64,
    pooled_dim=32,
)
"""19 double and 38 single blocks."""

ALL = {family.name: family for family in (SD15, SDXL, FLUX_DEV)}

UNETS = (SD15.name, SDXL.name)
