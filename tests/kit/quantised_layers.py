"""Two of core's feed-forward blocks, their weights stored as core's loaders store those of a quantised file.

Imported by tests that have put a ComfyUI tree on the path.
"""

from __future__ import annotations

import json
from typing import Any

import comfy.ops
import comfy.quant_ops
import torch
from comfy.ldm.modules.attention import FeedForward
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import block_layers
from comfy_accel.accel.modules.substitution import Order, substitute

from kit.tiny_models import randomize

WIDTH = 256
"""What the layouts of 4 bits divide into groups."""

X = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(0))

EAGER = CompileSettings(backend="eager")

IS_BY_LAYER = hasattr(comfy.quant_ops, "register_layout_class")
"""Whether a file says of each layer how it is stored; core 0.3.75 reads that from the file's metadata."""

CONFIGURED = {"int8_tensorwise, rotated": ("int8_tensorwise", {"convrot": True, "convrot_groupsize": 64})}
LAYOUTS = {name: (name, {}) for name in comfy.quant_ops.QUANT_ALGOS} | (CONFIGURED if IS_BY_LAYER else {})


class FeedForwards(torch.nn.Module):
    """x: [B, T, 256] to the same."""

    def __init__(self, operations: Any, count: int = 2):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            FeedForward(WIDTH, mult=1, glu=True, dtype=torch.float32, operations=operations) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def plain(seed: int = 0) -> FeedForwards:
    model = FeedForwards(comfy.ops.disable_weight_init).eval().requires_grad_(False)
    randomize(model, seed)
    return model


def quantised(layout: str, seed: int = 0, by_channel: bool = True, full_precision: bool = False) -> FeedForwards:
    """The model with the weights of that seed stored in a layout of `LAYOUTS`.

    by_channel: int8 has a scale for each channel instead of one. full_precision: weights are dequantised for each use;
    otherwise products are of quantised numbers where this core and the device can.
    """
    name, settings = LAYOUTS[layout]
    state, configs = plain(seed).state_dict(), {}
    for key in [key for key in state if key.endswith(".weight")]:
        layer = key.removesuffix(".weight")
        stored = _stored(state.pop(key), name, settings, by_channel)
        state.update({f"{key}{suffix}": tensor for suffix, tensor in stored.items()})
        configs[layer] = {"format": name, **settings}
        if IS_BY_LAYER:
            state[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(configs[layer]).encode()), dtype=torch.uint8)
    operations = comfy.ops.mixed_precision_ops({} if IS_BY_LAYER else configs, torch.float32, full_precision)
    model = FeedForwards(operations).eval().requires_grad_(False)
    model.load_state_dict(state)
    return model


def _stored(weight: torch.Tensor, name: str, settings: dict, by_channel: bool) -> dict[str, torch.Tensor]:
    """From the end of its name in a file to each tensor that the weight is stored as."""
    options = {"scale": weight.abs().amax() / 448} if name.startswith("float8") else dict(settings)
    if name == "int8_tensorwise" and by_channel:
        options["per_channel"] = True
    if name == "awq_w4a16":
        return _calibrated(weight)
    layout = comfy.quant_ops.QUANT_ALGOS[name]["comfy_tensor_layout"]
    tensor = comfy.quant_ops.QuantizedTensor.from_float(weight, layout, **options)
    if IS_BY_LAYER:
        return tensor.state_dict()
    return {"": tensor._qdata, "_scale": tensor._layout_params["scale"]}


def _calibrated(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weight in AWQ's layout, into which comfy-kitchen brings none itself: 4 bits, and two numbers for 64 of a row.

    weight: [N, K].
    """
    groups = weight.unflatten(1, (-1, 64))
    zeros = groups.mean(-1)
    scale = (groups - zeros[..., None]).abs().amax(-1) / 7
    bits = (((groups - zeros[..., None]) / scale[..., None]).round() + 8).to(torch.uint8).flatten(1)
    packed = (bits[:, 0::2] | bits[:, 1::2] << 4).view(torch.int8)
    return {"": packed, "_scale": scale.t().contiguous(), "_zeros": zeros.t().contiguous()}


def both_ways(
    model: FeedForwards, cache: GraphCache, x: torch.Tensor, settings: CompileSettings = EAGER
) -> tuple[torch.Tensor, torch.Tensor]:
    """(eager, compiled)"""
    eager = model(x)
    with substitute(block_layers(model, settings, cache), Order.COMPILED):
        return eager, model(x)
