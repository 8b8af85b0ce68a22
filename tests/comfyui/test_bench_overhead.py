"""`dev.py bench overhead` measures every part of a block's call that it tells of."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from kit import tiny_models

from bench import overhead_blocks


@pytest.mark.thorough  # traces two kinds of blocks for a bench alone
def test_every_part_is_measured(monkeypatch):
    monkeypatch.setattr(overhead_blocks, "REPETITIONS", 3)
    family = tiny_models.FLUX_FAMILY
    latent, prompts = torch.zeros(1, 16, 8, 8), (family.conditioning(7, seed=1), family.conditioning(7, seed=2))

    def image(model):
        return tiny_models.sample_latent(model, latent, *prompts, steps=1)

    with torch.inference_mode():
        parts, each = overhead_blocks.of_blocks(family.load(torch.float32), image, GraphCache())
    assert {"block", "  stand-in", "  arguments", "    options", "  weights", "  check"} < {*parts} and len(each) > 1
