"""Blocks with a group norm on a GPU: which kernels one graph for every size has."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comfy_accel.accel.compile import generated_code
from comfy_accel.accel.fingerprint.kinds import weight_slots
from kit.block_graphs import compiled, kind_of, on_card, saved_and_loaded, zeros
from torch import nn


class ResBlock(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1))
        self.embed = nn.Linear(48, outside)
        self.then = nn.Sequential(nn.GroupNorm(32, outside), nn.SiLU(), nn.Conv2d(outside, outside, 3, padding=1))
        self.skip = nn.Conv2d(inside, outside, 1)

    def forward(self, x, embedding):
        return self.skip(x) + self.then(self.first(x) + self.embed(embedding)[:, :, None, None])


def inputs(*shape):
    return zeros(shape, (shape[0], 48))


@pytest.fixture(scope="module")
def made():
    """Of a narrow block and a wide one of one kind: the graphs, as compiled and as loaded, and all their modules."""
    blocks = [on_card(ResBlock(*widths), torch.half) for widths in ((64, 96), (128, 64))]
    given, kind = inputs(2, 64, 24, 40), kind_of(*blocks)
    weights = [weight_slots(block, kind.weights).take() for block in blocks]
    with torch.inference_mode(), generated_code.collect_modules() as modules:
        graph, _ = compiled(blocks[0], given, kind, backend="inductor")
        loaded = saved_and_loaded(graph, blocks[0], given, kind)
    return SimpleNamespace(graphs=(graph, loaded), weights=weights, modules=modules)


def call(graph, weights, *shape):
    tensors = [*weights, *inputs(*shape)]
    assert graph.accepts(tensors)
    with torch.inference_mode():
        return graph.run(tensors)


def test_one_graph_of_our_kernels_serves_every_size_and_channels_and_is_saved(made):
    (narrow, wide), source = made.weights, "".join(Path(module.__file__).read_text() for module in made.modules)
    for ours in ("part_moments", "group_moments", "normalise"):
        assert source.count(f"    {ours}") >= 2 and f"def {ours}" in source
    assert "_native_group_norm" not in source
    assert f"cc={os.environ.get('FAKECUDA_CC', 90)}," in source
    for graph in made.graphs:
        assert call(graph, narrow, 1, 64, 5, 7).shape == (1, 96, 5, 7)
        assert call(graph, wide, 3, 128, 90, 64).shape == (3, 64, 90, 64)


def test_our_kernels_are_launched_as_those_of_inductor_are_and_nothing_is_set_for_others(made):
    from torch._inductor import config

    for graph in made.graphs:
        call(graph, made.weights[0], 2, 64, 24, 40)
    values = [value for module in made.modules for value in vars(module).values()]
    kernels = [value for value in values if type(value).__name__ == "CachingAutotuner"]
    ways = {type(result).__name__ for kernel in kernels for result in kernel.compile_results}
    assert len(kernels) > 16 and ways == {"StaticTritonCompileResult"}
    assert not config.static_launch_user_defined_triton_kernels
