"""Many latent sizes in a row through one accelerated model: one compilation, a bounded cache, flat memory."""

import gc
import itertools

import psutil
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from kit import tiny_models
from kit.compiled import graphs
from torch._dynamo.utils import counters

SIZES = list(itertools.product(range(40, 200, 8), range(40, 120, 8)))[::5]
"""Forty in pixels: latents of 5 to 24 by 5 to 14, so that the deeper of the two levels is at least 3 by 3."""


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def test_many_sizes_compile_once_and_keep_memory_flat(sample):
    cache = GraphCache()
    model = tiny_models.small_unet()
    fast_model = accelerate(model, CompileSettings(backend="eager"), cache)
    after_20 = 0
    # Without oneDNN, which keeps what it prepared for 1024 sizes: with it the plain model, too, grows by 6 to 8 %.
    with torch.inference_mode(), torch.backends.mkldnn.flags(enabled=False):
        sample(fast_model, 128, 128, steps=1)
        compiled = counters["stats"]["unique_graphs"]
        assert compiled > 0
        for number, (width, height) in enumerate(SIZES, start=1):
            sample(fast_model, width, height, steps=1)
            if number == 20:
                after_20 = resident_bytes()
    grown = resident_bytes() / after_20 - 1
    statistics = cache.statistics()
    assert counters["stats"]["unique_graphs"] == compiled
    assert fallbacks.rows() == []
    assert statistics["entries"] <= statistics["max_entries"]
    assert statistics["bytes"] <= statistics["max_bytes"]
    assert statistics["graphs"] == compiled
    assert grown <= 0.03, f"resident memory grew by {grown:.1%} from the 20th to the last size"


def test_sizes_of_one_row_or_column_after_an_ordinary_one_compile_nothing(sample):
    model, cache = tiny_models.small_unet(model_channels=64), GraphCache()
    fast_model = accelerate(model, CompileSettings(backend="eager"), cache)
    sample(fast_model, 128, 128, steps=1)
    compiled = graphs()
    for height, width, tokens in ((1, 40, 77), (2, 2, 1), (3, 5, 77), (14, 4, 1), (1, 1, 77), (1, 1, 1)):
        run = dict(latent=torch.zeros(1, 4, height, width), steps=1, tokens=tokens)
        assert torch.equal(sample(fast_model, **run), sample(model, **run))
    assert graphs() == compiled and fallbacks.rows() == []


def test_image_whose_deepest_level_is_one_pixel_needs_few_graphs_of_its_own(sample):
    """A pixel looks as if its level had one row or column whatever the size."""
    levels = {"channel_mult": [1] * 4, "num_res_blocks": [1] * 4, "transformer_depth": [0] * 4}
    model = tiny_models.unet(**levels, transformer_depth_output=[0] * 8)
    fast_model = accelerate(model, CompileSettings(backend="eager"), cache := GraphCache())
    found = []
    for width, height, batch in ((64, 64, 1), (128, 128, 1), (64, 160, 2)):
        image = sample(fast_model, width, height, batch, steps=1)
        torch.testing.assert_close(image, sample(model, width, height, batch, steps=1))
        statistics = cache.statistics()
        found.append((statistics["entries"], statistics["graphs"]))
    assert found == [(3, 4), (3, 5), (3, 5)]
    assert fallbacks.rows() == []
