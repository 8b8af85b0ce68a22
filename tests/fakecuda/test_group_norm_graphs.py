"""Blocks with a group norm on a GPU: which kernels one graph for every size has."""

import os
from pathlib import Path

import torch
from comfy_accel.accel.compile import block_compiler, generated_code
from comfy_accel.accel.fingerprint.block_call import Call
from comfy_accel.accel.fingerprint.kinds import describe, kinds_of, template_of, weight_slots
from comfy_accel.accel.signature import tree_spec
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


def compiled(blocks, *shape, **how):
    """The graph of the first block for an image of this shape, its kind, all weights, its spec and its source."""
    blocks = [block.half().cuda().eval().requires_grad_(False) for block in blocks]
    kind = kinds_of([describe(block) for block in blocks])[0]
    inputs: list[torch.Tensor] = []
    given = (torch.zeros(size, dtype=torch.half, device="cuda") for size in (shape, (shape[0], 48)))
    spec = tree_spec.flatten((tuple(given), {}), inputs)
    before = {module.__file__ for module in generated_code.all_modules()}
    weights = [weight_slots(block, kind.weights).take() for block in blocks]
    with torch.inference_mode():
        graph = block_compiler.compile_block(template_of(blocks[0]), Call(kind, spec, weights[0], inputs), **how)
    files = {module.__file__ for module in generated_code.all_modules()} - before
    return graph, kind, weights, spec, "".join(Path(file).read_text() for file in files)


def call(graph, weights, *shape):
    given = [torch.zeros(size, dtype=torch.half, device="cuda") for size in (shape, (shape[0], 48))]
    assert graph.accepts([*weights, *given])
    with torch.inference_mode():
        return graph.run([*weights, *given])


def test_one_graph_of_our_kernels_serves_every_size_and_channels_and_is_saved():
    blocks = [ResBlock(64, 96), ResBlock(128, 64)]
    graph, kind, (narrow, wide), spec, source = compiled(blocks, 2, 64, 24, 40)
    for ours, count in (("part_moments", 2), ("group_moments", 2), ("normalise", 2)):
        assert source.count(f"    {ours}") >= count and f"def {ours}" in source
    assert "_native_group_norm" not in source
    assert f"cc={os.environ.get('FAKECUDA_CC', 90)}," in source
    loaded = block_compiler.load_block(template_of(blocks[0]), Call(kind, spec), graph.save(), graph.facts)
    for each in (graph, loaded):
        assert call(each, narrow, 1, 64, 5, 7).shape == (1, 96, 5, 7)
        assert call(each, wide, 3, 128, 90, 64).shape == (3, 64, 90, 64)


def test_our_kernels_are_launched_as_those_of_inductor_are_and_nothing_is_set_for_others():
    from torch._inductor import config

    blocks = [ResBlock(64, 96), ResBlock(128, 64)]
    before = set(generated_code.all_modules())
    graph, kind, (narrow, _), spec, _ = compiled(blocks, 2, 64, 24, 40)
    loaded = block_compiler.load_block(template_of(blocks[0]), Call(kind, spec), graph.save(), graph.facts)
    for each in (graph, loaded):
        call(each, narrow, 2, 64, 24, 40)
    made = [vars(module).values() for module in set(generated_code.all_modules()) - before]
    kernels = [value for values in made for value in values if type(value).__name__ == "CachingAutotuner"]
    ways = {type(result).__name__ for kernel in kernels for result in kernel.compile_results}
    assert len(kernels) > 16 and ways == {"StaticTritonCompileResult"}
    assert not config.static_launch_user_defined_triton_kernels
