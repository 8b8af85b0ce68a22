"""Models come and go: what was compiled stays, and nothing else of them does."""

import gc
import weakref

import comfy.model_management
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from kit import tiny_models
from kit.tiny_models import sample

SETTINGS = CompileSettings(backend="eager")

cache = GraphCache()
"""One for the file: tracing is most of a test's time."""


def image(model):
    return sample(model, 64, 96, steps=1)


def test_unloaded_and_loaded_again_compiles_nothing():
    model = tiny_models.small_unet()
    expected = image(model)
    fast = accelerate(model, SETTINGS, cache)
    image(fast)
    compiled = cache.statistics()["compilations"]
    for unload in (comfy.model_management.unload_all_models, fast.detach):
        unload()
        assert torch.equal(image(fast), expected)
    assert cache.statistics()["compilations"] == compiled > 0
    assert fallbacks.rows() == []


def test_model_that_is_gone_leaves_nothing_but_kernels():
    model = tiny_models.small_unet()
    fast = accelerate(model, SETTINGS, cache)
    image(fast)
    network = model.model.diffusion_model
    left = [weakref.ref(network), *(weakref.ref(parameter) for parameter in network.parameters())]
    comfy.model_management.unload_all_models()
    del model, fast, network
    gc.collect()
    assert [ref() for ref in left if ref() is not None] == []
    assert cache.statistics()["graphs"] > 0
    again = tiny_models.small_unet(seed=3)
    compiled = cache.statistics()["compilations"]
    assert torch.equal(image(accelerate(again, SETTINGS, cache)), image(again))
    assert cache.statistics()["compilations"] == compiled
