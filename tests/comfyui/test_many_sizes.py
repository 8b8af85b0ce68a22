"""Two hundred latent sizes in a row through one accelerated model: one compilation, a bounded cache, flat memory."""

import gc
import itertools

import psutil
import torch
from comfy_accel.accel.block_runner import CompileSettings, fallbacks
from comfy_accel.accel.graph_cache import GraphCache
from comfy_accel.accel.hosts.comfyui.accelerate import accelerate
from torch._dynamo.utils import counters

SIZES = list(itertools.product(range(40, 200, 8), range(40, 120, 8)))
"""Pixels: latents of 5 to 24 by 5 to 14, so that the deepest of the three levels is at least 2 by 2."""


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def test_two_hundred_sizes_compile_once_and_keep_memory_flat(tiny_unet, sample):
    cache = GraphCache()
    fast_model = accelerate(tiny_unet, CompileSettings(backend="eager"), cache)
    fallbacks.clear()
    counters.clear()
    assert len(SIZES) == 200
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
    assert grown <= 0.03, f"resident memory grew by {grown:.1%} from the 20th to the 200th size"
