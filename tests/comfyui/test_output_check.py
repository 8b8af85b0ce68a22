"""The check of a graph against its block throws no right graph out: blocks of several families in half precision."""

import copy
import dataclasses

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.accelerate import block_layers
from comfy_accel.accel.modules.blocks import blocks
from comfy_accel.accel.modules.substitution import Order, substitute
from comfy_accel.accel.signature import output_check
from comfy_accel.accel.signature.output_check import compare_to_rounding
from kit.compiled import graphs
from kit.zoo import ZOO, Noise, Size

HALF = (torch.bfloat16, torch.float16)
STREAMS = ((1, 1), (1, 10), (1, 100), (1, 1000), (30, 30), (30, 1000))
"""How large the stream is, so that a block adds less to it, and two channels of it."""

OUTPUTS = {"SDXL": 2, "Flux": 3, "Wan t2v": 1, "Qwen-Image": 2, "Lumina2": 1, "Cosmos predict2": 1}
"""How many outputs of blocks there are. Those of the other families tell nothing new."""


def mapped(change, value):
    """The value with each floating tensor in it changed."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.is_floating_point() else value.clone()
    if isinstance(value, dict):
        return {name: mapped(change, part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(change, part) for part in value)
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **mapped(change, vars(value)))
    return value


def tensors_in(value):
    found = []
    mapped(lambda tensor: found.append(tensor), value)
    return found


def options(level):
    return {"transformer_options": {"sigmas": level, "sample_sigmas": level}}


def calls_of(name):
    """(block, args, kwargs) of the first call of each class of blocks in a model of the zoo."""
    model, calls = ZOO[name].build(), {}

    def keep(block, args, kwargs):
        if type(block) not in calls:
            calls[type(block)] = (block, *mapped(torch.clone, (args, kwargs)))

    hooks = [block.register_forward_pre_hook(keep, with_kwargs=True) for _, block in blocks(model)]
    x, given = ZOO[name].inputs(Size(batch=2), Noise(0))
    level = torch.full((len(x),), 0.5)
    model(x, level, **options(level), **given)
    for hook in hooks:
        hook.remove()
    return list(calls.values())


def with_outliers(times, size, shapes):
    """What makes tensors of these shapes so many times larger and puts two channels of a size into them."""

    def change(tensor):
        values = tensor.clone()
        if tensor.shape in shapes:
            values *= times
            channels = values.movedim(1 if tensor.ndim == 4 else -1, -1)
            width = channels.shape[-1]
            random = torch.Generator().manual_seed(0)
            channels[..., 7 % width] = size * (1 + 0.1 * torch.randn(channels.shape[:-1], generator=random))
            channels[..., width // 2] = -0.7 * size
        return values

    return change


def run(block, call, dtype):
    """The floating tensors of the output of a call on copies of its arguments, in a type."""
    args, kwargs = mapped(lambda tensor: tensor.to(dtype, copy=True), call)
    return [tensor for tensor in tensors_in(block(*args, **kwargs)) if tensor.numel()]


@torch.inference_mode()
def differences(name):
    """Of each output of each class of blocks in a model, in each type with each stream: the block in float32 on the
    numbers that it is given in half precision, against the block in half precision."""
    found = {}
    for block, *call in calls_of(name):
        for dtype in HALF:
            half = copy.deepcopy(block).to(dtype)
            wide = copy.deepcopy(half).float()
            shapes = {tensor.shape for tensor in run(wide, call, torch.float32)}
            for stream in STREAMS:
                given = mapped(lambda tensor, to=dtype: tensor.to(to), mapped(with_outliers(*stream, shapes), call))
                pairs = zip(run(wide, given, torch.float32), run(half, given, dtype), strict=True)
                for number, (one, other) in enumerate(pairs):
                    at = type(block).__name__, number, dtype, stream
                    found[at] = compare_to_rounding(one.to(other.dtype), other, tensors_in(given), [dtype])
    return found


@pytest.mark.parametrize("name", OUTPUTS)
def test_blocks_that_round_otherwise_pass(name, monkeypatch):
    # With room to spare
    monkeypatch.setattr(output_check, "STEPS", output_check.STEPS / 2)
    monkeypatch.setattr(output_check, "LEAST", output_check.LEAST / 2)
    found = differences(name)
    assert {at: times for at, times in found.items() if times is not None} == {}
    assert len(found) == OUTPUTS[name] * len(HALF) * len(STREAMS)


@pytest.mark.thorough  # compiles with inductor
@pytest.mark.parametrize(("name", "dtype"), [("SDXL", torch.float16), ("Qwen-Image", torch.bfloat16)])
def test_graphs_compiled_in_half_precision_pass(name, dtype, monkeypatch):
    monkeypatch.setattr(output_check, "STEPS", output_check.STEPS / 2)
    monkeypatch.setattr(output_check, "LEAST", output_check.LEAST / 2)
    model = ZOO[name].build().to(dtype)
    x, given = mapped(lambda tensor: tensor.to(dtype), ZOO[name].inputs(Size(batch=2), Noise(0)))
    level = torch.full((len(x),), 0.5)
    with (
        torch.inference_mode(),
        substitute(block_layers(model, CompileSettings("inductor"), GraphCache()), Order.COMPILED),
    ):
        for _ in range(2):
            model(x, level, **options(level), **given)
    assert [row for row in fallbacks.rows() if "slower" not in row["reason"]] == []
    assert graphs() > 0
