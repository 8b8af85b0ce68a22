"""Blocks with fp8 weights are compiled on a card of any capability, with torch's own cast where Triton has none."""

import os
from pathlib import Path

import pytest
import torch
from comfy_accel.accel.compile import generated_code
from kit.block_graphs import compiled, on_card, saved_and_loaded, zeros
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
    block, given = on_card(Cast(stored)), zeros((2, 16, 64))
    with torch.inference_mode():
        with generated_code.collect_modules() as modules:
            graph, weights = compiled(block, given, backend="inductor")
        source = "".join(Path(module.__file__).read_text() for module in modules)
        assert f"cc={CAPABILITY}," in source
        assert ("cast_by_torch" in source) == (CAPABILITY < 89 and stored is torch.float8_e4m3fn)
        for each in (graph, saved_and_loaded(graph, block, given)):
            assert each.run([*weights.take(), *zeros((3, 40, 64))]).shape == (3, 40, 64)
