"""DeepCache beside ControlNet, FreeU, guidance that asks twice, other caches and compilers."""

import logging

import pytest
import tiny_models
import torch
from comfy_accel.accel.block_runner import CompileSettings
from comfy_accel.accel.deep_cache import DeepCacheRun
from comfy_accel.accel.graph_cache import GraphCache
from comfy_accel.accel.hosts.comfyui import deep_cache as host
from comfy_accel.accel.hosts.comfyui.accelerate import accelerate
from deep_cache_runs import (
    Residuals,
    assert_close,
    assert_no_trace,
    cached,
    counts,
    full_and_skipped,
    residuals,
    said_of_fallbacks,
    split_chunks,
)
from torch._dynamo.utils import counters


@pytest.fixture
def no_fallback(caplog):
    caplog.set_level(logging.WARNING)
    yield
    assert not said_of_fallbacks(caplog)


@pytest.mark.parametrize("depth", range(1, 6))
@pytest.mark.parametrize("names", [("input",), ("middle", "output"), ("input", "middle", "output")])
def test_residuals_of_shallow_layers_are_applied_on_skipped_steps(tiny_unet, no_fallback, depth, names):
    x = torch.zeros(2, 4, 23, 31)
    full, skipped = full_and_skipped(tiny_unet, depth, 23, 31, control=lambda: residuals(x, names))
    assert torch.equal(full, skipped)
    without, _ = full_and_skipped(tiny_unet, depth, 23, 31)
    assert not torch.equal(full, without)


def test_control_net_in_a_real_run(tiny_unet, sample, no_fallback):
    positive = tiny_models.conditioning(seed=1, control=Residuals(), control_apply_to_uncond=True)
    out = sample(cached(tiny_unet), 184, 248, steps=4, positive=positive)
    assert counts() == (2, 2)
    assert not torch.equal(out, sample(cached(tiny_unet), 184, 248, steps=4))
    assert_close(sample(cached(split_chunks(tiny_unet)), 184, 248, steps=4, positive=positive), out)


def free_u(model):
    from comfy_extras.nodes_freelunch import FreeU_V2

    return FreeU_V2().patch(model, 1.3, 1.4, 0.9, 0.2)[0]


def test_free_u_gets_a_feature_that_it_may_change(tiny_unet, sample, no_fallback):
    patches = free_u(tiny_unet).model_options["transformer_options"]["patches"]
    for depth in range(1, 6):
        full, skipped = full_and_skipped(tiny_unet, depth, 16, 24, patches=patches)
        assert torch.equal(full, skipped)
    one, other = cached(free_u(tiny_unet)), free_u(cached(tiny_unet))
    assert torch.equal(sample(one, steps=4), sample(other, steps=4))
    assert counts() == (2, 2)


def test_guidance_that_asks_twice_keeps_its_answers_apart(tiny_unet, sample, no_fallback):
    from comfy_extras.nodes_pag import PerturbedAttentionGuidance

    guided = PerturbedAttentionGuidance.execute(tiny_unet, 3.0).args[0]
    keys = []

    class Watched(DeepCacheRun):
        def streams(self, *args):
            keys.append(super().streams(*args))
            return keys[-1]

    host.DeepCacheRun, kept = Watched, host.DeepCacheRun
    try:
        joined = sample(cached(guided), steps=4)
    finally:
        host.DeepCacheRun = kept
    assert [[key.occurrence for key in call] for call in keys] == [[0, 0], [1]] * 4
    assert counts() == (2, 2)
    assert_close(sample(cached(split_chunks(guided)), steps=4), joined)


def test_core_compile_node_does_not_trace_a_decision(tiny_unet, sample, no_fallback):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    model = cached(tiny_unet)
    expected = sample(model, 64, 64, steps=4)
    set_torch_compile_wrapper(model, backend="eager")
    assert torch.equal(sample(model, 64, 64, steps=4), expected)
    assert counts() == (2, 2)


@pytest.mark.parametrize("cached_first", [True, False])
def test_accelerate_model_in_either_order_compiles_nothing_more(tiny_unet, sample, no_fallback, cached_first):
    expected = sample(cached(tiny_unet), 160, 240, steps=4)
    compiled = GraphCache()
    fast = lambda model: accelerate(model, CompileSettings(backend="eager"), compiled)  # noqa: E731
    sample(fast(tiny_unet), 160, 240, steps=4)
    before = counters["stats"]["unique_graphs"]
    assert before
    model = fast(cached(tiny_unet)) if cached_first else cached(fast(tiny_unet))
    assert_close(sample(model, 160, 240, steps=4), expected)
    assert counts() == (2, 2)
    assert counters["stats"]["unique_graphs"] == before
    assert_no_trace(model)


def test_easy_cache_in_either_order(tiny_unet, sample, no_fallback):
    from comfy_extras.nodes_easycache import EasyCacheNode

    easy = lambda model: EasyCacheNode.execute(model, 0.2, 0.1, 0.95, False).args[0]  # noqa: E731
    for model in (easy(cached(tiny_unet)), cached(easy(tiny_unet))):
        assert sample(model, 64, 64, steps=8).isfinite().all()
        assert_no_trace(model)
