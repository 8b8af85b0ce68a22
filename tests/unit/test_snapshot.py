"""Snapshots of weights: which can be taken; what each notices, test_model_capture.py says of the captures."""

import pytest
import torch
from comfy_accel.accel.modules.snapshot import UnsupportedWeights, WeightSnapshot
from kit.blocks import Wrapped


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 1.0
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))


def test_some_weights_that_moved_are_noticed_by_the_thorough_check_and_all_by_the_cheap_one_too():
    blocks = torch.nn.ModuleList(Block() for _ in range(100))
    snapshot = WeightSnapshot(blocks)
    blocks[0].layer.bias.data = torch.randn(4)  # the second of some hundred weights, which no sample has
    assert snapshot.seems_current() and not snapshot.is_current()
    for weight in blocks.parameters():
        weight.data = weight.data.clone()
    assert not snapshot.seems_current()


def test_weights_on_two_devices_or_of_an_unknown_type_are_refused():
    block = Block()
    block.shift = torch.zeros(4, device="meta")
    with pytest.raises(UnsupportedWeights):
        WeightSnapshot(block)


def test_tensors_in_quantised_weights_are_looked_at():
    inner, scale = torch.zeros(4, 4), torch.ones(1)
    block = Block()
    layer = block.layer
    del layer.weight
    layer.weight = Wrapped(inner, "8", scale)
    snapshot = WeightSnapshot(block)
    assert snapshot.is_current() and any(tensor is scale for tensor in snapshot.tensors())
    layer.weight = Wrapped(inner, "8", scale)  # as core's own cast or patch leaves it, in the same memory
    assert snapshot.is_current() and WeightSnapshot(block).digest == snapshot.digest
    layer.weight = Wrapped(inner, "4", scale)
    assert WeightSnapshot(block).digest != snapshot.digest
    layer.weight = Wrapped(inner, "8", scale.clone())
    assert not snapshot.is_current()
    layer.weight = inner
    assert not snapshot.is_current()
