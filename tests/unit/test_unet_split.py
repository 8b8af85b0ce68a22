"""Cutting a UNet, on networks whose answer is mental arithmetic."""

import pytest
import torch
from comfy_accel.accel.modules.substitution import Order, substituted
from comfy_accel.accel.step_cache.splits.dit import DiTSplit
from comfy_accel.accel.step_cache.splits.unet import UNetSplit, has_unet_layout
from kit.step_cache import every, features_of
from kit.toys import Chain, Scale


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

    def forward(self, x):
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


@pytest.mark.parametrize("middle", [True, False])
def test_skipped_call_runs_no_block_and_gives_the_same_for_the_same_input(middle):
    model, x = ToyUNet(middle), torch.ones(2, 1, 3, 5)
    split = UNetSplit(model)
    features = features_of(split, every(2), levels=(14.6, 8.0, 0.0))
    outs = []
    for sigma, stand_ins in ((14.6, split.full_layers), (8.0, split.skip_layers)):
        features.run.begin(sigma)
        with substituted(stand_ins(features, features.branches(x, ["a"], [0], None)), Order.CACHED):
            outs.append(model(x))
    full, skipped = outs
    assert model.called == []
    assert torch.equal(full, skipped)
    assert torch.equal(model(torch.ones(2, 1, 3, 5)), full)


def test_sampler_that_adds_noise_runs_every_step_in_full(caplog):
    assert features_of(DiTSplit(Chain()), adds_noise=True).run.why_full is None
    assert features_of(UNetSplit(ToyUNet()), adds_noise=True).run.why_full
    assert "this sampler adds noise in its steps" in caplog.text


def test_layout_of_a_unet_is_recognised():
    assert has_unet_layout(ToyUNet())
    assert not has_unet_layout(torch.nn.Linear(1, 1))
    lopsided = ToyUNet()
    lopsided.output_blocks = lopsided.output_blocks[:3]
    assert not has_unet_layout(lopsided)
