"""Numbers and texts among a block's arguments: a graph each, and few of them."""

import dataclasses

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.fallbacks import fallbacks
from kit.blocks import Block, model_of, runner, runners
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


class Numbered(Block):
    """It knows its place, and looks there for what another program wants of it, as Fluxtapoz's blocks do."""

    def __init__(self, place):
        super().__init__()
        self.place, self.given = place, {}

    def forward(self, x, options):
        out = self.second(self.first(x))
        wanted = options.get(("block", self.place))
        return out if wanted is None else out * wanted


class Shifted(Numbered):
    def forward(self, x, options):
        return super().forward(x.roll(self.place, -1), options)


class Chosen(Numbered):
    """One of two layers of the same shape, by its number."""

    def forward(self, x, options):
        return (self.first, self.second)[self.place % 2](x)


class Constant(Numbered):
    def forward(self, x, options):
        return super().forward(x * torch.tensor([self.place, 1, 1, 1], device=x.device), options)


class OnOneDevice(Numbered):
    def forward(self, x, options):
        return super().forward(x * self.place if x.device.type == "cpu" else x, options)


class Paired(Numbered):
    def forward(self, x, options):
        out = super().forward(x, options)
        return (x, out) if self.place % 2 else [x, out]


class Collecting(Numbered):
    def forward(self, x, options):
        out = super().forward(x, options)
        if self.place == 5:
            options["hidden"] = out
        return out


class Ranged(Numbered):
    """Its number changes nothing, and what it makes on the device is the same in each."""

    def forward(self, x, options):
        return super().forward(x + torch.arange(4, device=x.device), options)


def run_all(blocks, cache, x):
    stand_ins = runners(model_of(*blocks), cache)
    for block in blocks:
        given, expected = {}, {}
        torch.testing.assert_close(stand_ins[block](block, x, given), block(x, expected), rtol=0, atol=0)
        assert given.keys() == expected.keys()


def test_blocks_that_only_know_their_place_share_one_graph():
    blocks, cache = [Numbered(place) for place in range(7)], GraphCache()
    run_all(blocks, cache, torch.randn(2, 4))
    run_all(blocks, cache, torch.randn(5, 4))
    assert cache.statistics()["compilations"] == 1 and fallbacks.rows() == []


@pytest.mark.parametrize("cls", [Shifted, Constant])
def test_numbers_on_blocks_that_matter_get_a_graph_each_and_few_of_them(cls):
    blocks, cache = [cls(place) for place in range(1, 8)], GraphCache()
    run_all(blocks, cache, torch.randn(2, 9, 4))
    assert cache.statistics()["compilations"] == 4 and len(fallbacks.rows()) == 1


def test_blocks_that_choose_a_layer_by_their_number_share_a_graph_with_those_that_choose_the_same():
    blocks, cache = [Chosen(place) for place in range(1, 5)], GraphCache()
    run_all(blocks, cache, torch.randn(2, 9, 4))
    assert cache.statistics()["compilations"] == 2 and fallbacks.rows() == []


def test_what_a_number_decides_beside_operators_is_seen_too():
    for cls in (OnOneDevice, Paired, Collecting):
        run_all([cls(place) for place in (1, 2, 5)], GraphCache(), torch.randn(2, 9, 4))
    cache = GraphCache()
    run_all([Ranged(place) for place in (1, 2, 5)], cache, torch.randn(2, 9, 4))
    assert cache.statistics()["compilations"] == 1


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
