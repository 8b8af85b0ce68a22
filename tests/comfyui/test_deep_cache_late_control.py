"""ControlNets under DeepCache where a skipped step runs no block: they run in full steps alone, for the same image."""

import copy
import gc
import weakref

import comfy.controlnet
import comfy.hooks
import comfy.model_management
import comfy.samplers
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models import deep_cache as host
from comfy_accel.accel.hosts.comfyui.models import late_control
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.controlnet import accelerate_control
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from kit import controls, tiny_models
from kit.captures import EAGER_BLOCKS, reasons
from kit.controls import adapter, control_net, watched
from kit.deep_cache import SMALL, assert_close, assert_no_trace, cached, counts, failing, split_chunks
from kit.families import CONTROLLED
from kit.other_nodes import (
    SD15,
    both_attentions,
    controlled,
    guided,
    perpendicular,
    windowed,
)
from kit.tiny_models import sample_latent, with_control
from torch._dynamo.utils import counters

RUN = {"width": 72, "height": 88, "steps": 6}


@pytest.fixture
def model():
    return tiny_models.unet(**SMALL)


@pytest.fixture
def control():
    return control_net(**SMALL)


@pytest.fixture
def compared(monkeypatch, control):
    """From what makes an image to that image, which must be the one with each ControlNet run before the model is
    called, in as many skipped steps; and the calls of the ControlNet so, and as it is."""

    def compare(make):
        control.calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(host, "postponed", lambda conds, model_options: conds)
            expected, steps = make(), counts()
        early = len(control.calls)
        assert torch.equal(make(), expected)
        assert counts() == steps and steps[1]
        return expected, early, len(control.calls) - early

    return compare


def another():
    return control_net(seed=8, **SMALL)


def for_part(*controls, **extra):
    """A prompt for the whole image, and one with `extra`, both with the controls."""
    whole, part = (controlled(*controls, seed=seed) for seed in (1, 5))
    return [*whole, [part[0][0], {**part[0][1], **extra}]]


PROMPTS = {
    "both prompts": (controlled, False),
    "the positive prompt": (lambda control: controlled(control, both=False), True),
    "a chain": (lambda control: controlled(control, another(), ends=(1.0, 0.5)), False),
    "until half": (lambda control: controlled(control, ends=(0.5,)), True),
    "areas": (lambda control: for_part(control, area=(6, 5, 2, 1), strength=0.8), False),
    "a prompt that begins on a skipped step": (lambda control: for_part(control, start_percent=0.15), True),
}
"""What has the ControlNet, and whether features are extrapolated, of a batch with each prompt in calls of its own."""


@pytest.mark.parametrize("name", PROMPTS)
def test_image_is_the_one_with_the_control_net_run_on_every_step(model, control, compared, no_fallback, name):
    make, is_apart = PROMPTS[name]
    run = {**RUN, "batch": 1 + is_apart, "positive": make(control)}
    skipping = cached(split_chunks(model) if is_apart else model, points=1 + is_apart)
    image, early, late = compared(lambda: tiny_models.sample(skipping, **run))
    assert counts()[1] >= 2 and 0 < late < early
    assert not torch.equal(image, tiny_models.sample(skipping, **{**run, "positive": None}))
    assert_no_trace(skipping)


def test_control_net_runs_in_full_steps_alone(model, control, sample):
    sample(cached(model), **RUN, positive=controlled(control))
    assert counts() == (2, 4) and len(control.calls) == 2


def test_control_net_runs_on_every_step_where_the_sampler_adds_noise(model, control, sample):
    sample(cached(model), **RUN, sampler="euler_ancestral", positive=controlled(control))
    assert counts() == (6, 0) and len(control.calls) == 6


def test_control_net_of_a_transformer_runs_on_every_step():
    """Its last residual of a list is added behind the last block, so that skipped steps use it."""
    control = watched(CONTROLLED.family.control_net(torch.float32))
    prompts = {"positive": with_control(CONTROLLED.conditioning(1), control)}
    CONTROLLED.sample(cached(CONTROLLED.load()), **prompts)
    full, skipped = counts()
    assert skipped and len(control.calls) >= full + skipped


@pytest.mark.parametrize(
    "layout, make", [(SMALL, lambda: controls.control_lora(**SMALL)), (SD15, adapter)], ids=["LoRA", "T2I"]
)
def test_other_control_objects_of_core_wait_too(layout, make, compared, monkeypatch):
    skipping, control = cached(tiny_models.unet(**layout)), make()
    run = {**RUN, "width": 64, "height": 128, "positive": controlled(control)}
    asked, get = [], type(control).get_control
    monkeypatch.setattr(type(control), "get_control", lambda *args: asked.append(1) or get(*args))
    image, *_ = compared(lambda: tiny_models.sample(skipping, **run))
    assert counts() == (2, 4) and len(asked) == 6 + 2
    assert not torch.equal(image, tiny_models.sample(skipping, **{**run, "positive": None}))


