"""Blocks whose weights are GGUF's: read inside of the graph by the layers' own code, and equal to eager."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile.benchmark import largest_difference
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.hosts.comfyui.models.accelerate import block_layers
from comfy_accel.accel.modules.substitution import Order, substituted
from gguf_layers import LAYOUTS, REAL, STAND_INS, TYPES, UNTRACED, patched, stored
from quantised_layers import EAGER, X, both_ways, saving
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_graph_serves_every_size_and_model_of_a_layout_and_equals_eager(layout):
    cache = GraphCache()
    for seed, x in enumerate((X[:1, :5], X, torch.cat([X, X]))):
        eager, compiled = both_ways(stored(layout, seed), cache, x)
        assert torch.equal(compiled, eager) and torch.isfinite(eager).all() and type(compiled) is torch.Tensor
    if layout in UNTRACED:
        (row,) = fallbacks.rows()
        assert row["code"] == "weights_by_table" and "Q4_K instead of IQ4_NL" in row["reason"]
        return
    assert fallbacks.rows() == [] and graphs() == 1


@pytest.mark.parametrize("layout", LAYOUTS[:1] + LAYOUTS[2:3])
def test_blocks_with_a_lora_on_their_weights_run_eagerly_and_without_it_on_their_graph_again(layout):
    model, cache = stored(layout), GraphCache()
    bare, compiled = both_ways(model, cache, X)
    assert torch.equal(compiled, bare)
    layers = block_layers(model, EAGER, cache)
    for strength in (0.5, 1.0):
        patched(model, layout, strength)
        eager, compiled = both_ways(model, cache, X)
        assert torch.equal(compiled, eager) and not torch.equal(eager, bare)
        with substituted(layers, Order.COMPILED):  # added within the run
            assert torch.equal(model(X), eager)
        (reason,) = [reason for _, reason in survey(model).left_eager]
        (row,) = fallbacks.rows()
        assert "Tensor, with patches" in str(reason) and "Tensor, with patches" in row["reason"]
    model.blocks[0].net[2].weight.patches = []
    eager, compiled = both_ways(model, cache, X)
    assert torch.equal(compiled, bare) and graphs() == 1


def test_weights_that_wait_for_each_use_are_taken_with_what_they_say_of_themselves():
    model, cache = stored("stand-in"), GraphCache()
    both_ways(model, cache, X)
    for block in model.blocks:
        block.net[2].prev_comfy_cast_weights = False  # as core marks layers that it has not loaded
    eager, compiled = both_ways(model, cache, X)
    assert torch.equal(compiled, eager) and graphs() == 1 and fallbacks.rows() == []


def test_each_way_of_reading_the_bytes_makes_a_kind_of_its_own():
    models = [stored(layout) for layout in (*STAND_INS, *(TYPES if REAL else ()))]
    other = stored("stand-in")
    for block in other.blocks:
        block.net[2].weight.tensor_type = "otherwise"
    kinds = [survey(model).kinds for model in (*models, other)]
    assert len(set(kinds)) == len(models) + 1
    # The largest weight's mark is read where memory is estimated alone.
    assert all(len(of_model) == 1 and not of_model[0].opaque for of_model in kinds)


@pytest.mark.thorough  # compiles with inductor
@pytest.mark.parametrize("layout", LAYOUTS[:1] + LAYOUTS[2:3] + LAYOUTS[9:10])
def test_compiled_graph_serves_other_weights_of_its_layout_and_is_saved(layout, tmp_path):
    settings, caches = CompileSettings(backend="inductor"), [saving(tmp_path), saving(tmp_path)]
    for seed, cache in enumerate(caches):
        eager, compiled = both_ways(stored(layout, seed), cache, X[:, : 7 - seed], settings)
        assert largest_difference(compiled, eager) is None
    assert fallbacks.rows() == []
    statistics = caches[1].statistics()
    assert (statistics["loaded"], statistics["compilations"]) == (1, 0)
