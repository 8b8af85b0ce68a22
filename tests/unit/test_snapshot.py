"""Snapshots of modules: which changes each of them notices."""

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


def model(blocks=100):
    return torch.nn.ModuleList(Block() for _ in range(blocks))


def test_one_weight_that_moved_is_noticed_by_the_thorough_check_and_all_by_the_cheap_one_too():
    blocks = model()
    snapshot = WeightSnapshot(blocks)
    blocks[0].layer.weight.data.add_(1)
    assert snapshot.seems_current() and snapshot.is_current()
    assert snapshot.digest == WeightSnapshot(blocks).digest
    blocks[0].layer.bias.data = torch.randn(4)  # the second of some hundred weights, which no sample has
    assert snapshot.seems_current() and not snapshot.is_current()
    assert snapshot.digest != WeightSnapshot(blocks).digest
    for weight in blocks.parameters():
        weight.data = weight.data.clone()
    assert not snapshot.seems_current()


def test_removed_weight_is_noticed():
    blocks = model()
    snapshot = WeightSnapshot(blocks)
    del blocks[0].layer.weight
    assert not snapshot.is_current()


def test_outline_changes_with_attributes_and_hooks_and_back_again():
    blocks = model()
    snapshot = WeightSnapshot(blocks)
    before = snapshot.outline()
    hook = blocks[1].layer.register_forward_hook(lambda *args: None)
    assert snapshot.outline() != before
    hook.remove()
    blocks[1].layer.forward = blocks[1].layer.forward
    assert snapshot.outline() != before
    del blocks[1].layer.forward
    assert snapshot.outline() == before


def test_weights_on_two_devices_or_of_an_unknown_type_are_refused():
    blocks = model(1)
    blocks[0].shift = torch.zeros(4, device="meta")
    with pytest.raises(UnsupportedWeights):
        WeightSnapshot(blocks)


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
