"""Feed-forward blocks of core with weights as ComfyUI-GGUF keeps them: its own layers, and a stand-in for them.

Imported by tests that have put a ComfyUI tree on the path. Without `COMFYUI_GGUF`, a folder with the extension, its
layers are skipped; the package index has the `gguf` package that they need, and not the extension.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from typing import Any

import comfy.ops
import pytest
import torch
from quantised_layers import WIDTH, FeedForwards, plain

CODES = torch.arange(-128, 128).to(torch.int8)
"""The number that each byte stands for: a table, as the extension has one for its types IQ4."""


class StandInTensor(torch.Tensor):
    """Bytes that say of themselves how they are to be read and what is to be added, as the extension's weights do."""

    def __new__(cls, data, **_attributes):
        return super().__new__(cls, data)

    def __init__(self, data, *, tensor_type, tensor_shape, patches):
        super().__init__()
        self.tensor_type, self.tensor_shape, self.patches = tensor_type, tensor_shape, patches

    @property
    def shape(self):
        return self.tensor_shape if hasattr(self, "tensor_shape") else self.size()

    def to(self, *args, **kwargs):
        data = super().to(*args, **kwargs)
        data.tensor_type = getattr(self, "tensor_type", None)
        data.tensor_shape = getattr(self, "tensor_shape", data.size())
        data.patches = list(getattr(self, "patches", ()))
        return data

    def clone(self, *args, **kwargs):
        return self

    def detach(self):
        return self


class StandInLayer(torch.nn.Module):
    """Reads its weight at each use: codes of one byte, after a float16 scale for each 32 of them."""

    comfy_cast_weights = True
    largest_layer = False

    def _load_from_state_dict(self, state, prefix, *args):
        self.weight = torch.nn.Parameter(state[f"{prefix}weight"], False)
        self.bias = torch.nn.Parameter(state[f"{prefix}bias"], False)
        self.largest_layer = getattr(self.weight, "is_largest_weight", False)

    def _save_to_state_dict(self, *args):
        self.stand_in_save_to_state_dict(*args)

    def stand_in_save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"] = torch.empty(self.weight.shape if self.largest_layer else (), device="meta")

    def forward_comfy_cast_weights(self, x):
        weight, bias = self.read(self.weight.to(x.device), x.dtype), self.bias.to(x.device)
        return torch.nn.functional.linear(x, weight, torch.Tensor(bias.to(x.dtype)))

    def read(self, stored, dtype):
        blocks = stored.data.reshape((-1, 34))
        codes = blocks[:, 2:]
        if stored.tensor_type == "by table":
            codes = CODES.to(stored.device)[codes.to(torch.int64)]
        numbers = blocks[:, :2].view(torch.float16) * codes.view(torch.int8)
        weight = torch.Tensor(numbers.reshape(stored.tensor_shape).to(dtype))
        for change, factor in stored.patches:
            weight = weight + factor * change
        return weight


class StandIn(comfy.ops.manual_cast):
    class Linear(StandInLayer, comfy.ops.manual_cast.Linear):
        pass


def extension() -> tuple[Any, Any] | None:
    """Its layers' module and the `gguf` package, without its nodes; None where no folder is named."""
    folder = os.environ.get("COMFYUI_GGUF")
    if not folder:
        return None
    if "extension_gguf" not in sys.modules:
        package = sys.modules["extension_gguf"] = types.ModuleType("extension_gguf")
        package.__path__, package.__file__ = [folder], os.path.join(folder, "__init__.py")
    return importlib.import_module("extension_gguf.ops"), importlib.import_module("gguf")


REAL = extension()
TYPES = "Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS BF16 F16".split()
SKIPPED = pytest.mark.skipif(not REAL, reason="COMFYUI_GGUF names no folder with ComfyUI-GGUF")
STAND_INS = {"stand-in": "by 32", "stand-in, table": "by table"}
UNTRACED = "stand-in, table", "IQ4_NL", "IQ4_XS"
"""Read with a table of the module's, a tensor with values among those of a trace, which have none."""

LAYOUTS = [*STAND_INS, *(pytest.param(name, marks=SKIPPED) for name in TYPES)]


def stored(layout: str, seed: int = 0) -> FeedForwards:
    """The model with its weights in a layout of `LAYOUTS`, of random bytes."""
    random = torch.Generator().manual_seed(seed)
    state = plain(seed).state_dict()

    def data(shape: torch.Size, numbers: int, size: int) -> torch.Tensor:
        # Any two of these bytes are a small float16 number.
        return torch.randint(0x14, (*shape[:-1], shape[-1] // numbers * size), dtype=torch.uint8, generator=random)

    if layout in STAND_INS:
        for key, weight in state.items():
            if key.endswith(".weight"):
                made = StandInTensor(
                    data(weight.shape, 32, 34), tensor_type=STAND_INS[layout], tensor_shape=weight.shape, patches=[]
                )
            else:
                made = StandInTensor(weight, tensor_type=None, tensor_shape=weight.shape, patches=[])
            state[key] = made
        model = FeedForwards(StandIn)
    else:
        ops, gguf = REAL
        of, full = gguf.GGMLQuantizationType[layout], gguf.GGMLQuantizationType.F32
        for key, weight in state.items():
            if not key.endswith(".weight"):
                made = ops.GGMLTensor(weight, tensor_type=full, tensor_shape=weight.shape)
            elif layout == "F16":
                made = ops.GGMLTensor(weight.half(), tensor_type=of, tensor_shape=weight.shape)
            elif layout == "BF16":
                made = ops.GGMLTensor(weight.bfloat16().view(torch.uint8), tensor_type=of, tensor_shape=weight.shape)
            else:
                made = ops.GGMLTensor(
                    data(weight.shape, *gguf.GGML_QUANT_SIZES[of]), tensor_type=of, tensor_shape=weight.shape
                )
            state[key] = made
        model = FeedForwards(ops.GGMLOps)
    state["blocks.1.net.2.weight"].is_largest_weight = True
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def patched(model: FeedForwards, layout: str, strength: float) -> None:
    """Have the first block's last layer add a change to its weight at each use, as the extension does with LoRA."""
    layer = model.blocks[0].net[2]
    change = torch.ones(WIDTH, WIDTH)
    if layout in STAND_INS:
        layer.weight.patches = [(change, strength)]
    else:
        layer.weight.patches = [([(strength, ("diff", (change,)), 1.0, None, None)], "blocks.0.net.2.weight")]
