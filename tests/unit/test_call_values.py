"""Numbers and texts among a block's arguments: a graph each, and few of them."""

import dataclasses

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.fallbacks import fallbacks
from kit.blocks import Block, runner
from kit.thorough import thorough_except


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


@dataclasses.dataclass
class Modulation:
    shift: torch.Tensor
    scale: torch.Tensor


class Modulated(Block):
    def forward(self, x, modulation):
        return super().forward(x * modulation.scale + modulation.shift)


def test_block_called_with_an_object_is_compiled_though_nobody_reads_how_the_object_is_made():
    block, cache, x = Modulated(), GraphCache(), torch.randn(2, 4)
    given = Modulation(torch.randn(4), torch.randn(4))
    assert torch.equal(runner(block, cache)(block, x, given), block(x, given))
    assert cache.statistics()["compilations"] == 1 and fallbacks.rows() == []


@dataclasses.dataclass
class Doubling:
    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self, shift, scale):
        self.shift, self.scale = shift * 2, scale


def test_an_object_that_is_more_than_its_fields_is_left_to_the_block():
    x, parts = torch.randn(2, 4), (torch.randn(4), torch.randn(4))
    more = Modulation(*parts)
    more.extra = 1
    for given in (Doubling(*parts), more):
        block = Modulated()
        assert torch.equal(runner(block, GraphCache())(block, x, given), block(x, given))
    assert len(fallbacks.rows()) == 2


class OfASize(Block):
    """Called with height and width."""

    def forward(self, x, height, width):
        rows = (x.view(height, width, 4) + torch.arange(width)[:, None] / height).view(height * width, 4)
        return rows + super().forward(rows)


@pytest.mark.parametrize("backend", thorough_except(["eager", "inductor"], "eager"))
def test_blocks_called_with_height_and_width_get_one_graph_for_every_size(backend):
    block, cache = OfASize(), GraphCache()
    run = runner(block, cache, backend=backend)
    for height, width in [(4, 4), (4, 7), (9, 2), (5, 5), (2, 16)]:
        x = torch.randn(height * width, 4)
        torch.testing.assert_close(run(block, x, height, width), block(x, height, width))
    assert cache.statistics()["compilations"] == 1 and fallbacks.rows() == []
