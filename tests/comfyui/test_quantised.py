"""Blocks with quantised weights: compiled once, equal to core's eager, and never with another layout's graph."""

import sys

import comfy.model_patcher
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.hosts.comfyui.models.accelerate import block_layers
from comfy_accel.accel.modules.substitution import Order, substitute
from kit.compiled import graphs
from kit.quantised_layers import EAGER, IS_BY_LAYER, LAYOUTS, WIDTH, X, both_ways, plain, quantised
from kit.stores import saving
from torch._dynamo.utils import counters

pytestmark = pytest.mark.usefixtures("without_gradients")

BY_KERNELS = "convrot_w4a4", "asym_w4a8_int8"
"""Their kernels are not operators of torch."""


@pytest.mark.parametrize("full_precision", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantised_blocks_compile_once_for_every_size_and_equal_eager(layout, full_precision):
    cache = GraphCache()
    for seed, x in enumerate((X, X[:1, :5], torch.cat([X, X]))):
        eager, compiled = both_ways(quantised(layout, seed, full_precision=full_precision), cache, x)
        assert torch.equal(compiled, eager)
    assert fallbacks.rows() == []
    assert graphs() == 1


@pytest.mark.parametrize("layout", [name for name in ("float8_e4m3fn", *BY_KERNELS) if name in LAYOUTS])
def test_weights_patched_by_core_and_restored_need_no_further_graph(layout):
    model, cache, cpu = quantised(layout), GraphCache(), torch.device("cpu")
    bare = comfy.model_patcher.ModelPatcher(model, cpu, cpu)
    patched = bare.clone()
    patched.add_patches({"blocks.0.net.2.weight": ("diff", (torch.ones(WIDTH, WIDTH),))}, 0.5)
    images, graphs = [], []
    for patcher in (bare, patched) * 2:
        # Core 0.3.75 moves such weights by `Module.to`, which fails where somebody refers to them weakly.
        patcher.patch_model(cpu)
        eager, compiled = both_ways(model, cache, X)
        assert torch.equal(compiled, eager)
        images.append(eager)
        graphs.append(counters["stats"]["unique_graphs"])
        patcher.unpatch_model(cpu)
    assert torch.equal(images[0], images[2]) and not torch.equal(images[0], images[1])
    assert graphs[1] == graphs[3]
    assert graphs[1] == 1 or not IS_BY_LAYER  # 0.3.75 tells something else of a weight that it has patched


@pytest.mark.thorough  # compiles with inductor
@pytest.mark.parametrize("layout", [name for name in ("float8_e4m3fn", *BY_KERNELS) if name in LAYOUTS])
def test_saved_graph_serves_other_weights_of_its_layout(layout, tmp_path):
    settings, near = CompileSettings(backend="inductor"), {"rtol": 1e-4, "atol": 1e-5}
    is_full = layout == "float8_e4m3fn"
    eager, compiled = both_ways(quantised(layout, 0, full_precision=is_full), saving(tmp_path), X, settings)
    torch.testing.assert_close(compiled, eager, **near)
    again = saving(tmp_path)
    eager, loaded = both_ways(quantised(layout, 1, full_precision=is_full), again, torch.cat([X, X])[:3], settings)
    torch.testing.assert_close(loaded, eager, **near)
    statistics = again.statistics()
    assert (statistics["loaded"], statistics["compilations"]) == (1, 0) and fallbacks.rows() == []


def test_each_layout_makes_a_kind_of_its_own():
    models = [plain(), *(quantised(layout, full_precision=True) for layout in LAYOUTS)]
    if "int8_tensorwise" in LAYOUTS:
        models.append(quantised("int8_tensorwise", by_channel=False, full_precision=True))
    assert len({survey(model).kinds[0].digest for model in models}) == len(models)


@pytest.mark.skipif(not IS_BY_LAYER, reason="this core has no such layout")
def test_tracing_leaves_no_tensor_without_values_in_the_caches_of_kernels():
    from comfy_kitchen.backends.eager import convrot_w4a4
    from comfy_kitchen.tensor.convrot_w4a4 import convrot_w4a4_linear

    model = quantised("convrot_w4a4")
    convrot_w4a4._HADAMARD_CACHE.clear()
    with substitute(block_layers(model, EAGER, GraphCache()), Order.COMPILED):
        compiled = model(X)
    assert torch.equal(compiled, model(X))
    assert sys.modules["comfy_kitchen.tensor.convrot_w4a4"].convrot_w4a4_linear is convrot_w4a4_linear
