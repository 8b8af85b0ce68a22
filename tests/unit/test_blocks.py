"""Finding a transformer's blocks, and which models are skipped in which way."""

import torch
from comfy_accel.accel.modules.blocks import trunk_of
from comfy_accel.accel.step_cache.splits.dit import DiTSplit, has_dit_layout
from comfy_accel.accel.step_cache.splits.layouts import find_split, why_no_split
from comfy_accel.accel.step_cache.splits.unet import UNetSplit
from kit.toys import Chain, Doubles, Single


def test_all_blocks_are_skipped():
    split = DiTSplit(Chain(20))
    assert split.shallow_share == 0
    assert [len(span.blocks) for span in split.spans] == [20]


def test_trunk_is_two_lists_in_turn_or_the_one_that_outweighs_the_others():
    assert [found.path for found in trunk_of(Doubles())] == ["double_blocks", "single_blocks"]

    joints = Doubles(1, 3)
    joints.joint_transformer_blocks, joints.single_transformer_blocks = joints.double_blocks, joints.single_blocks
    del joints.double_blocks, joints.single_blocks
    assert [found.path for found in trunk_of(joints)] == ["joint_transformer_blocks", "single_transformer_blocks"]

    class Others(Chain):
        def __init__(self, refiners):
            super().__init__(3)
            self.refiner = torch.nn.Module()
            self.refiner.layers = torch.nn.ModuleList(Single([], i) for i in range(refiners))

    assert [found.path for found in trunk_of(Others(2))] == ["blocks"]
    assert [found.path for found in trunk_of(Others(4))] == ["refiner.layers"]
    assert trunk_of(Others(3)) == ()
    assert trunk_of(torch.nn.Linear(1, 1)) == ()


def test_lists_of_lists_are_no_trunk():
    model = torch.nn.Module()
    model.down = torch.nn.ModuleList(torch.nn.ModuleList(Single([], i) for i in range(2)) for _ in range(4))
    assert trunk_of(model) == ()


def test_boundary_of_a_model_is_the_one_for_its_layout():
    unet = torch.nn.Module()
    unet.input_blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(1, 1)) for _ in range(3))
    unet.output_blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(1, 1)) for _ in range(3))
    unet.middle_block = None
    assert isinstance(find_split(unet), UNetSplit)
    assert isinstance(find_split(Chain()), DiTSplit)
    assert find_split(Chain(2)) is None and "it has 2 blocks" in why_no_split(Chain(2))
    assert find_split(torch.nn.Linear(1, 1)) is None and "neither a UNet" in why_no_split(torch.nn.Linear(1, 1))
    assert not has_dit_layout(object())
