"""Capturing calls may fail at any point, the image may not: whatever goes wrong, this image and all later ones are
those of compiled blocks, nothing but an interrupt reaches the sampler, and the report says why.

What fails is a capturer on the CPU (`kit.captures`); the models, samplers, LoRAs and DeepCache are the real ones.
"""

import functools

import comfy.model_management
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.cuda_graphs.capture_key import CaptureKey
from comfy_accel.accel.cuda_graphs.pool import CapturePool
from comfy_accel.accel.dispatch.block_runner import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from kit import tiny_models
from kit.captures import EAGER_BLOCKS, CpuCapturer, left, reasons
from kit.deep_cache import SMALL
from kit.families import DITS
from kit.other_nodes import lora
from kit.step_cache import every

Interrupt = comfy.model_management.InterruptProcessingException


class Troubled(CpuCapturer):
    """Fails where the other does, and where it is asked and where it is reset; where "wrong", it captures less."""

    def why_not(self, device):
        if self.fails_at("why_not"):
            raise self.error("simulated")
        return super().why_not(device)

    def reset(self):
        if self.fails_at("reset"):
            raise self.error("simulated")
        super().reset()

    def capture(self, device, call):
        graph, out = super().capture(device, call)
        if self.fails_at("wrong"):
            del graph._operators[len(graph._operators) // 2 :]
        return graph, out


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


def cached(model):
    return apply_deep_cache(model, every(3))


SESSION = {
    "the same": (lambda model: model, 0),
    "another size": (lambda model: model, 1),
    "with a LoRA": (lora, 0),
    "with DeepCache": (cached, 0),
    "again": (lambda model: model, 0),
}


@functools.cache
def plain(name):
    """The session's images without any of it."""
    return {what: image(change(load(name)), name, size) for what, (change, size) in SESSION.items()}


def troubled(stage=None, error=RuntimeError, **bounds):
    capturer, cache = Troubled(stage, error), GraphCache(**bounds)
    cache.captures = CapturePool(capturer)
    return capturer, cache


def fast(model, cache, settings=EAGER_BLOCKS):
    return accelerate(model, settings, cache, graphs=True)


def assert_session_is_right(name, cache, but=()):
    for what, (change, size) in SESSION.items():
        if what in but:
            continue
        got = image(fast(change(load(name)), cache), name, size)
        assert torch.equal(got, plain(name)[what]), what


# Of the other stages and errors unit/test_model_capture.py asks the same.
@pytest.mark.parametrize("stage", ["why_not", "reset", "during", "later replay", "wrong"])
def test_failure_at_any_stage_leaves_this_image_and_all_later_ones_right(stage):
    capturer, cache = troubled(stage, torch.OutOfMemoryError)
    assert_session_is_right("Flux", cache, but=["another size"])
    assert left(capturer) == len(cache.captures.members) <= (stage == "later replay")
    said = {"wrong": "differs from the call", "why_not": "simulated"}.get(stage, "memory is short")
    assert reasons() and all(said in reason for reason in reasons())
    # Whatever has failed has spoilt nothing for when it works again.
    capturer.fail_at = None
    cache.clear()
    assert torch.equal(image(fast(load("Flux"), cache), "Flux"), plain("Flux")["the same"])
    assert left(capturer) == 1


@pytest.mark.parametrize("stage", ["why_not", "later replay"])
def test_interrupt_ends_the_run_and_every_later_image_is_right(stage):
    capturer, cache = troubled(stage, Interrupt)
    for _ in range(2):
        with pytest.raises(Interrupt):
            image(fast(load("Flux"), cache), "Flux")
    capturer.fail_at = None
    assert_session_is_right("Flux", cache, but=["another size"])
    assert reasons() == [] and capturer.replays > 3


def test_failure_inside_compiled_blocks_leaves_them_compiled_and_right():
    settings = CompileSettings(backend="eager")
    capturer, cache = troubled()
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
    capturer, cache = troubled()
    model_fast = fast(model, cache)
    got = image(model_fast, "UNet", steps=6, callback=interfere(change, model_fast, 3))
    assert torch.equal(got, expected)
    assert torch.equal(image(model_fast, "UNet", steps=6), later)
    assert left(capturer) == 1
