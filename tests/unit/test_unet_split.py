"""Cutting a UNet, on networks whose answer is mental arithmetic."""

import pytest
import torch
from comfy_accel.accel.modules.substitution import Order, substituted
from comfy_accel.accel.step_cache.features import OutdatedFeature
from comfy_accel.accel.step_cache.splits.unet import UNetSplit, has_unet_layout
from kit.step_cache import every, features_of
from kit.toys import Scale


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


def full_then_skipped(model, depth, x):
    split = UNetSplit(model, depth)
    features = features_of(split, every(2), levels=(14.6, 8.0, 0.0))
    outs = []
    for sigma, stand_ins in ((14.6, split.full_layers), (8.0, split.skip_layers)):
        features.run.begin(sigma)
        with substituted(stand_ins(features, features.branches(x, ["a"], [0], None)), Order.CACHED):
            outs.append(model(x))
    return outs


@pytest.mark.parametrize("middle", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_skipped_call_runs_shallow_blocks_alone_and_gives_the_same_for_the_same_input(depth, middle):
    model = ToyUNet(middle)
    full, skipped = full_then_skipped(model, depth, torch.ones(2, 1, 3, 5))
    expected = [f"in{i}.{j}" for i in range(depth) for j in range(2)]
    expected += [f"out{i}.{j}" for i in range(4 - depth, 4) for j in range(2)]
    assert model.called == expected
    assert torch.equal(full, skipped)
    assert torch.equal(model(torch.ones(2, 1, 3, 5)), full)


@pytest.mark.parametrize("depth", [4, 99])
def test_depth_beyond_the_model_is_refused_with_the_range(depth):
    with pytest.raises(ValueError) as error:
        UNetSplit(ToyUNet(), depth)
    message = f"DeepCache: depth {depth} is outside this model's range 1 to 3 (0 = automatic)."
    assert str(error.value) == message


def test_residuals_of_deep_layers_are_withheld_and_the_callers_stay():
    names = ["0", "1", "2", "3"]
    control = {"input": names[::-1], "middle": ["m"], "output": names[:], "other": [1]}
    before = {name: list(values) for name, values in control.items()}
    kept = UNetSplit(ToyUNet(), 1).withhold(control)
    assert control == before
    # Taken from the ends: input blocks 0, 1, 2, 3; output blocks with the skips 3, 2, 1, 0.
    assert kept == {"input": [None, None, None, "0"], "middle": [None], "output": ["0", None, None, None], "other": [1]}


def test_short_lists_of_residuals_are_counted_from_their_ends():
    kept = UNetSplit(ToyUNet(), 3).withhold({"input": ["1", "0"], "output": ["2", "3"]})
    assert kept == {"input": ["1", "0"], "output": ["2", None]}
    assert UNetSplit(ToyUNet(), 3).withhold(None) is None


class Levels(torch.nn.Module):
    """A UNet's lists with the same weights on each of three levels, two blocks a level."""

    def __init__(self):
        super().__init__()
        conv = lambda stride: torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, stride))  # noqa: E731
        self.input_blocks = torch.nn.ModuleList(conv(2 if i in (2, 4) else 1) for i in range(6))
        self.middle_block = conv(1)
        self.output_blocks = torch.nn.ModuleList(conv(1) for _ in range(6))


def test_default_depth_is_none_or_the_largest_within_its_share_where_noise_is_added(monkeypatch):
    # Work of the pairs of blocks: 2, 2, 1/2, 1/2, 1/8, 1/8, and 1/16 in the middle: 5.3 in all.
    model = Levels()
    for share, depth in ((0.1, 1), (0.4, 1), (0.76, 2), (0.86, 3), (1.0, 5)):
        monkeypatch.setattr("comfy_accel.accel.step_cache.splits.unet.NOISE_SHARE", share)
        assert UNetSplit(model, None).depth == depth
    split = UNetSplit(model, None, adds_noise=False)
    assert split.depth == split.shallow_share == 0
    assert UNetSplit(model, 2, adds_noise=False).depth == 2


def test_size_of_what_enters_the_deep_part_is_compared_where_it_is_not_the_latent():
    """A full call that is replayed from a graph notes nothing at depth 0, where it measures nothing either."""
    x = torch.zeros(1, 4, 8, 8)
    UNetSplit(Levels(), None, adds_noise=False).check_skipped(["a"], x)
    with pytest.raises(OutdatedFeature):
        UNetSplit(Levels(), 1).check_skipped(["a"], x)


def test_layout_of_a_unet_is_recognised():
    assert has_unet_layout(ToyUNet())
    assert not has_unet_layout(torch.nn.Linear(1, 1))
    lopsided = ToyUNet()
    lopsided.output_blocks = lopsided.output_blocks[:3]
    assert not has_unet_layout(lopsided)