# What asks more than once, or by ways of its own


def dual_guider(control):
    """Of three prompts."""
    from comfy_extras.nodes_custom_sampler import Guider_DualCFG

    def make(model):
        guider = Guider_DualCFG(model)
        guider.set_conds(*(controlled(control, seed=seed) for seed in (1, 5, 2)))
        guider.set_cfg(4.0, 2.0)
        return guider

    return guided(make)


BESIDE = {
    "guidance that asks three times": (both_attentions, {}, 3 * 2),
    "guidance with an empty prompt": (perpendicular, {}, 2),
    "two evaluations a step": (lambda model: model, {"sampler": "heun"}, None),
    # As many noise levels as frames: core 0.3.75 compares the two element by element.
    "context windows": (lambda model: windowed(model, "standard_static"), {"batch": 5, "steps": 4}, None),
    "a guider of three prompts": (lambda model: model, {}, 3 * 2),
}


@pytest.mark.parametrize("name", BESIDE)
def test_beside_other_nodes_the_image_is_the_same(model, control, compared, name):
    patch, changes, calls = BESIDE[name]
    run = {**RUN, **changes}
    sample = dual_guider(control)
    if "guider" not in name:
        sample, run = tiny_models.sample, {**run, "positive": controlled(control)}
    for skipping in (patch(cached(model)), cached(patch(model))):
        _, early, late = compared(lambda skipping=skipping: sample(skipping, **run))
        assert counts()[1] >= 2
        assert late < early and late == (calls or late)


# Steps that turn out not to be skippable


def failing_in_skipped(model, number):
    """The model with an error in the skipped call of this number."""
    skipped = set()

    def is_it(call, h):
        skipped.update([call] if h.shape[1] == 1 else [])
        return h.shape[1] == 1 and len(skipped) == number

    return failing(model, ValueError("odd"), is_it)


def test_control_net_is_back_in_the_call_that_could_not_be_skipped(model, control, compared, caplog):
    run = {**RUN, "positive": controlled(control)}
    _, _, late = compared(lambda: tiny_models.sample(cached(failing_in_skipped(model, 2)), **run))
    assert counts() == (5, 1) and late == 5
    assert "a skipped step failed (ValueError: odd)" in caplog.text


def test_interrupt_in_a_control_net_that_runs_late_is_passed_on(model, control, sample):
    error = comfy.model_management.InterruptProcessingException

    def fail(*args):
        if len(control.calls) == 2:  # in the call that was to be skipped
            raise error("late")

    control.control_model.register_forward_hook(fail)
    skipping = cached(failing_in_skipped(model, 1))
    with pytest.raises(error):
        sample(skipping, **RUN, positive=controlled(control))
    assert len(control.calls) == 2
    assert_no_trace(skipping)


def test_nothing_of_a_call_is_kept_for_a_control_net_that_never_runs(model, control, sample, monkeypatch):
    made = []

    class Watched(late_control.LateControl):
        def __init__(self, compute):
            super().__init__(compute)
            assert not any(known() is not None for known in made[:-1])  # core's own variable keeps the newest
            made.append(weakref.ref(self))

    monkeypatch.setattr(late_control, "LateControl", Watched)
    monkeypatch.setattr(host, "LateControl", Watched)
    gc.disable()
    try:
        sample(cached(model), **RUN, positive=controlled(control))
        assert len(made) == 4 and not any(known() is not None for known in made)
    finally:
        gc.enable()


def changed_residuals(executor, x, t, c_concat=None, c_crossattn=None, control=None, *args, **kwargs):
    """As code does that takes them for a dict of its own."""
    if isinstance(control, dict):
        control = copy.deepcopy(control)
        control["output"] = [residual if residual is None else residual / 2 for residual in control["output"]]
    return executor(x, t, c_concat, c_crossattn, control, *args, **kwargs)


def changed_control(executor, model, conds, x, timestep, model_options):
    for cond in (cond for group in conds for cond in group):
        assert isinstance(cond["control"], comfy.controlnet.ControlBase)
        cond["control"].strength = timestep[0].item() / 10
    return executor(model, conds, x, timestep, model_options)


def by_a_node(model, run, kind, wrapper):
    model = model.clone()
    model.add_wrapper_with_key(kind, "another", wrapper)
    return model, run


def by_a_hook(model, run, kind, wrapper):
    """A hook of the prompt adds it."""
    hooks = comfy.hooks.HookGroup()
    options = {"wrappers": {kind: {"another": [wrapper]}}}
    hooks.add(comfy.hooks.TransformerOptionsHook(options, hook_scope=comfy.hooks.EnumHookScope.HookedOnly))
    return model, {**run, "positive": comfy.hooks.set_hooks_for_conditioning(run["positive"], hooks)}


