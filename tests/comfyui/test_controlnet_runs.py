"""Accelerate ControlNet in core's sampler, beside Accelerate Model: what is compiled, and that images stay the same."""

import functools

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models import controlnet
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.controlnet import accelerate_control
from comfy_accel.accel.modules.blocks import blocks
from comfy_accel.nodes.controlnet import AccelControlNet
from kit import controls, tiny_models
from kit.compiled import graphs
from kit.controls import SMALL, adapter, control_lora, taesd, unet_control
from kit.families import CONTROLLED
from torch._dynamo.utils import counters

SETTINGS = CompileSettings(backend="eager")

cache = GraphCache()
"""One for the file, as in a process: tracing is most of a test's time."""


@functools.cache
def model():
    return tiny_models.unet(**SMALL)


@functools.cache
def control(seed: int = 3):
    return unet_control(seed, **SMALL)


def hint(seed: int = 4) -> torch.Tensor:
    return torch.rand(1, 96, 120, 3, generator=torch.Generator().manual_seed(seed))


def conditioned(steps, conditioning=tiny_models.conditioning) -> dict:
    """What core's own node makes of the controls: each as (control, strength, start, end, ...), chained in order."""
    import nodes

    positive, negative = conditioning(seed=1), conditioning(seed=2)
    for seed, (net, strength, start, end, *vae) in enumerate(steps, 4):
        positive, negative = nodes.ControlNetApplyAdvanced().apply_controlnet(
            positive, negative, net, hint(seed), strength, start, end, *vae
        )
    return {"positive": positive, "negative": negative}


def image(*steps, fast: bool, sample=tiny_models.sample, base=None, **changes) -> torch.Tensor:
    base = base or model()
    if fast:
        base = accelerate(base, SETTINGS, cache)
        steps = [(accelerate_control(net, SETTINGS, cache), *rest) for net, *rest in steps]
    return sample(base, **({"width": 96, "height": 120} | changes), **conditioned(steps))


def assert_same_image(*steps, tolerance: float = 0.0, **changes) -> None:
    fast, plain = image(*steps, fast=True, **changes), image(*steps, fast=False, **changes)
    assert plain.isfinite().all()
    assert (fast - plain).abs().max() <= tolerance * plain.abs().max()


def test_a_control_net_in_every_way_it_is_used_compiles_in_its_first_image_alone():
    assert_same_image()
    of_model = graphs()
    assert_same_image((control(), 0.8, 0.0, 1.0))
    compiled = graphs()
    assert compiled > of_model > 0
    assert not torch.equal(image((control(), 0.8, 0.0, 1.0), fast=True), image(fast=True))
    assert_same_image((control(), 0.0, 0.0, 1.0))  # off, by its strength
    assert_same_image((control(), 0.3, 0.0, 1.0))
    assert_same_image()  # without it
    assert_same_image((control(), 1.4, 0.2, 0.8), steps=6)  # residuals come late and end early
    assert_same_image((control(), 0.8, 0.0, 1.0), batch=2)
    assert_same_image((control(), 0.8, 0.0, 1.0), (control(5), 0.5, 0.0, 0.5), steps=4, tokens=154)
    assert_same_image((control(), 0.8, 0.0, 1.0), (control(), 0.5, 0.3, 1.0), steps=4)  # the same one twice
    assert_same_image((control(), 0.8, 0.0, 1.0), cfg=1.0, batch=4)  # cond alone
    assert graphs() == compiled
    assert not counters["graph_break"] and fallbacks.rows() == []


def test_first_step_without_residuals_and_the_next_with_them_compile_the_model_once():
    own = GraphCache()
    fast = accelerate(model(), SETTINGS, own)
    tiny_models.sample(fast, 96, 120)
    compiled = graphs()
    for start, end in [(0.4, 1.0), (0.0, 0.8)]:
        conds = conditioned([(control(), 0.8, start, end)])
        out = tiny_models.sample(fast, 96, 120, steps=5, **conds)
        assert torch.equal(out, tiny_models.sample(model(), 96, 120, steps=5, **conds))
    assert graphs() == compiled


