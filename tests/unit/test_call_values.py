"""Numbers and texts among a block's arguments: a graph each, and few of them."""

import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.fallbacks import fallbacks
from kit.blocks import Block, runner


class Scaled(Block):
    def forward(self, x, scale, mode="plain"):
        out = self.second(self.first(x) * scale)
        return out.relu() if mode == "relu" else out


def test_ever_other_numbers_get_few_graphs_and_then_run_eagerly_with_one_reason():
    block, cache, x = Scaled(), GraphCache(), torch.randn(2, 4)
    run = runner(block, cache)
    for scale in [0.1 * number for number in range(12)] * 2:
        torch.testing.assert_close(run(block, x, scale), block(x, scale))
    totals = cache.statistics()
    assert (totals["entries"], totals["graphs"], totals["compilations"], totals["hits"]) == (1, 4, 4, 8)
    assert len(fallbacks.rows()) == 1


def test_each_value_runs_the_graph_that_was_made_for_it():
    block, cache, x = Scaled(), GraphCache(), torch.randn(2, 4)
    run = runner(block, cache)
    for scale, mode in [(0.5, "plain"), (0.5, "relu"), (2.0, "plain"), (0.5, "plain"), (0.5, "relu")]:
        torch.testing.assert_close(run(block, x, scale, mode), block(x, scale, mode))
    assert cache.statistics()["compilations"] == 3 and fallbacks.rows() == []