@pytest.mark.parametrize(
    "kind, wrapper, by",
    [
        *(("apply_model", changed_residuals, by) for by in (by_a_node, by_a_hook)),
        *(("diffusion_model", changed_residuals, by) for by in (by_a_node, by_a_hook)),
        ("calc_cond_batch", changed_control, by_a_node),
    ],
)
def test_wrapper_of_another_node_gets_what_it_always_got(model, control, compared, kind, wrapper, by):
    make, _ = PROMPTS["a prompt that begins on a skipped step"]
    plain = {**RUN, "positive": make(control)}
    skipping, run = by(cached(model), plain, kind, wrapper)
    image, early, late = compared(lambda: tiny_models.sample(skipping, **run))
    assert counts()[1] >= 2
    assert late == early or by is by_a_hook  # the other prompt's waits
    assert not torch.equal(image, tiny_models.sample(cached(model), **plain))


# Control objects that are left alone


class OfAnotherPack(comfy.controlnet.ControlNet):
    """As Advanced-ControlNet's, which count the steps they run in."""

    def copy(self):
        copied = OfAnotherPack(None, load_device=self.load_device)
        copied.control_model, copied.control_model_wrapped = self.control_model, self.control_model_wrapped
        self.copy_to(copied)
        return copied


def of_another_pack(control):
    made = OfAnotherPack(control.control_model, load_device=control.load_device)
    return controlled(made)


def chained_to_one(control):
    return controlled(OfAnotherPack(another().control_model, load_device=control.load_device), control)


def with_a_method_of_its_own(control):
    positive = controlled(control)
    own = positive[0][1]["control"]
    own.get_control = own.get_control
    return positive


@pytest.mark.parametrize("make", [of_another_pack, chained_to_one, with_a_method_of_its_own])
def test_control_object_of_another_pack_runs_on_every_step(model, control, sample, make):
    sample(cached(model), **RUN, positive=make(control))
    assert counts() == (2, 4) and len(control.calls) == 6


def test_clones_on_several_devices_have_control_objects_of_their_own(control):
    assert late_control.can_wait(control, {})
    assert not late_control.can_wait(control, {"multigpu_clones": {torch.device("cpu"): None}})


# Quality


def test_quality_is_reached_with_a_control_net():
    """On the trained network; the ControlNet changes its image at 33 dB."""
    from dev.bench import toy

    network = toy.load()
    control = watched(toy.NETWORKS["unet"].family.control_net(torch.float32))
    positive = with_control(toy.conditioning(torch.tensor([3])), control)
    positive[0][1]["control"].strength = 0.1
    negative = toy.conditioning(torch.tensor([toy.NULL_CLASS]))

    def made(model):
        control.calls.clear()
        empty = torch.zeros(1, toy.CHANNELS, 16, 16)
        with torch.inference_mode():
            return sample_latent(model, empty, positive, negative, 30, toy.CFG, "euler", "normal", 1)

    plain = made(network)
    error = (made(apply_deep_cache(network, DeepCacheSettings(quality=40.0))) - plain).square().mean().sqrt()
    assert 20 * torch.log10((plain.max() - plain.min()) / error) >= 40 - 1
    full, skipped = counts()
    assert skipped >= 6 and len(control.calls) == full


# Beside Accelerate Model and Accelerate ControlNet


WITHOUT_ATTENTION = {"channel_mult": [1, 2], "num_res_blocks": [0, 1], "transformer_depth": [0]}


def test_compiled_in_either_order_the_control_net_waits_and_nothing_compiles_twice(sample):
    control = watched(controls.unet_control(**WITHOUT_ATTENTION, transformer_depth_middle=-2))
    model, settings, graphs = tiny_models.res_blocks(), CompileSettings(backend="eager"), GraphCache()
    run = {**RUN, "positive": controlled(accelerate_control(control, settings, graphs))}
    expected = sample(cached(model), **{**RUN, "positive": controlled(control)})
    sample(accelerate(model, settings, graphs), **run)
    before = counters["stats"]["unique_graphs"]
    assert before
    for both in (accelerate(cached(model), settings, graphs), cached(accelerate(model, settings, graphs))):
        control.calls.clear()
        assert_close(sample(both, **run), expected)
        assert counts() == (2, 4) and len(control.calls) == 2
        assert_no_trace(both)
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("cached_first", [True, False])
def test_captured_calls_of_skipped_steps_are_without_residuals(model, control, sample, capturer, cache, cached_first):
    run = {**RUN, "width": 64, "steps": 16, "positive": controlled(control, ends=(0.5,))}
    expected = sample(cached(model, 2), **run)
    steps = counts()
    captured = lambda model: accelerate(model, EAGER_BLOCKS, cache, graphs=True)  # noqa: E731
    both = captured(cached(model, 2)) if cached_first else cached(captured(model), 2)
    for _ in range(2):
        control.calls.clear()
        assert torch.equal(sample(both, **run), expected)
        assert counts() == steps == (8, 8) and len(control.calls) == 4
    # Full steps with residuals and without, and skipped ones.
    assert capturer.captures == 3 and reasons() == []
