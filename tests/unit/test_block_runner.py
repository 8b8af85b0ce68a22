"""A block's stand-in: when it lets a call run as it is."""

import torch
from comfy_accel.accel.block_runner import BlockRunner, CompileSettings
from comfy_accel.accel.fallbacks import fallbacks
from comfy_accel.accel.graph_cache import GraphCache
from comfy_accel.accel.regions import survey


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x))


def runner(blocks, cache):
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(blocks)
    (region,) = survey(model.eval().requires_grad_(False)).regions
    return BlockRunner(region, cache, CompileSettings(backend="eager"))


def test_weights_that_are_not_where_the_inputs_are_run_as_they_are():
    fallbacks.clear()
    block, cache = Block(), GraphCache()
    block.second.to("meta")  # as a partly loaded model's weights wait elsewhere until their layer is called
    assert runner([block], cache)(lambda x: "eager", torch.zeros(2, 4)) == "eager"
    assert cache.statistics()["graphs"] == 0
    assert [row["reason"] for row in fallbacks.rows()] == ["its weights are partly on meta, its inputs are not"]


def test_weights_that_are_back_are_compiled():
    block, cache = Block(), GraphCache()
    x = torch.randn(2, 4)
    assert torch.equal(runner([block], cache)(lambda x: "eager", x), block(x))
    assert cache.statistics()["graphs"] == 1
