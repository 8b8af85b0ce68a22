"""What a block does, told without values."""

import pytest
import torch
from comfy_accel.accel.compile.op_trace import path_of, same_path


def at(function, *sizes):
    return [path_of(function, [torch.empty(size, 4)]) for size in sizes]


def test_block_that_treats_every_batch_alike_takes_one_path():
    assert same_path(at(lambda x: (x * 2).reshape(-1, 2).softmax(-1), 1, 2, 3))


def test_block_that_asks_for_a_batch_of_one_takes_another():
    assert not same_path(at(lambda x: x + 1 if x.shape[0] == 1 else x - 1, 1, 2, 3))
    assert not same_path(at(lambda x: x * (2.0 if x.shape[0] == 1 else 3.0), 1, 2, 3))


def test_dimension_that_vanishes_at_one_is_another_path():
    assert not same_path(at(lambda x: x.squeeze() * 2, 1, 2, 3))


def test_size_that_stops_growing_is_another_path():
    assert not same_path(at(lambda x: x[:2] * 2, 1, 2, 3))


def test_block_that_needs_values_has_no_path():
    assert at(lambda x: x if x.sum() > 0 else -x, 2) == [None]
    assert not same_path([None, None, None])


def test_inputs_that_are_written_to_are_told():
    with torch.inference_mode():
        a, b = torch.ones(2), torch.ones(2)
        path = path_of(lambda a, b: b.view(2, 1).add_(1) + a[0], [a, b])
    assert path.changed == (1,)
    assert torch.equal(b, torch.ones(2))


def test_interrupt_is_not_taken_for_a_block_without_path():
    class Stop(Exception):
        pass

    def block(x):
        raise Stop

    with pytest.raises(Stop):
        path_of(block, [torch.empty(2)], (Stop,))
    assert path_of(block, [torch.empty(2)]) is None
