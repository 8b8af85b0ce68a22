"""Blocks with fp8 weights are compiled on a card of any capability, with torch's own cast where Triton has none."""

import os
from pathlib import Path

import pytest
import torch
from comfy_accel.accel.compile import block_compiler, generated_code
from comfy_accel.accel.fingerprint.block_call import Call
from comfy_accel.accel.fingerprint.kinds import describe, kinds_of, template_of, weight_slots
from comfy_accel.accel.signature import tree_spec
from torch import nn

CAPABILITY = int(os.environ.get("FAKECUDA_CC", 90))


class Cast(nn.Module):
    def __init__(self, stored):
        super().__init__()
        self.first, self.second = (nn.Linear(64, 64).half() for _ in range(2))
        for part in (self.first, self.second):
            part.weight = nn.Parameter(part.weight.to(stored), requires_grad=False)

    def forward(self, x):
        for part in (self.first, self.second):
            x = torch.relu(nn.functional.linear(x, part.weight.to(x.dtype), part.bias)) * 2
        return x


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_weights_are_compiled_and_saved(stored):
    block = Cast(stored).cuda().eval().requires_grad_(False)
    (kind,) = kinds_of([describe(block)])
    inputs: list[torch.Tensor] = []
    spec = tree_spec.flatten(((torch.zeros(2, 16, 64, dtype=torch.half, device="cuda"),), {}), inputs)
    before = {module.__file__ for module in generated_code.all_modules()}
    weights = weight_slots(block, kind.weights).take()
    with torch.inference_mode():
        graph = block_compiler.compile_block(template_of(block), Call(kind, spec, weights, inputs))
        files = {module.__file__ for module in generated_code.all_modules()} - before
        source = "".join(Path(file).read_text() for file in files)
        assert f"cc={CAPABILITY}," in source
        assert ("cast_by_torch" in source) == (CAPABILITY < 89 and stored is torch.float8_e4m3fn)
        loaded = block_compiler.load_block(template_of(block), Call(kind, spec), graph.save(), graph.facts)
        for each in (graph, loaded):
            assert each.run([*weights, torch.zeros(3, 40, 64, dtype=torch.half, device="cuda")]).shape == (3, 40, 64)
