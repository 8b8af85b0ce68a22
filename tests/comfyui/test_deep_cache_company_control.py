"""DeepCache beside ControlNets and T2I-Adapters: what is theirs in deep layers is in the feature, the rest acts."""

import comfy.controlnet
import pytest
import tiny_models
import torch
from comfy.t2i_adapter.adapter import Adapter
from deep_cache_reference import assert_as_reference, assert_skipped_is_full, held
from deep_cache_runs import counts, split_chunks

from bench.tiny_models import Family, with_control

SIZE = {"width": 72, "height": 88}
EVEN = {"width": 64, "height": 96}

SD15 = {
    "num_res_blocks": [2] * 4,
    "channel_mult": [1, 2, 4, 4],
    "transformer_depth": [1] * 6 + [0] * 2,
    "transformer_depth_output": [1] * 9 + [0] * 3,
}
"""All twelve levels of SD1.5, 32 channels wide, which is what the place of a T2I-Adapter's residuals is made for."""


def control_net(**changes):
    network = Family("", "SD15", tiny_models.unet_config(**changes), context_dim=768).control_net(torch.float32)
    return watched(network)


def watched(control):
    """The ControlNet, its copies counting their network's calls in `control.calls`."""
    control.calls = calls = []
    control.control_model.register_forward_hook(lambda *args: calls.append(None))
    return control


def adapter(xl: bool = False):
    """A T2I-Adapter for 32 channels, as core loads it."""
    network = Adapter(channels=[32, 64, 128, 128], nums_rb=2, cin=768 if xl else 192, ksize=1, sk=True, xl=xl).eval()
    tiny_models.randomize(network.requires_grad_(False), seed=5)
    return comfy.controlnet.T2IAdapter(network, network.input_channels, 8, "nearest-exact")


def controlled(*controls, ends=(1.0, 1.0), both=True, seed=1):
    """Conditioning with the controls chained, each up to its percent; for the negative prompt too if `both`."""
    hint = torch.rand(1, 3, 120, 96, generator=torch.Generator().manual_seed(4))
    chain = None
    for control, end in zip(controls, ends, strict=False):
        chain = control.copy().set_cond_hint(hint, 0.8, (0.0, end)).set_previous_controlnet(chain)
    return tiny_models.conditioning(seed=seed, control=chain, control_apply_to_uncond=both)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_skipped_step_with_a_control_net_equals_the_full_one(tiny_unet, depth):
    positive = with_control(tiny_models.conditioning(), control_net())
    assert_skipped_is_full(tiny_unet, depth, **SIZE, positive=positive, unlike={"positive": None})


@pytest.mark.parametrize("depth, split", [(1, False), (3, True), (5, False)])
def test_control_net_acts_as_if_every_layer_ran(tiny_unet, depth, split):
    model = split_chunks(tiny_unet) if split else tiny_unet
    assert_as_reference(model, depth=depth, **SIZE, positive=controlled(control_net()))


def test_control_net_for_the_positive_prompt_alone_leaves_the_other_stream_alone(tiny_unet):
    assert_as_reference(tiny_unet, interval=2, **SIZE, positive=controlled(control_net(), both=False))


def test_control_net_itself_runs_on_every_step(tiny_unet, sample):
    control = control_net()
    sample(held(tiny_unet), **SIZE, steps=4, positive=controlled(control))
    assert counts() == (2, 2)
    assert len(control.calls) == 4


@pytest.mark.parametrize("depth", [1, 4])
def test_chained_control_nets_of_which_one_ends_halfway(tiny_unet, depth):
    first, second = control_net(), control_net()
    tiny_models.randomize(second.control_model, seed=8)
    positive = controlled(first, second, ends=(1.0, 0.5))
    assert_as_reference(tiny_unet, depth=depth, **SIZE, positive=positive)
    # Four runs of four steps; the second acts on the first two, the latter of which is skipped as the third is.
    assert (len(first.calls), len(second.calls)) == (4 * 4, 4 * 2)


# T2I-Adapter


@pytest.mark.parametrize("depth", [2, 3, 8])
def test_skipped_step_with_a_t2i_adapter_equals_the_full_one(depth):
    # Of its four residuals one is shallow at depths 3 to 5, two at 6 to 8, and none at 2.
    positive = controlled(adapter())
    assert_skipped_is_full(tiny_models.unet(**SD15), depth, **EVEN, positive=positive, unlike={"positive": None})


def test_t2i_adapter_acts_as_if_every_layer_ran():
    assert_as_reference(tiny_models.unet(**SD15), depth=3, **EVEN, positive=controlled(adapter()))


def test_t2i_adapter_chained_to_a_control_net():
    positive = controlled(adapter(), control_net(**SD15))
    assert_as_reference(tiny_models.unet(**SD15), depth=3, **EVEN, positive=positive)
