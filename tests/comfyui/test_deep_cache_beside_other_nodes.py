"""DeepCache beside other nodes: a skipped step asks nobody anything, and full ones are as without us."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.controlnet import accelerate_control
from comfy_accel.accel.report.run_record import records
from kit import tiny_models
from kit.controls import adapter, control_lora, control_net, unet_control, watched
from kit.deep_cache import SMALL, assert_no_trace, cached, calls_of, counts, said, split_chunks
from kit.other_nodes import (
    SD15,
    both_attentions,
    controlled,
    core,
    differential_diffusion,
    easy_cache,
    guided,
    hooked,
    image_prompt,
    in_areas,
    in_masks,
    lazy_cache,
    lora,
    masked_sample,
    perpendicular_guider,
    picture,
    ramp,
    tiled,
    two_prompts,
    windowed,
)
from kit.step_cache import letters
from torch._dynamo.utils import counters

STEPS = 7
SIZE = {"width": 72, "height": 88, "steps": STEPS}


@pytest.fixture
def unet():
    return tiny_models.unet(**SMALL)


@dataclass(frozen=True)
class Beside:
    """Something beside DeepCache.

    patch: what a node does to the model. run: what the run is given; sample: by which. taken: of the steps. apart:
    whether each prompt is asked of the model in a call of its own.
    """

    patch: Callable = lambda model: model
    run: dict = field(default_factory=dict)
    sample: Callable = tiny_models.sample
    taken: str = letters(STEPS)
    apart: bool = False
    layout: dict = field(default_factory=lambda: SMALL)


def prompts(positive):
    return {"positive": positive}


def prompt_from(percent):
    """One that begins then, beside one for all."""
    return tiny_models.conditioning(seed=1) + tiny_models.conditioning(seed=5, start_percent=percent)


def of_nine_channels():
    """What core's InpaintModelConditioning puts there."""
    mask = (ramp() > 0.4).float()
    extra = {"concat_latent_image": picture(seed=8), "concat_mask": mask}
    given = {name: tiny_models.conditioning(seed=i, **extra) for i, name in ((1, "positive"), (2, "negative"))}
    return {"noise_mask": mask, "latent": picture(), **given}


MASKED = {"noise_mask": ramp(), "latent": picture()}
ANEW = "FFSFFSS"
"""Where another thing is asked from the fourth step on."""

BESIDE = {
    "image prompt": Beside(functools.partial(image_prompt, blocks=[("input", 1), ("middle", 0)])),
    "LoRA of changing strength": Beside(
        lambda model: hooked(model, ((0.0, 1.0), (0.45, 0.1)))[0],
        prompts(hooked(tiny_models.unet(**SMALL), ((0.0, 1.0), (0.45, 0.1)))[1]),
        taken=ANEW,
    ),
    # Guidance
    "PAG and SAG": Beside(both_attentions),
    "no guidance": Beside(run={"cfg": 1.0}),
    "two prompts": Beside(sample=guided(two_prompts)),
    "PerpNeg's guider": Beside(sample=guided(perpendicular_guider)),
    # Areas, times and windows
    "areas": Beside(run=prompts(in_areas())),
    "masks, apart": Beside(run=prompts(in_masks()), apart=True),
    "a prompt that begins late": Beside(run=prompts(prompt_from(0.45)), taken=ANEW),
    "a prompt that begins late, apart": Beside(run=prompts(prompt_from(0.45)), taken=ANEW, apart=True),
    # One noise level more than frames: core 0.3.75 compares the two element by element.
    "windows that move": Beside(lambda model: windowed(model, "standard_uniform"), {"batch": 8}),
    # Masks
    "inpainting model": Beside(run=of_nine_channels(), sample=masked_sample, layout=SMALL | {"in_channels": 9}),
    "noise mask": Beside(run=MASKED, sample=masked_sample),
    "differential diffusion": Beside(differential_diffusion, MASKED, masked_sample),
}


@pytest.mark.parametrize("name", BESIDE)
def test_skipped_steps_call_no_model_whatever_is_beside_in_either_order_of_the_nodes(name):
    beside = BESIDE[name]
    plain = tiny_models.unet(**beside.layout)
    if beside.apart:
        split_chunks(plain)
    run = beside.run if "latent" in beside.run else SIZE | beside.run
    sample = functools.partial(beside.sample, **{"steps": STEPS} | run)
    calls, full = calls_of(plain), sample(beside.patch(plain))
    levels = sorted(set(calls), reverse=True)
    assert len(levels) == STEPS
    expected = [level for level in calls if beside.taken[levels.index(level)] == "F"]
    made = []
    for model in (cached(beside.patch(plain)), beside.patch(cached(plain))):
        calls.clear()
        made.append(sample(model))
        assert records.last().skipping.steps_taken == beside.taken and calls == expected
    assert torch.equal(*made) and made[0].isfinite().all() and not torch.equal(made[0], full)
    assert torch.equal(sample(beside.patch(cached(plain, 1))), full)
    assert torch.equal(sample(beside.patch(plain)), full)


def test_masked_image_keeps_what_is_not_masked(unet):
    mask = (ramp() > 0.4).float()
    out = masked_sample(cached(unet), STEPS, mask, picture(), denoise=0.6)
    kept = mask[..., ::8, ::8].expand_as(out) == 0
    assert counts()[1] and torch.allclose(out[kept], picture()[kept], atol=1e-5)


