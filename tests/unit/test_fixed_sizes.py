"""Code that is traced for one size: its graph serves that size alone."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.dispatch.block_runner import BlockRunner
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.modules.substitution import Order, substituted


class Rows(torch.nn.Module):
    """Loops over the batch, so that a graph has as many rows as it was traced for."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):  # [B, T, 4]
        return torch.stack([self.second(self.first(row)) for row in x])


class Asks(Rows):
    """Does something else at one number of tokens."""

    def forward(self, x):
        return self.second(self.first(x)) * (2.0 if x.shape[1] == 8 else 1.0)


@pytest.mark.parametrize(
    ("block", "first", "same", "other"), [(Rows, (3, 8), (3, 5), (2, 8)), (Asks, (3, 8), (2, 8), (3, 5))]
)
def test_size_that_code_was_traced_for_has_a_graph_of_its_own(block, first, same, other):
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([block()])
    (region,) = survey(model).regions
    cache = GraphCache()
    runner = BlockRunner(region, cache, CompileSettings("eager"))
    with torch.no_grad():
        for size, graphs in ((first, 1), (same, 1), (other, 2), (first, 2)):
            x = torch.randn(*size, 4)
            expected = region.block(x)
            with substituted({region.block: runner}, Order.COMPILED):
                assert torch.equal(region.block(x), expected), size
            assert cache.statistics()["graphs"] == graphs
