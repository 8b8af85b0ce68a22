"""Cutting a UNet, in either layout, on networks whose answer is mental arithmetic."""

import pytest
import torch
from comfy_accel.accel.modules.substitution import Order, substituted
from comfy_accel.accel.step_cache.splits.dit import DiTSplit
from comfy_accel.accel.step_cache.splits.unet import (
    DownUpUNetSplit,
    UNetSplit,
    has_down_up_layout,
    has_unet_layout,
)
from kit.step_cache import every, features_of
from kit.toys import Chain, Scale, ToyDiffusersUNet, UNetBlock


class ToyUNet(torch.nn.Module):
    """Four levels of the walk that ComfyUI's UNet does, on tensors [B, 1, H, W]; skips are concatenated
    and averaged, so a zero-channel part changes nothing but itself."""

    def __init__(self, middle=True):
        super().__init__()
        self.called = []
        blocks = lambda kind: torch.nn.ModuleList(  # noqa: E731
            torch.nn.Sequential(Scale(f"{kind}{i}.0", self.called), Scale(f"{kind}{i}.1", self.called))
            for i in range(4)
        )
        self.input_blocks, self.output_blocks = blocks("in"), blocks("out")
        self.middle_block = torch.nn.Sequential(Scale("middle", self.called)) if middle else None

    def forward(self, x, timestep=None):
        self.called.clear()
        skips = []
        for block in self.input_blocks:
            for layer in block:
                x = layer(x)
            skips.append(x)
        for layer in self.middle_block or ():
            x = layer(x)
        for block in self.output_blocks:
            x = torch.cat([x, skips.pop()], dim=1)
            x = x.mean(dim=1, keepdim=True) if x.shape[1] else x
            for layer in block:
                x = layer(x)
        return x


SPLITS = {ToyUNet: UNetSplit, ToyDiffusersUNet: DownUpUNetSplit}
X = torch.ones(2, 1, 5, 7)


def full_then_skipped(model, **control):
    split = SPLITS[type(model)](model)
    features = features_of(split, every(2), levels=(14.6, 8.0, 0.0))
    outs = []
    for sigma, stand_ins in ((14.6, split.full_layers), (8.0, split.skip_layers)):
        features.run.begin(sigma)
        given = {name: list(value) if isinstance(value, list) else value for name, value in control.items()}
        if given and sigma < 14:
            given = split.withhold(given)
        with substituted(stand_ins(features, features.branches(X, ["a"], [0], None)), Order.CACHED):
            outs.append(model(X.clone(), 500, **given))
    return outs


@pytest.mark.parametrize("middle", [True, False])
@pytest.mark.parametrize("make", SPLITS)
def test_skipped_call_runs_no_block_and_gives_the_same_for_the_same_input(make, middle):
    model = make(middle)
    full, skipped = full_then_skipped(model)
    assert model.called == []
    assert torch.equal(full, skipped)
    assert torch.equal(model(X.clone(), 500), full)


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
    full, skipped = full_then_skipped(model, **control)
    assert torch.equal(full, skipped)
    kept = DownUpUNetSplit(model).withhold({**control, "return_dict": False})
    assert kept == {**dict.fromkeys(control), "return_dict": False}


def test_sampler_that_adds_noise_runs_every_step_in_full(caplog):
    assert features_of(DiTSplit(Chain()), adds_noise=True).run.why_full is None
    assert features_of(UNetSplit(ToyUNet()), adds_noise=True).run.why_full
    assert "this sampler adds noise in its steps" in caplog.text


def changed(change, make=ToyDiffusersUNet):
    model = make()
    change(model)
    return model


def one_skip_less(model):
    model.up_blocks[1].resnets, model.up_blocks[1].attentions = model.up_blocks[1].resnets[:2], None


LEFT_ALONE = {
    "another network": (torch.nn.Linear(1, 1), None),
    "one output block less": (
        changed(lambda model: setattr(model, "output_blocks", model.output_blocks[:3]), ToyUNet),
        None,
    ),
    "one skip less": (None, changed(one_skip_less)),
    "other parts": (None, changed(lambda model: setattr(model.down_blocks[0], "motion", torch.nn.ModuleList()))),
    "a single skip of each block": (
        None,
        changed(lambda model: setattr(model.down_blocks[1], "__class__", type("KDownBlock2D", (UNetBlock,), {}))),
    ),
    "an encoder": (None, changed(lambda model: delattr(model.down_blocks[0], "resnets"))),
}


def test_layouts_are_recognised():
    assert has_unet_layout(ToyUNet()) and has_down_up_layout(ToyDiffusersUNet())
    assert has_down_up_layout(ToyDiffusersUNet(middle=False)) and not has_down_up_layout(ToyUNet())


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_layouts_are_left_alone(name):
    for model in LEFT_ALONE[name]:
        assert not has_unet_layout(model) and not has_down_up_layout(model)
