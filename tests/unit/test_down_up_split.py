"""Cutting a UNet in diffusers' layout, on networks whose answer is mental arithmetic."""

import pytest
import torch
from comfy_accel.accel.modules.substitution import Order, substituted
from comfy_accel.accel.step_cache.splits.unet import DownUpUNetSplit, has_down_up_layout
from kit.step_cache import every, features_of
from kit.toys import ToyDiffusersUNet, UNetBlock

# The toy's skips, and with them depths: conv_in; d0 with two resnets and a downsampler; d1 with two resnets.
DOWN = ["conv_in", ("d0.resnet0", "d0.attention0"), ("d0.resnet1", "d0.attention1"), "d0.sampler", "d1.resnet0"]
DOWN += ["d1.resnet1"]
UP = ["u0.resnet0", "u0.resnet1", ("u0.resnet2", "u0.sampler"), ("u1.resnet0", "u1.attention0")]
UP += [("u1.resnet1", "u1.attention1"), ("u1.resnet2", "u1.attention2")]


def flat(names):
    return [name for part in names for name in ([part] if isinstance(part, str) else part)]


def full_then_skipped(model, depth, x, **control):
    split = DownUpUNetSplit(model, depth)
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
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_skipped_call_runs_shallow_layers_alone_and_gives_the_same_for_the_same_input(depth, middle):
    model = ToyDiffusersUNet(middle)
    full, skipped = full_then_skipped(model, depth, torch.ones(2, 1, 5, 7))
    assert model.called == flat(DOWN[:depth]) + flat(UP[-depth:])
    assert torch.equal(full, skipped)
    assert torch.equal(model(torch.ones(2, 1, 5, 7), 500), full)


@pytest.mark.parametrize("depth", [6, 99])
def test_depth_beyond_the_model_is_refused_with_the_range(depth):
    with pytest.raises(ValueError, match=f"depth {depth} is outside this model's range 1 to 5"):
        DownUpUNetSplit(ToyDiffusersUNet(), depth)


def test_default_depth_is_chosen_by_work():
    model = ToyDiffusersUNet()
    model.down_blocks[1].resnets[0].weight = torch.nn.Parameter(torch.ones(100, 100))
    for name, layer in model.named_modules():
        if name.endswith(("resnets.0", "resnets.1", "resnets.2", "conv_in")) and not hasattr(layer, "weight"):
            layer.weight = torch.nn.Parameter(torch.ones(10, 10))
    # Work of the pairs: 200, 200, 200, 100, 10100, 200; at depth 4 a sixteenth of all is shallow.
    assert DownUpUNetSplit(model, None).depth == 4


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_controlnets_residuals_reach_shallow_skips_alone(depth):
    model = ToyDiffusersUNet()
    x = torch.ones(2, 1, 5, 7)
    skips = [torch.full((2, 1, *shape), 2.0**-i) for i, shape in enumerate([(5, 7)] * 3 + [(3, 4)] * 3)]
    control = {"down_block_additional_residuals": skips, "mid_block_additional_residual": torch.ones(2, 1, 3, 4)}
    full, skipped = full_then_skipped(model, depth, x, **control)
    assert torch.equal(full, skipped)
    kept = DownUpUNetSplit(model, depth).withhold({**control, "return_dict": False})
    assert [residual.ndim for residual in kept["down_block_additional_residuals"]] == [4] * depth + [0] * (6 - depth)
    assert kept["mid_block_additional_residual"].ndim == 0
    assert kept["return_dict"] is False
    assert all(residual.ndim == 4 for residual in skips)


@pytest.mark.parametrize("name", ["down_intrablock_additional_residuals", "down_block_additional_residuals"])
@pytest.mark.parametrize(("depth", "shallow"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1)])
def test_adapters_residuals_reach_shallow_blocks_alone(depth, shallow, name):
    model = ToyDiffusersUNet()
    residuals = [torch.full((2, 1, 5, 7), 0.5), torch.full((2, 1, 3, 4), 0.25)]
    full, skipped = full_then_skipped(model, depth, torch.ones(2, 1, 5, 7), **{name: residuals})
    assert torch.equal(full, skipped)
    kept = DownUpUNetSplit(model, depth).withhold({name: residuals})[name]
    assert [residual.ndim for residual in kept] == [4] * shallow + [0] * (2 - shallow)


def test_absent_residuals_stay_absent():
    given = {"down_block_additional_residuals": None, "mid_block_additional_residual": None, "timestep_cond": None}
    assert DownUpUNetSplit(ToyDiffusersUNet(), 1).withhold(given) == given


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
