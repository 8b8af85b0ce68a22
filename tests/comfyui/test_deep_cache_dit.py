"""DeepCache of transformers in a real ComfyUI: its own classes, its own samplers."""

import logging

import comfy.ops
import pytest
import torch
from comfy.ldm.flux.model import Flux
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.modules.substitution import Order, substituted
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.accel.step_cache.splits.layouts import find_split
from kit.deep_cache import (
    assert_close,
    assert_no_trace,
    cached,
    counts,
    full_and_skipped_flops,
    split_chunks,
)
from kit.families import CONTROLLED, DITS
from kit.step_cache import features_of
from kit.thorough import thorough_except
from kit.tiny_models import with_control
from torch._dynamo.utils import counters

from dev.bench.layouts import FLUX_DEV

LARGEST_DISTANCE = 0.8
"""Of the plain image, in the 2-norm: at interval 3 over four steps random networks give 0.2 to 0.7."""

every_dit = pytest.mark.parametrize("name", DITS)


@every_dit
def test_interval_one_is_bit_identical(name, no_fallback):
    dit = DITS[name]
    model = dit.load()
    assert torch.equal(dit.sample(cached(model, 1), steps=3), dit.sample(model, steps=3))


@every_dit
def test_steps_between_are_skipped_at_two_sizes_and_the_model_stays_plain(name, no_fallback):
    dit = DITS[name]
    model = dit.load()
    deep = cached(model)
    for size in (0, 1):
        plain = dit.sample(model, size)
        out = dit.sample(deep, size)
        assert counts() == (2, 2)
        assert 1e-3 < (out - plain).norm() / plain.norm() < LARGEST_DISTANCE
        assert torch.equal(dit.sample(model, size), plain)
    assert_no_trace(model)


def test_few_steps_leave_the_defaults_nothing_to_skip_and_the_log_says_where_it_pays(caplog):
    caplog.set_level(logging.INFO)
    dit = DITS["Wan"]
    dit.sample(apply_deep_cache(dit.load(), DeepCacheSettings()), steps=4)
    assert counts() == (4, 0)
    assert "skipped none of 4 steps: with so few" in caplog.text and "20 steps" in caplog.text


# The others keep their streams apart by the same code.
@pytest.mark.parametrize("name", thorough_except(DITS, "Flux", "SD3", "Wan"))
def test_split_chunks_agree_with_joined_ones(name, no_fallback):
    dit = DITS[name]
    model = dit.load()
    joined = dit.sample(cached(model), size=1, batch=2)
    assert_close(dit.sample(cached(split_chunks(model)), size=1, batch=2), joined)
    assert counts() == (2, 2)


@pytest.mark.parametrize("name", ["Flux", "SD3"])
def test_prompts_of_different_lengths_keep_their_own_text(name, no_fallback):
    dit = DITS[name]
    model = cached(dit.load())
    out = dit.sample(model, negative=dit.conditioning(2, tokens=17))
    assert counts() == (2, 2)
    assert not torch.equal(out, dit.sample(model))


@pytest.mark.parametrize("name", thorough_except(["Flux", "Wan", "SD3"], "Flux"))
def test_forecasts_of_joined_and_split_chunks_agree(name, no_fallback):
    dit = DITS[name]
    model = dit.load()
    joined = dit.sample(cached(model, points=2), steps=8)
    decided = counts()
    assert decided[1] >= 1
    assert_close(dit.sample(cached(split_chunks(model), points=2), steps=8), joined, 1e-3)
    assert counts() == decided


# Company


def call(model, stand_ins, x, context, control=None):
    options = {"patches": {}, "patches_replace": {}}
    given = {"guidance": torch.zeros(len(x))} if hasattr(model, "double_blocks") else {}
    given |= dict(context=context, control=control, transformer_options=options)
    with torch.inference_mode(), substituted(stand_ins, Order.CACHED):
        return model(x, torch.full((len(x),), 0.7), **given)


