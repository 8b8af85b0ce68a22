"""What a skipped step costs: counted on the full layouts without weights; and nothing to compile."""

import functools

import comfy.ops
import pytest
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.step_cache.splits.unet import UNetSplit
from kit import tiny_models
from kit.deep_cache import assert_close, cached, counts, full_and_skipped_flops
from torch._dynamo.utils import counters

SD15 = {
    "model_channels": 320,
    "num_res_blocks": [2] * 4,
    "channel_mult": [1, 2, 4, 4],
    "transformer_depth": [1] * 6 + [0] * 2,
    "transformer_depth_output": [1] * 9 + [0] * 3,
    "num_heads": 8,
}
SDXL = {
    "model_channels": 320,
    "num_res_blocks": [2] * 3,
    "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "transformer_depth_middle": 10,
    "num_head_channels": 64,
    "num_heads": -1,
    "context_dim": 2048,
    "use_linear_in_transformer": True,
    "adm_in_channels": 2816,
    "num_classes": "sequential",
}


@pytest.mark.parametrize("layout, sizes", [(SD15, [(64, 64), (90, 120)]), (SDXL, [(64, 64)])], ids=["SD15", "SDXL"])
def test_skipped_step_costs_next_to_nothing(layout, sizes):
    config = tiny_models.unet_config(**layout)
    unet = UNetModel(**config, device="meta", dtype=torch.float16, operations=comfy.ops.disable_weight_init)
    split = UNetSplit(unet)
    for height, width in sizes:
        x = torch.empty(2, 4, height, width, device="meta", dtype=torch.float16)
        context = torch.empty(2, 77, config["context_dim"], device="meta", dtype=torch.float16)
        y = torch.empty(2, 2816, device="meta", dtype=torch.float16) if config.get("num_classes") else None
        call = functools.partial(unet, x, torch.ones(2, device="meta"), context, y)
        spent = full_and_skipped_flops(split, x, call)
        print(f"{height}x{width}: {spent[1] / spent[0]:.3f}")
        assert spent[1] <= 0.01 * spent[0]


def test_no_way_of_skipping_adds_a_kind_or_a_graph(sample):
    unet = tiny_models.unet(
        num_res_blocks=[1, 1], channel_mult=[1, 2], transformer_depth=[0, 1], transformer_depth_output=[0, 0, 1, 1]
    )
    compiled = GraphCache()
    fast = lambda model: accelerate(model, CompileSettings(backend="eager"), compiled)  # noqa: E731
    sample(fast(unet), 80, 120, steps=2)
    graphs, kinds = counters["stats"]["unique_graphs"], compiled.statistics()["compilations"]
    assert graphs
    assert kinds
    for points in (1, 2):
        skip = lambda model: cached(model, points=points)  # noqa: B023, E731
        expected = sample(skip(unet), 80, 120, steps=6)
        for model in (fast(skip(unet)), skip(fast(unet))):
            assert_close(sample(model, 80, 120, steps=6), expected)
            assert counts()[1] >= 3
    assert (counters["stats"]["unique_graphs"], compiled.statistics()["compilations"]) == (graphs, kinds)
