"""Capturing calls may fail at any point, the image may not: whatever goes wrong, this image and all later ones are
those of compiled blocks, nothing but an interrupt reaches the sampler, and the report says why.

What fails is a capturer on the CPU (`kit.captures`); the models, samplers, LoRAs and DeepCache are the real ones.
"""

import functools
import sys

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
from kit.captures import EAGER_BLOCKS, STAGES, CpuCapturer, left, reasons
from kit.deep_cache import SMALL
from kit.families import DITS
from kit.step_cache import every
from kit.thorough import thorough_except

Interrupt = comfy.model_management.InterruptProcessingException

EVERYWHERE = ("why_not", "reset", *STAGES)


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


def lora(model):
    """On the first weight that is a matrix of some size."""
    patched = model.clone()
    weights = model.model.state_dict()
    name = next(n for n, w in weights.items() if n.startswith("diffusion_model.") and w.ndim >= 2 and w.numel() > 1000)
    noise = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(3))
    patched.add_patches({name: ("diff", (noise,))}, 0.5)
    return patched


def cached(model):
    return apply_deep_cache(model, every(3, points=2))


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


@pytest.mark.parametrize(
    "name, error",
    [pytest.param("UNet", RuntimeError, marks=pytest.mark.thorough), ("Flux", torch.OutOfMemoryError)],
)
@pytest.mark.parametrize("stage", [*EVERYWHERE, "wrong"])
def test_failure_at_any_stage_leaves_this_image_and_all_later_ones_right(stage, name, error):
    capturer, cache = troubled(stage, error)
    assert_session_is_right(name, cache, but=["another size"] if name == "Flux" else ())
    assert left(capturer) == len(cache.captures.members) <= (stage == "later replay")
    said = "differs from the call" if stage == "wrong" else "simulated"
    assert reasons() and all(said in reason for reason in reasons())
    if error is torch.OutOfMemoryError and stage not in ("wrong", "why_not"):
        assert all("memory is short" in reason for reason in reasons())
    # Whatever has failed has spoilt nothing for when it works again.
    capturer.fail_at = None
    cache.clear()
    assert torch.equal(image(fast(load(name), cache), name), plain(name)["the same"])
    assert left(capturer) == 1


# A failure is tested at each; an interrupt goes through the same code.
@pytest.mark.parametrize("stage", thorough_except(EVERYWHERE, "why_not", "begin", "during", "later replay"))
def test_interrupt_at_any_stage_ends_the_run_and_every_later_image_is_right(stage):
    capturer, cache = troubled(stage, Interrupt)
    for _ in range(2):
        with pytest.raises(Interrupt):
            image(fast(load("Flux"), cache), "Flux")
    capturer.fail_at = None
    assert_session_is_right("Flux", cache, but=["another size"])
    assert reasons() == [] and capturer.replays > 3


@pytest.mark.parametrize("stage", thorough_except(["first replay", "later replay"], "later replay"))
def test_failure_in_a_later_image_is_as_harmless_as_in_the_first(stage):
    capturer, cache = troubled()
    assert_session_is_right("Flux", cache)
    assert capturer.replays > 3
    capturer.fail_at = stage
    assert_session_is_right("Flux", cache)
    assert left(capturer) == 0 and reasons()


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


class Drawing(torch.nn.SiLU):
    """Draws a random number that changes nothing."""

    def forward(self, x):
        return super().forward(x) + 0 * torch.rand(())


def test_what_the_watch_finds_keeps_the_call_and_its_random_numbers_as_they_are():
    model = tiny_models.unet(**SMALL)
    model.model.diffusion_model.time_embed[1].__class__ = Drawing
    capturer, cache = troubled()
    torch.manual_seed(0)
    expected, after = image(model, "UNet"), torch.rand(3)
    for _ in range(2):
        torch.manual_seed(0)
        assert torch.equal(image(fast(model, cache), "UNet"), expected)
    assert capturer.captures == 0 and len(reasons()) == 1 and "it draws random numbers" in reasons()[0]
    torch.manual_seed(0)
    image(fast(model, cache), "UNet")
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("bounds", [{"max_bytes": 0}, {"max_entries": 1}])
def test_budget_of_nothing_or_of_one_entry_is_kept_and_told(bounds):
    capturer, cache = troubled(**bounds)
    for _ in range(2):
        assert_session_is_right("Flux", cache)
        assert cache.statistics()["entries"] <= bounds.get("max_entries", 100)
    assert left(capturer) == cache.statistics()["entries"]
    if bounds == {"max_entries": 1}:
        assert capturer.replays > 3  # runs with DeepCache need two, the others are captured
        assert all("all of its 1 block types" in reason for reason in reasons())
    else:
        assert capturer.replays == 0 and reasons()


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


class Stuck:
    """Something in a captured graph that raises when it is freed."""

    def __del__(self):
        raise RuntimeError("simulated")


def test_error_while_memory_goes_back_is_nobodys(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: told.append(str(error.exc_value)))  # pytest's keeps frames
    capturer, cache = troubled()
    capture = capturer.capture

    def stuck(device, call):
        graph, out = capture(device, call)
        graph.stuck = Stuck()
        return graph, out

    capturer.capture = stuck
    assert_session_is_right("Flux", cache)
    comfy.model_management.unload_all_models()
    assert left(capturer) == 0 and len(told) == capturer.captures
    assert torch.equal(image(fast(load("Flux"), cache), "Flux"), plain("Flux")["the same"])
    assert reasons() == []
