"""Capturing calls may fail at any point, the image may not: whatever goes wrong, this image and all later ones are
those of compiled blocks, nothing but an interrupt reaches the sampler, and the report says why.

What fails is a capturer on the CPU (`kit.captures`); the models, samplers, LoRAs and DeepCache are the real ones.
"""

import functools

import comfy.model_management
import pytest
import torch
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.cuda_graphs.capture_key import CaptureKey
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from kit import tiny_models
from kit.captures import EAGER_BLOCKS, CpuCapturer, capturing_cache, left, reasons
from kit.deep_cache import SMALL
from kit.families import DITS
from kit.other_nodes import lora

Interrupt = comfy.model_management.InterruptProcessingException


@pytest.fixture(autouse=True)
def clean():
    yield
    comfy.model_management.unload_all_models()


@functools.cache
def load(name):
    return tiny_models.unet(**SMALL) if name == "UNet" else DITS[name].load()


def image(model, name, size=0, steps=4, **more):
    if name == "UNet":
        return tiny_models.sample(model, width=(64, 96)[size], height=64, steps=steps, **more)
    return DITS[name].sample(model, size=size, steps=steps, **more)


def fast(model, cache, settings=EAGER_BLOCKS):
    return accelerate(model, settings, cache, graphs=True)


def test_interrupt_ends_the_run_and_the_next_image_is_right():
    """Of other errors, at any stage, unit/test_model_capture.py asks the same."""
    cache, capturer = capturing_cache(CpuCapturer("later replay", Interrupt))
    for _ in range(2):
        with pytest.raises(Interrupt):
            image(fast(load("Flux"), cache), "Flux")
    capturer.fail_at = None
    assert torch.equal(image(fast(load("Flux"), cache), "Flux"), image(load("Flux"), "Flux"))
    assert reasons() == [] and capturer.replays > 0


def test_failure_inside_compiled_blocks_leaves_them_compiled_and_right():
    settings = CompileSettings(backend="eager")
    cache, capturer = capturing_cache()
    expected = image(accelerate(load("Wan"), settings, cache), "Wan")
    kernels = cache.statistics()["compilations"]
    for stage in ("warm_up", "during", "later replay"):
        capturer.fail_at = stage
        for _ in range(2):
            assert torch.equal(image(fast(load("Wan"), cache, settings), "Wan"), expected)
        assert cache.statistics()["compilations"] == kernels > 0
        assert left(capturer) == 0 and {row["block"] for row in fallbacks.rows()} == {"WanModel"}
        for key in cache.keys():  # so that the next stage is reached
            if isinstance(key, CaptureKey):
                cache.evict(key)
    capturer.fail_at, capturer.warm_ups, capturer.captures = None, 0, 0
    assert torch.equal(image(fast(load("Wan"), cache, settings), "Wan"), expected)
    # Once as they are, in the dry run, and once with the graphs of the blocks.
    assert (capturer.warm_ups, capturer.captures) == (2, 1)


def move_weights(model):
    for parameter in model.model.diffusion_model.parameters():
        parameter.data = parameter.data.clone()


def move_one_weight(model):
    parameter = list(model.model.diffusion_model.parameters())[-3]
    parameter.data = parameter.data.clone()


def unload(model):
    comfy.model_management.unload_all_models()


def ask_memory_back(model):
    comfy.model_management.free_memory(1e30, torch.device("cpu"))


def detach(model):
    model.detach()


def interfere(change, model, at):
    def callback(step, *args):
        if step == at:
            change(model)

    return callback


@pytest.mark.parametrize(
    "change, patched",
    [
        (move_weights, False),
        (move_one_weight, True),
        (unload, False),
        (unload, True),
        (ask_memory_back, False),
        (detach, True),
    ],
)
def test_weights_moved_or_unloaded_between_two_steps_leave_the_image_right(change, patched):
    model = tiny_models.unet(**SMALL)
    model = lora(model) if patched else model
    expected = image(model, "UNet", steps=6, callback=interfere(change, model, 3))
    later = image(model, "UNet", steps=6)
    cache, capturer = capturing_cache()
    model_fast = fast(model, cache)
    got = image(model_fast, "UNet", steps=6, callback=interfere(change, model_fast, 3))
    assert torch.equal(got, expected)
    assert torch.equal(image(model_fast, "UNet", steps=6), later)
    assert left(capturer) == 1