@pytest.mark.parametrize("name, width", [("Flux", 64), ("Chroma", 64), ("SD3", 128), ("Qwen-Image", 64)])
def test_residuals_of_a_control_net_count_once(name, width):
    dit = DITS[name]
    model = dit.load().model.diffusion_model
    noise = lambda *shape, seed=0: torch.randn(shape, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    residuals = [None if index == 3 else noise(2, 36, width, seed=index) for index in range(dit.blocks - 1)]
    control = {"input": residuals, "output": residuals[::-1]}
    x, context = noise(2, *dit.latents[0][1:]), noise(2, 24, 48)
    split = find_split(model)
    features = features_of(split, levels=(3.0, 2.0, 1.0, 0.0))
    plain = call(model, {}, x, context, control)
    features.run.begin(3.0)
    keys = features.branches(x, ["a", "b"], [0, 1], None)
    assert torch.equal(call(model, split.full_layers(features, keys), x, context, control), plain)
    features.run.begin(2.0)
    keys = features.branches(x, ["a", "b"], [0, 1], None)
    assert features.can_skip(keys)
    withheld = split.withhold(control)
    assert withheld != control
    assert_close(call(model, split.skip_layers(features, keys), x, context, withheld), plain, 1e-5)
    # Nothing depends on their being withheld, as in models whose lists nobody has named.
    assert_close(call(model, split.skip_layers(features, keys), x, context, control), plain, 1e-5)


def test_control_net_in_a_real_run(no_fallback):
    model, net = CONTROLLED.load(), CONTROLLED.family.control_net(torch.float32)
    conds = {
        name: with_control(CONTROLLED.conditioning(seed), net) for seed, name in enumerate(("positive", "negative"), 1)
    }
    out = CONTROLLED.sample(cached(model), **conds)
    assert counts() == (2, 2)
    plain = CONTROLLED.sample(model, **conds)
    assert 1e-3 < (out - plain).norm() / plain.norm() < LARGEST_DISTANCE
    assert not torch.equal(out, CONTROLLED.sample(cached(model)))
    assert_close(CONTROLLED.sample(cached(split_chunks(model)), **conds), out)


@pytest.mark.parametrize("layer", [0, 2])
def test_guidance_that_leaves_a_block_out(layer, no_fallback):
    """Where it takes the first block, its own call is never skipped."""
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    dit = DITS["SD3"]
    guided = SkipLayerGuidanceDiT.execute(dit.load(), 3.0, 0.0, 1.0, str(layer), "", 0.0).args[0]
    joined = dit.sample(cached(guided))
    assert counts() == (2, 2)
    assert_close(dit.sample(cached(split_chunks(guided))), joined)
    assert not torch.equal(joined, dit.sample(guided))


def test_accelerate_model_in_either_order_compiles_nothing_more(no_fallback):
    dit = DITS["Wan"]  # of one kind
    model = dit.load()
    expected = dit.sample(cached(model))
    graphs = GraphCache()
    fast = lambda model: accelerate(model, CompileSettings(backend="eager"), graphs)  # noqa: E731
    dit.sample(fast(model), steps=2)
    before = counters["stats"]["unique_graphs"]
    assert before
    for both in (fast(cached(model)), cached(fast(model))):
        assert_close(dit.sample(both), expected)
        assert counts() == (2, 2)
        assert counters["stats"]["unique_graphs"] == before
        assert_no_trace(both)


# What a skipped step costs


def test_skipped_step_of_flux_costs_next_to_nothing():
    config = FLUX_DEV.config
    model = Flux(**config, device="meta", dtype=torch.float16, operations=comfy.ops.disable_weight_init)
    split = find_split(model)
    empty = lambda *shape: torch.empty(shape, device="meta", dtype=torch.float16)  # noqa: E731
    x = empty(2, 16, 90, 120)
    others = empty(2), empty(2, 256, config["context_in_dim"]), empty(2, config["vec_in_dim"]), empty(2)
    spent = full_and_skipped_flops(split, x, lambda: model(x, *others))
    print(f"{spent[1] / spent[0]:.3f}")
    assert spent[1] <= 0.01 * spent[0]
