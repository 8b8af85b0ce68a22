"""Numbers and texts among a block's arguments: a graph each, and few of them."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.dispatch.block_runner import BlockRunner
from comfy_accel.accel.fingerprint.survey import survey
from torch import nn


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, scale, mode="plain"):
        out = self.second(self.first(x) * scale)
        return out.relu() if mode == "relu" else out


@pytest.fixture
def block():
    return Scaled().eval().requires_grad_(False)


def stand_in(block, cache):
    model = nn.Module()
    model.layers = nn.ModuleList([block])
    return BlockRunner(survey(model).regions[0], cache, CompileSettings(backend="eager"))


def test_ever_other_numbers_get_few_graphs_and_then_run_eagerly_with_one_reason(block):
    cache, x = GraphCache(), torch.randn(2, 4)
    run = stand_in(block, cache)
    for scale in [0.1 * number for number in range(12)] * 2:
        torch.testing.assert_close(run(block, x, scale), block(x, scale))
    totals = cache.statistics()
    assert (totals["entries"], totals["graphs"], totals["compilations"]) == (1, 4, 4)
    assert totals["hits"] == 8
    assert len(fallbacks.rows()) == 1


def test_each_value_runs_the_graph_that_was_made_for_it(block):
    cache, x = GraphCache(), torch.randn(2, 4)
    run = stand_in(block, cache)
    for scale, mode in [(0.5, "plain"), (0.5, "relu"), (2.0, "plain"), (0.5, "plain"), (0.5, "relu")]:
        torch.testing.assert_close(run(block, x, scale, mode), block(x, scale, mode))
    assert cache.statistics()["compilations"] == 3 and fallbacks.rows() == []
