"""Cutting a UNet in diffusers' layout, on networks whose answer is mental arithmetic."""

import pytest
import torch
from comfy_accel.accel.modules.substitution import Order, substituted
from comfy_accel.accel.step_cache.splits.unet import DownUpUNetSplit, has_down_up_layout
from kit.step_cache import every, features_of
from kit.toys import ToyDiffusersUNet, UNetBlock


def full_then_skipped(model, x, **control):
    split = DownUpUNetSplit(model)
    features = features_of(split, every(2), levels=(14.6, 8.0, 0.0))
    outs = []
    for sigma, stand_ins in ((14.6, split.full_layers), (8.0, split.skip_layers)):
        features.run.begin(sigma)
        given = {name: list(value) if isinstance(value, list) else value for name, value in control.items()}
        if sigma < 14:
            given = split.withhold(given)
        with substituted(stand_ins(features, features.branches(x, ["a"], [0], None)), Order.CACHED):
            outs.append(model(x, 500, **given))
    return outs


@pytest.mark.parametrize("middle", [True, False])
def test_skipped_call_runs_no_layer_and_gives_the_same_for_the_same_input(middle):
    model = ToyDiffusersUNet(middle)
    full, skipped = full_then_skipped(model, torch.ones(2, 1, 5, 7))
    assert model.called == []
    assert torch.equal(full, skipped)
    assert torch.equal(model(torch.ones(2, 1, 5, 7), 500), full)


SKIPS = [torch.full((2, 1, *shape), 2.0**-i) for i, shape in enumerate([(5, 7)] * 3 + [(3, 4)] * 3)]
ADAPTED = [torch.full((2, 1, 5, 7), 0.5), torch.full((2, 1, 3, 4), 0.25)]


@pytest.mark.parametrize(
    "control",
    [
        {"down_block_additional_residuals": SKIPS, "mid_block_additional_residual": torch.ones(2, 1, 3, 4)},
        {"down_intrablock_additional_residuals": ADAPTED},
        {"down_block_additional_residuals": ADAPTED},
    ],
)
def test_residuals_are_in_what_is_reused_and_withheld(control):
    model = ToyDiffusersUNet()
    full, skipped = full_then_skipped(model, torch.ones(2, 1, 5, 7), **control)
    assert torch.equal(full, skipped)
    kept = DownUpUNetSplit(model).withhold({**control, "return_dict": False})
    assert kept == {**dict.fromkeys(control), "return_dict": False}


def test_layout_is_recognised():
    assert has_down_up_layout(ToyDiffusersUNet())
    assert has_down_up_layout(ToyDiffusersUNet(middle=False))
    assert not has_down_up_layout(torch.nn.Linear(1, 1))
    assert not has_down_up_layout(None)


def test_layouts_that_hand_on_other_skips_are_not_taken():
    lopsided = ToyDiffusersUNet()
    lopsided.up_blocks[1].resnets = lopsided.up_blocks[1].resnets[:2]
    lopsided.up_blocks[1].attentions = None
    moving = ToyDiffusersUNet()
    moving.down_blocks[0].motion_modules = torch.nn.ModuleList()
    one_skip = ToyDiffusersUNet()
    one_skip.down_blocks[1].__class__ = type("KDownBlock2D", (UNetBlock,), {})
    encoder = ToyDiffusersUNet()
    del encoder.down_blocks[0].resnets
    for model in (lopsided, moving, one_skip, encoder):
        assert not has_down_up_layout(model)
