"""The kernels that inductor makes of whole blocks compute what the blocks do: they run in Triton's interpreter.

Blocks are compiled as in a run of core's sampler, for the capability of the made-up device. Each graph is called with
numbers at every size that the run has. Its answer may be little farther from the block's answer in float64 than the
block's own in the same precision is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any
from unittest import mock

from dev.tools.inprocess import boot

boot(cpu=False)

import pytest  # noqa: E402
import torch  # noqa: E402
from comfy_accel.accel.cache.graph_cache import GraphCache  # noqa: E402
from comfy_accel.accel.compile import block_compiler  # noqa: E402
from comfy_accel.accel.core.compile_settings import CompileSettings  # noqa: E402
from comfy_accel.accel.core.fallbacks import fallbacks  # noqa: E402
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate  # noqa: E402
from comfy_accel.accel.hosts.comfyui.tracing import traceable  # noqa: E402
from comfy_accel.accel.signature import output_check, tree_spec  # noqa: E402
from kit import made_up_device as device  # noqa: E402
from kit.core_families import OTHERS  # noqa: E402
from kit.families import FAMILIES, VIDEO, TinyFamily  # noqa: E402
from kit.interpreted import Computed, GraphCall, computed, not_built  # noqa: E402
from kit.tiny_models import DTYPES, Family  # noqa: E402
from kit.zoo import Noise  # noqa: E402

device.sample_without_values()

FARTHER, FARTHEST = 1.5, 6.0
"""How many times as far from float64 an answer may be as the block's own, and the worst of its values."""

RUNS = ((4, 6, 9, 5.0), (3, 5, 7, 1.0), (1, 40, 7, 5.0))
"""Height and width of the latent, tokens, and guidance: without it the batch is 1, and else 2."""