def test_lora_that_comes_changes_and_goes_leaves_nothing_of_its_own(unet, sample):
    images = [sample(cached(on(unet)), **SIZE) for on in (lambda model: model, lora, lambda model: lora(model, 2, 0.3))]
    assert not torch.equal(images[0], images[1]) and not torch.equal(images[1], images[2])
    assert torch.equal(sample(cached(unet), **SIZE), images[0])


# ControlNets


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("ends, taken, second", [((1.0, 1.0), "FFSSFSS", 3), ((1.0, 0.45), ANEW, 2)])
def test_control_nets_run_in_full_steps_alone(unet, sample, apart, ends, taken, second):
    first, other = control_net(**SMALL), control_net(seed=8, **SMALL)
    positive = controlled(first, other, ends=ends)
    model = cached(split_chunks(unet) if apart else unet)
    made = sample(model, **SIZE, positive=positive)
    assert records.last().skipping.steps_taken == taken
    assert (len(first.calls), len(other.calls)) == (taken.count("F") * (1 + apart), second * (1 + apart))
    assert not torch.equal(made, sample(model, **SIZE))
    assert_no_trace(model)


@pytest.mark.parametrize("layout, make", [(SMALL, lambda: control_lora(**SMALL)), (SD15, adapter)], ids=["LoRA", "T2I"])
def test_other_control_objects_are_asked_in_full_steps_alone(layout, make, sample, monkeypatch):
    control, asked = make(), []
    get = type(control).get_control
    monkeypatch.setattr(type(control), "get_control", lambda *args: asked.append(1) or get(*args))
    run = {"width": 64, "height": 128, "steps": STEPS, "positive": controlled(control)}
    assert sample(cached(tiny_models.unet(**layout)), **run).isfinite().all()
    assert counts() == (3, 4) and len(asked) == 3


# Caches of whole steps


MAKES_CALLS = "makes the model's calls, and may skip some itself (use one of the two)"
CACHES = {
    "EasyCache": (easy_cache, "EasyCache or LazyCache skips steps of its own (use one of the two)"),
    "LazyCache": (lazy_cache, "EasyCache or LazyCache skips steps of its own (use one of the two)"),
    "tiles": (tiled, MAKES_CALLS),
}


@pytest.mark.parametrize("name", CACHES)
def test_image_beside_a_node_that_may_skip_steps_itself_is_that_nodes_alone(unet, sample, caplog, name):
    other, why = CACHES[name]
    run = {**SIZE, "steps": 10}
    expected, plain = sample(other(unet), **run), sample(unet, **run)
    assert not torch.equal(expected, plain)
    for both in (other(cached(unet)), cached(other(unet))):
        caplog.clear()
        with caplog.at_level("INFO"):
            assert torch.equal(sample(both, **run), expected)
        assert counts()[1] == 0 and why in records.last().skipping.why_full
        assert said(caplog) and all(why in line and " 0 " not in line for line in said(caplog))
    assert torch.equal(sample(unet, **run), plain)
    sample(cached(unet), **run)
    assert counts()[1] and records.last().skipping.why_full is None, "once the other node is gone"


@pytest.mark.parametrize("module", ["/ComfyUI/custom_nodes/a-pack.nodes", "custom_nodes.a-pack.nodes"])
def test_node_that_makes_the_models_calls_is_named_by_its_packs_folder_or_its_key(unet, sample, module):
    model = cached(unet)
    wrapper = functools.partial(lambda apply_model, args: apply_model(args["input"], args["timestep"], **args["c"]))
    wrapper.__module__ = module
    model.set_model_unet_function_wrapper(wrapper)
    sample(model, **SIZE)
    assert records.last().skipping.why_full == f"another node (a-pack) {MAKES_CALLS}"
    for key, name in (("spectrum", "Spectrum"), ("cache_dit_turbo", "CacheDiT")):
        (model := cached(unet)).model_options["transformer_options"][key] = object()
        sample(model, **SIZE)
        assert records.last().skipping.why_full == f"{name} skips steps of its own (use one of the two)"


# Compiled


def test_accelerated_with_everything_around_compiles_nothing_more_in_either_order(sample):
    without_attention = {"channel_mult": [1, 2], "num_res_blocks": [0, 1], "transformer_depth": [0]}
    control = watched(unet_control(**without_attention, transformer_depth_middle=-2))
    settings, graphs = CompileSettings(backend="eager"), GraphCache()
    model = core("nodes_freelunch.FreeU_V2", 1.3, 1.4, 0.9, 0.2)(lora(tiny_models.res_blocks()))
    run = {**SIZE, "positive": controlled(accelerate_control(control, settings, graphs))}
    expected = sample(cached(model), **{**run, "positive": controlled(control)})
    plain = sample(accelerate(model, settings, graphs), **run)
    before = counters["stats"]["unique_graphs"]
    assert before
    for both in (accelerate(cached(model), settings, graphs), cached(accelerate(model, settings, graphs))):
        control.calls.clear()
        made = sample(both, **run)
        assert (made - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert counts() == (3, 4) and len(control.calls) == 3
        assert_no_trace(both)
    assert torch.equal(sample(accelerate(model, settings, graphs), **run), plain)
    assert counters["stats"]["unique_graphs"] == before
