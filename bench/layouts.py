"""SD1.5, SDXL and Flux at their full depth and a fraction of their width. Import it after `inprocess.boot`."""

from .tiny_models import FLUX, UNET, Family

SD15 = Family(
    "SD1.5",
    "SD15",
    {
        **UNET,
        "num_res_blocks": [2, 2, 2, 2],
        "channel_mult": [1, 2, 4, 4],
        "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
        "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "transformer_depth_middle": 1,
        "context_dim": 64,
    },
    context_dim=64,
)
"""16 transformer blocks and 22 ResBlocks."""

SDXL = Family(
    "SDXL",
    "SDXL",
    {
        **UNET,
        "num_res_blocks": [2, 2, 2],
        "channel_mult": [1, 2, 4],
        "transformer_depth": [0, 0, 2, 2, 10, 10],
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
        "transformer_depth_middle": 10,
        "num_heads": -1,
        "num_head_channels": 16,
        "use_linear_in_transformer": True,
        "context_dim": 64,
        "num_classes": "sequential",
        "adm_in_channels": 2816,
    },
    context_dim=64,
    pooled_dim=1280,
)
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
