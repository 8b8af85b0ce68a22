"""DeepCache beside what else makes sampling faster: core's caches of whole steps, and graphs of compiled blocks."""

import comfy.sd
import pytest
import tiny_models
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras.nodes_freelunch import FreeU_V2
from deep_cache_reference import SMALL, held, reference
from deep_cache_runs import assert_close, assert_no_trace, counts
from torch._dynamo.utils import counters

from bench.tiny_models import Family, lora, with_control

SIZE = {"width": 72, "height": 88}


@pytest.fixture
def small_unet():
    return tiny_models.unet(**SMALL)


def easy_cache(model):
    from comfy_extras.nodes_easycache import EasyCacheNode

    return EasyCacheNode.execute(model, 0.2, 0.1, 0.95, False).args[0]


def lazy_cache(model):
    from comfy_extras.nodes_easycache import LazyCacheNode

    return LazyCacheNode.execute(model, 0.2, 0.1, 0.95, False).args[0]


def counted(model, calls):
    """The model, noting every call of its UNet."""
    model = model.clone()
    model.set_model_emb_patch(lambda emb, channels, options: calls.append(None) or emb)
    return model


@pytest.mark.parametrize("other", [easy_cache, lazy_cache])
def test_cache_of_whole_steps_takes_some_and_deep_cache_skips_in_the_rest(small_unet, sample, other):
    run, calls = {**SIZE, "steps": 10}, []
    model = counted(small_unet, calls)
    plain = sample(other(model), **run)
    calls.clear()
    expected = sample(other(reference(model)), **run)
    left = len(calls)
    assert left < 10 and not torch.equal(expected, plain)
    for both in (other(held(model)), held(other(model))):
        calls.clear()
        assert torch.equal(sample(both, **run), expected)
        assert len(calls) == left
        assert counts()[1] >= 1
        assert_no_trace(both)
    # Here DeepCache was asked only for what the other left.
    assert sum(counts()) == left
    assert torch.equal(sample(other(model), **run), plain)


@pytest.mark.parametrize("cached_first", [True, False])
def test_core_compile_node_in_either_order_gives_the_same_and_compiles_nothing_on_later_steps(
    small_unet, sample, cached_first, caplog
):
    def compiled(model):
        model = model.clone()
        set_torch_compile_wrapper(model, backend="eager")
        return model

    expected = sample(held(small_unet), **SIZE, steps=4)
    model = compiled(held(small_unet)) if cached_first else held(compiled(small_unet))
    # Dynamo is kept from what looks different on a skipped step.
    sample(model, **SIZE, steps=1)
    graphs = counters["stats"]["unique_graphs"]
    assert_close(sample(model, **SIZE, steps=4), expected)
    assert counts() == (2, 2)
    assert counters["stats"]["unique_graphs"] == graphs
    assert caplog.text.count("TorchCompileModel compiles nothing") == 2  # runs


def test_accelerated_blocks_with_everything_around_compile_nothing_more_in_either_order(small_unet, sample):
    model = comfy.sd.load_lora_for_models(small_unet, None, lora(small_unet, 1), 0.5, 0)[0]
    model = FreeU_V2().patch(model, 1.3, 1.4, 0.9, 0.2)[0]
    control = Family("", "SD15", tiny_models.unet_config(**SMALL), context_dim=768).control_net(torch.float32)
    run = {**SIZE, "steps": 4, "positive": with_control(tiny_models.conditioning(), control)}
    expected = sample(held(model), **run)
    compiled = GraphCache()
    fast = lambda model: accelerate(model, CompileSettings(backend="eager"), compiled)  # noqa: E731
    plain = sample(fast(model), **run)
    before = counters["stats"]["unique_graphs"]
    assert before
    for both in (fast(held(model)), held(fast(model))):
        assert_close(sample(both, **run), expected)
        assert counts() == (2, 2)
        assert_no_trace(both)
    assert torch.equal(sample(fast(model), **run), plain)
    assert counters["stats"]["unique_graphs"] == before