_WAN = FAMILIES["Wan"].family
MODELS = {
    **FAMILIES,
    **OTHERS,
    # A program reads at most 2048 numbers of a row at once.
    "wide Wan": TinyFamily(
        Family("", "WAN21_T2V", _WAN.config | dict(dim=2176, num_heads=17, num_layers=2), 48), VIDEO
    ),
}


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """A call of a compiled block. tensors: weights and inputs, with random numbers."""

    graph: Any
    template: torch.nn.Module
    call: Any
    tensors: list[torch.Tensor]

    def eager(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """What the block answers in this precision."""
        given = [part.to(dtype if part.is_floating_point() else part.dtype, copy=True) for part in self.tensors]
        count = len(self.call.kind.weights)
        args, kwargs = tree_spec.rebuild(self.call.spec, given[count:])
        weights = dict(zip(self.call.kind.weights, given[:count], strict=True))
        # comfy-kitchen's operators take no float64.
        with torch.inference_mode(), traceable():
            return _parts(torch.func.functional_call(self.template, weights, args, kwargs))

    def off(self, kernels: Computed) -> float:
        """How far its answers are from the block's: in parts of what they may be."""
        count, dtype = len(self.call.kind.weights), self.tensors[0].dtype
        own, exact = self.eager(dtype), self.eager(torch.float64)
        types = {tensor.dtype for tensor in self.tensors}
        found = [0.0 if kernels.within else math.inf]
        for answer in kernels.answers:
            for made, right, known in zip(_parts(answer), own, exact, strict=True):
                least = known.abs() * torch.finfo(dtype).eps / 8
                ours, blocks = ((part - known).abs().maximum(least) for part in (made, right))
                found += [ours.norm() / blocks.norm() / FARTHER, ours.max() / blocks.max() / FARTHEST]
                found += [output_check.compare_to_rounding(made, right, self.tensors[count:], types) or 0.0]
        return max(math.inf if math.isnan(value) else float(value) for value in found)


def _parts(output: Any) -> list[torch.Tensor]:
    if output is None:  # SD3's last block for text
        return []
    return [output] if isinstance(output, torch.Tensor) else [part for one in output for part in _parts(one)]


def _filled(tensor: torch.Tensor, weight: str | None, generator: torch.Generator) -> torch.Tensor:
    """A tensor like this with random numbers; weight: its name in the block, None for an input."""
    values = torch.randn(tensor.shape, generator=generator)
    if weight is not None:
        is_scale = weight.endswith(("weight", "scale"))
        values = values / tensor[0].numel() ** 0.5 if tensor.ndim > 1 else values * 0.1 + is_scale
    values = values if tensor.is_floating_point() else values > -1  # a mask
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(values)


@functools.cache
def calls_of(name: str, dtype: str) -> list[BlockCall]:
    """The calls of a model's blocks in the runs, one of each graph and size."""
    family = MODELS[name]
    (channels, *rest), *more = family.sizes[0]
    frames = [min(2, size) for size in rest[:-2]]
    compile_block, found, made = block_compiler.compile_block, {}, []

    def watched(template: Any, call: Any, *how: Any, **more: Any) -> Any:
        graph = compile_block(template, call, *how, **more)
        run, weights = graph.run, call.kind.weights

        def seen(tensors: Any) -> Any:
            key = (id(graph), *((tensor.shape, tensor.stride()) for tensor in tensors))
            if key not in found:
                generator = torch.Generator().manual_seed(0)
                names = (*weights, *[None] * (len(tensors) - len(weights)))
                filled = [_filled(*each, generator) for each in zip(tensors, names, strict=True)]
                found[key] = BlockCall(graph, template, call, filled)
            return run(tensors)

        graph.run = seen
        made.append((graph, run))
        return graph

    fallbacks.clear()
    model = family.family.load(DTYPES[dtype], device=torch.device("cuda"))
    model = accelerate(model, CompileSettings(), GraphCache(), graphs=False)
    with mock.patch.object(block_compiler, "compile_block", watched), not_built():
        for height, width, tokens, cfg in RUNS:
            if name == "HunyuanVideo":  # core takes no odd sides of it
                height, width = 2 * height, 2 * width
            shapes = (channels, *frames, height, width), *more
            here = dataclasses.replace(family, sizes=(shapes,), tokens=(tokens, tokens), cfg=cfg)
            extras = family.extras(shapes, Noise(0))
            if "attention_mask" in extras:
                extras["attention_mask"] = torch.ones(1, tokens, dtype=torch.long)
            here.sample(model, steps=1, **extras)
    for graph, run in made:
        graph.run = run
    assert fallbacks.rows() == [] and len(found) > len(made)
    return list(found.values())


@pytest.fixture(autouse=True)
def values_compared(monkeypatch):
    """Here there are values."""
    monkeypatch.setattr(output_check, "_worst", output_check._worst.__wrapped__)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_kernels_compute_what_blocks_do(name, dtype):
    calls = calls_of(name, dtype)
    for call, kernels in zip(calls, computed([GraphCall(call.graph, call.tensors) for call in calls]), strict=True):
        sizes = " ".join("x".join(map(str, part.shape)) for part in call.tensors[len(call.call.kind.weights) :])
        off = call.off(kernels)
        counts = f"{kernels.kernels} kernels, {kernels.configurations} configurations, {len(kernels.answers)} rounds"
        print(f"{name} {dtype}: {call.call.kind.name} {sizes}: {counts}: {off:.2f} of what is allowed")
        assert kernels.kernels and off <= 1


WRONG = {
    "writes one too many": (r"xindex < xnumel", "xindex <= xnumel"),
    "leaves the last one out": (r"xindex < xnumel", "xindex < xnumel - 1"),
    "sums beyond the row": (r"r0_index < r0_numel", "r0_index < R0_BLOCK"),
    "reads the neighbour": (r"tl\.load\(in_ptr0 \+ \(", "tl.load(in_ptr0 + (1 + "),
}


def test_wrong_kernels_are_found_and_right_ones_pass():
    call = min(calls_of("Wan", "bf16"), key=lambda call: sum(part.numel() for part in call.tensors))
    given = [
        GraphCall(call.graph, call.tensors, changes) for changes in ((), *((change,) for change in WRONG.values()))
    ]
    right, *wrong = map(call.off, computed(given))
    assert right <= 1 < min(wrong), (right, dict(zip(WRONG, wrong, strict=True)))
