"""Which sizes a graph is specialised on."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile.specialization import scales_evenly, trace_ops
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


def at(function, *sizes):
    return [trace_ops(function, [torch.empty(size, 4)]) for size in sizes]


def test_block_that_treats_every_batch_alike_scales_evenly():
    assert scales_evenly(at(lambda x: (x * 2).reshape(-1, 2).softmax(-1), 1, 2, 3))


def test_block_that_asks_for_a_batch_of_one_does_not_scale_evenly():
    assert not scales_evenly(at(lambda x: x + 1 if x.shape[0] == 1 else x - 1, 1, 2, 3))
    assert not scales_evenly(at(lambda x: x * (2.0 if x.shape[0] == 1 else 3.0), 1, 2, 3))


def test_dimension_that_vanishes_at_one_does_not_scale_evenly():
    assert not scales_evenly(at(lambda x: x.squeeze() * 2, 1, 2, 3))


def test_size_that_stops_growing_does_not_scale_evenly():
    assert not scales_evenly(at(lambda x: x[:2] * 2, 1, 2, 3))


def test_block_that_needs_values_has_no_trace():
    assert at(lambda x: x if x.sum() > 0 else -x, 2) == [None]
    assert not scales_evenly([None, None, None])


def test_inputs_that_are_written_to_are_reported():
    with torch.inference_mode():
        a, b = torch.ones(2), torch.ones(2)
        trace = trace_ops(lambda a, b: b.view(2, 1).add_(1) + a[0], [a, b])
    assert trace.changed == (1,)
    assert torch.equal(b, torch.ones(2))


def test_interrupt_is_not_taken_for_a_block_without_trace():
    class Stop(Exception):
        pass

    def block(x):
        raise Stop

    with pytest.raises(Stop):
        trace_ops(block, [torch.empty(2)], (Stop,))
    assert trace_ops(block, [torch.empty(2)]) is None
