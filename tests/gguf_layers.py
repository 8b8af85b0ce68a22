"""Feed-forward blocks of core with weights as ComfyUI-GGUF keeps them: its own layers, and a stand-in for them.

Imported by tests that have put a ComfyUI tree on the path. `COMFYUI_GGUF` is a folder with the extension; its layers
are left out where there is none, or no `gguf` package.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from typing import Any

import comfy.ops
import torch
from quantised_layers import WIDTH, FeedForwards, plain


class StandInTensor(torch.Tensor):
    """Bytes that say of themselves how they are to be read and what is to be added, as the extension's weights do."""

    @staticmethod
    def made(data, tensor_type, tensor_shape, patches):
        tensor = data.as_subclass(StandInTensor)
        tensor.tensor_type, tensor.tensor_shape, tensor.patches = tensor_type, tensor_shape, patches
        return tensor

    @property
    def shape(self):
        return self.tensor_shape if hasattr(self, "tensor_shape") else self.size()

    def to(self, *args, **kwargs):
        data = super().to(*args, **kwargs)
        vars(data).update(vars(self))
        return data

    def detach(self):
        return self


class StandInLinear(torch.nn.Linear):
    """Reads its weight at each use: numbers of one byte, after a float16 scale for each 32 of them."""

    def _load_from_state_dict(self, state, prefix, *args):
        self.weight = torch.nn.Parameter(state[f"{prefix}weight"], False)
        self.bias = torch.nn.Parameter(state[f"{prefix}bias"], False)

    def forward(self, x):
        stored = self.weight.to(x.device)
        blocks = stored.data.reshape(-1, 34)
        numbers = blocks[:, :2].view(torch.float16) * blocks[:, 2:].view(torch.int8)
        weight = torch.Tensor(numbers.reshape(stored.tensor_shape).to(x.dtype))
        for change, factor in stored.patches:
            weight = weight + factor * change
        return torch.nn.functional.linear(x, weight, torch.Tensor(self.bias.to(x.dtype)))


class StandIn(comfy.ops.disable_weight_init):
    Linear = StandInLinear


def extension() -> tuple[Any, Any] | None:
    """Its layers' module and the `gguf` package, without its nodes; None where either is missing."""
    folder = os.environ.get("COMFYUI_GGUF")
    if not folder:
        return None
    if "extension_gguf" not in sys.modules:
        package = sys.modules["extension_gguf"] = types.ModuleType("extension_gguf")
        package.__path__, package.__file__ = [folder], os.path.join(folder, "__init__.py")
    try:
        return importlib.import_module("extension_gguf.ops"), importlib.import_module("gguf")
    except ImportError:
        return None


REAL = extension()
TYPES = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "BF16", "F16"]
LAYOUTS = ["stand-in", *(TYPES if REAL else [])]


def stored(layout: str, seed: int = 0) -> FeedForwards:
    """The model with its weights in a layout of `LAYOUTS`, of random bytes."""
    random = torch.Generator().manual_seed(seed)
    state = plain(seed).state_dict()

    def data(shape: torch.Size, numbers: int, size: int) -> torch.Tensor:
        # Any two of these bytes are a small float16 number.
        return torch.randint(0x14, (*shape[:-1], shape[-1] // numbers * size), dtype=torch.uint8, generator=random)

    if layout == "stand-in":
        for key, weight in state.items():
            if key.endswith(".weight"):
                state[key] = StandInTensor.made(data(weight.shape, 32, 34), "by 32", weight.shape, [])
            else:
                state[key] = StandInTensor.made(weight, None, weight.shape, [])
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
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def patched(model: FeedForwards, layout: str, strength: float) -> None:
    """Have the first block's last layer add a change to its weight at each use, as the extension does with LoRA."""
    layer = model.blocks[0].net[2]
    change = torch.ones(WIDTH, WIDTH)
    if layout == "stand-in":
        layer.weight.patches = [(change, strength)]
    else:
        layer.weight.patches = [([(strength, ("diff", (change,)), 1.0, None, None)], "blocks.0.net.2.weight")]
