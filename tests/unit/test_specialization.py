"""Which sizes a graph is specialised on."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile.specialization import scales_evenly, trace_ops
from kit.blocks import Block, Stop, runner


class Rows(Block):
    """Loops over the batch, so that a graph has as many rows as it was traced for."""

    def forward(self, x):  # [B, T, 4]
        return torch.stack([super(Rows, self).forward(row) for row in x])


class Asks(Block):
    """Does something else at one number of tokens."""

    def forward(self, x):
        return super().forward(x) * (2.0 if x.shape[1] == 8 else 1.0)


@pytest.mark.parametrize(
    ("kind", "first", "same", "other"), [(Rows, (3, 8), (3, 5), (2, 8)), (Asks, (3, 8), (2, 8), (3, 5))]
)
def test_size_that_code_was_traced_for_has_a_graph_of_its_own(kind, first, same, other):
    block, cache = kind(), GraphCache()
    stand_in = runner(block, cache)
    with torch.no_grad():
        for size, graphs in ((first, 1), (same, 1), (other, 2), (first, 2)):
            x = torch.randn(*size, 4)
            assert torch.equal(stand_in(block, x), block(x)), size
            assert cache.statistics()["graphs"] == graphs


def at(function, *sizes):
    return [trace_ops(function, [torch.empty(size, 4)]) for size in sizes]


@pytest.mark.parametrize(
    ("function", "evenly"),
    [
        (lambda x: (x * 2).reshape(-1, 2).softmax(-1), True),
        (lambda x: x + 1 if x.shape[0] == 1 else x - 1, False),
        (lambda x: x * (2.0 if x.shape[0] == 1 else 3.0), False),
        (lambda x: x.squeeze() * 2, False),
        (lambda x: x[:2] * 2, False),
    ],
    ids=["alike", "another operation for one", "another number for one", "vanishes at one", "stops growing"],
)
def test_block_scales_evenly_where_it_treats_every_batch_alike(function, evenly):
    assert scales_evenly(at(function, 1, 2, 3)) is evenly


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
    def block(x):
        raise Stop

    with pytest.raises(Stop):
        trace_ops(block, [torch.empty(2)], (Stop,))
    assert trace_ops(block, [torch.empty(2)]) is None