@pytest.mark.parametrize("build", [functools.partial(control_lora, **SMALL), adapter], ids=["Control-LoRA", "T2I"])
def test_what_is_built_or_moved_anew_in_every_run_is_found_compiled(build):
    net = build()
    assert_same_image((net, 0.8, 0.0, 1.0), height=128)
    compiled = graphs()
    for changes in ({}, {"batch": 2}, {"width": 160, "height": 136}):
        assert_same_image((net, 0.6, 0.0, 0.8), steps=4, **({"height": 128} | changes))
    assert_same_image((build(), 0.8, 0.0, 1.0), height=128)
    assert graphs() == compiled and fallbacks.rows() == []


def test_control_nets_of_all_sorts_chained():
    nets = [(control(), 0.8, 0.0, 1.0), (control_lora(**SMALL), 0.5, 0.0, 0.6), (adapter(), 0.7, 0.3, 1.0)]
    assert_same_image(*nets, steps=4, height=128)
    assert fallbacks.rows() == []


def test_flux_with_a_control_net_of_pixels_and_one_of_latents():
    inpaint = controls.CONTROLS["Flux inpaint"].build()
    union = controls.CONTROLS["Flux Union"].build()
    union.set_extra_arg("control_type", [2])
    conds = functools.partial(conditioned, conditioning=CONTROLLED.conditioning)
    base = CONTROLLED.load()
    compiled = []
    for nets in ([(inpaint, 0.6, 0.0, 1.0, taesd(16))], [(union, 0.6, 0.0, 0.8, taesd(16))], []):
        fast = [(accelerate_control(net, SETTINGS, cache), *rest) for net, *rest in nets]
        out = CONTROLLED.sample(accelerate(base, SETTINGS, cache), size=1, **conds(fast))
        plain = CONTROLLED.sample(base, size=1, **conds(nets))
        assert plain.isfinite().all() and (out - plain).abs().max() <= 1e-5 * plain.abs().max()
        compiled.append(graphs())
    assert compiled[0] == 4  # two kinds, of the model and of the ControlNet
    assert len(set(compiled)) == 1 and fallbacks.rows() == []


def compiled_as_a_module(network):
    return torch.compile(network, backend="eager")


def compiled_in_place(network):
    network.compile(backend="eager")
    return network


def with_a_compiled_block(network):
    network.input_blocks[1] = torch.compile(network.input_blocks[1], backend="eager")
    return network


@pytest.mark.parametrize("by_others", [compiled_as_a_module, compiled_in_place, with_a_compiled_block])
def test_network_that_is_compiled_already_is_left_to_whoever_compiled_it(by_others):
    net = unet_control(**SMALL)
    net.control_model = by_others(net.control_model)
    assert_same_image((net, 0.8, 0.0, 1.0))
    reasons = {row["reason"] for row in fallbacks.rows()}
    assert reasons == {"all or part of it is already compiled as a whole"}


def test_network_of_which_no_block_can_be_compiled_runs_as_it_is_and_says_so():
    net = unet_control(**SMALL)
    for _, block in blocks(net.control_model):
        block.forward = functools.partial(block.forward)  # as an extension replaces it
    assert_same_image((net, 0.8, 0.0, 1.0))
    *blocks_left, network = (row["reason"] for row in fallbacks.rows())
    assert set(blocks_left) == {"another extension has replaced its forward"}
    assert network == "it has no repeated blocks that can be compiled"


def test_control_net_whose_streamed_weights_cannot_be_taken_says_so(monkeypatch, caplog):
    monkeypatch.setattr(controlnet, "takes_streamed_weights", lambda: False)
    net = unet_control(**SMALL)
    accelerate_control(net, SETTINGS, cache)
    assert "streamed" not in caplog.text
    monkeypatch.setattr(net.control_model_wrapped, "is_dynamic", lambda: True, raising=False)
    accelerate_control(net, SETTINGS, cache)
    assert "streamed" in caplog.text


def test_the_node_hands_out_an_accelerated_control_and_says_what_it_takes():
    out = AccelControlNet.execute(control(), shapes="any size", backend="eager", on_trouble="run eagerly").result[0]
    assert out is not control() and type(out) is type(control())
    assert torch.equal(
        tiny_models.sample(model(), 96, 120, **conditioned([(out, 0.8, 0.0, 1.0)])),
        image((control(), 0.8, 0.0, 1.0), fast=False),
    )
    assert graphs() > 0
