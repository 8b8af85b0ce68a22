"""Blocks whose weights are GGUF's: read inside of the graph by the layers' own code, and equal to eager.

On a stand-in for ComfyUI-GGUF's layers, and on its own where `COMFYUI_GGUF` is a folder with the extension: the package
index has the `gguf` package that they need, and not the extension.
"""

import importlib
import os
import sys
import types
from typing import Any

import comfy.lora
import comfy.ops
import pytest
import torch
from comfy.weight_adapter import LoKrAdapter, LoRAAdapter
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.hosts.comfyui.models import streamed
from comfy_accel.accel.hosts.comfyui.models.accelerate import block_layers
from comfy_accel.accel.hosts.comfyui.text_encoder import accelerate_clip
from comfy_accel.accel.modules.substitution import Order, substitute
from comfy_accel.accel.signature.output_check import compare_to_rounding
from kit.compiled import graphs
from kit.quantised_layers import EAGER, WIDTH, FeedForwards, X, both_ways, plain
from kit.stores import saving
from kit.tiny_encoders import ENCODERS

pytestmark = pytest.mark.usefixtures("without_gradients")

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
        for patches, key in stored.patches:
            weight = comfy.lora.calculate_weight(patches, weight, key)
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


def lora(seed: int, rank: int, strength: float, alpha: float | None = None, part: Any = None) -> tuple:
    """Core's patch of a square weight of the model, or of a part of one: (dimension, first, count)."""
    random = torch.Generator().manual_seed(seed)
    sizes = [part[2] if part and part[0] == dimension else WIDTH for dimension in (0, 1)]
    up, down = torch.randn(sizes[0], rank, generator=random), torch.randn(rank, sizes[1], generator=random)
    return strength, LoRAAdapter(set(), (up, down, alpha, None, None, None)), 1.0, part, None


def patched(model: FeedForwards, *patches: tuple) -> None:
    """Have the last layer of each block add these to its weight at each use, as the extension does with LoRA."""
    for at, block in enumerate(model.blocks):
        block.net[2].weight.patches = [(list(patches), f"blocks.{at}.net.2.weight")] if patches else []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_graph_serves_every_size_and_model_of_a_layout_and_equals_eager(layout):
    cache = GraphCache()
    for seed, x in enumerate((X[:1, :5], X, torch.cat([X, X]))):
        eager, compiled = both_ways(stored(layout, seed), cache, x)
        assert torch.equal(compiled, eager) and torch.isfinite(eager).all() and type(compiled) is torch.Tensor
    assert fallbacks.rows() == [] and graphs() == 1


LORAS = {
    "one": [lora(1, 4, 0.5)],
    "at another strength": [lora(1, 4, -1.25)],
    "of another rank": [lora(2, 9, 1.0, alpha=3.0)],
    "of rank 1": [lora(3, 1, 1.0)],
    "three": [lora(1, 4, 0.5), lora(2, 16, 0.25, alpha=8.0), lora(3, 1, 1.0)],
    "on rows and columns": [lora(4, 4, 1.0, part=(0, 32, 64)), lora(5, 8, 1.0, part=(1, WIDTH - 8, 8))],
}


@pytest.mark.parametrize("layout", LAYOUTS[:-1])  # on F16 the extension adds a LoRA for good
def test_one_graph_serves_every_lora_on_the_weights_and_another_the_bare_ones(layout):
    model, cache = stored(layout), GraphCache()
    bare, compiled = both_ways(model, cache, X)
    assert torch.equal(compiled, bare)
    for patches in LORAS.values():
        patched(model, *patches)
        eager, compiled = both_ways(model, cache, X[:, : 7 - len(patches)])
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5 * float(eager.abs().max()))
        assert (eager - bare[:, : 7 - len(patches)]).abs().max() > 0.01 * bare.abs().max()
    assert graphs() == 2 and fallbacks.rows() == []
    patched(model)
    eager, compiled = both_ways(model, cache, X)
    assert torch.equal(compiled, bare) and torch.equal(eager, bare) and graphs() == 2


def test_lora_that_comes_within_a_run_is_added():
    model, cache = stored("stand-in"), GraphCache()
    layers = block_layers(model, EAGER, cache)
    patched(model, lora(1, 4, 0.5))
    eager = model(X)
    with substitute(layers, Order.COMPILED):
        assert torch.equal(model(X), eager)


MATRIX = torch.ones(16, 16) / WIDTH
NOT_LOW_RANK = {
    "lokr": (1.0, LoKrAdapter(set(), (MATRIX, MATRIX, None, *[None] * 6)), 1.0, None, None),
    "full-size change": (1.0, ("diff", (torch.ones(WIDTH, WIDTH),)), 1.0, None, None),
    "two matrices": (1.0, lora(1, 4, 1.0)[1], 0.5, None, None),
    "another shape": lora(1, 4, 1.0)[:3] + ((0, 0, 32), None),
}


@pytest.mark.parametrize("what", NOT_LOW_RANK)
def test_what_is_no_low_rank_product_runs_eagerly_with_a_reason_in_words(what):
    model, cache = stored("stand-in"), GraphCache()
    both_ways(model, cache, X)
    patched(model, lora(1, 4, 1.0))
    layers = block_layers(model, EAGER, cache)
    patched(model, NOT_LOW_RANK[what])
    eager = model(X)
    with substitute(layers, Order.COMPILED):
        assert torch.equal(model(X), eager)
    (row,) = fallbacks.rows()
    (reason, *_) = [str(reason) for _, reason in survey(model).left_eager] or [row["reason"]]
    for words in (reason, row["reason"]):
        assert what in words and "is added at each use" in words


def test_block_with_weights_that_wait_for_each_use_runs_as_it_is():
    model, cache = stored("stand-in"), GraphCache()
    model.blocks[1].net[2].prev_comfy_cast_weights = False  # as core marks layers that it has not loaded
    assert [region.path for region in survey(model, plain=streamed.plain).regions] == ["blocks.0"]
    eager, compiled = both_ways(model, cache, X)
    assert torch.equal(compiled, eager) and graphs() == 1 and [row["calls"] for row in fallbacks.rows()] == [1]


def test_each_way_of_reading_the_bytes_makes_a_kind_of_its_own():
    models = [stored(layout) for layout in (*STAND_INS, *(TYPES if REAL else ()))]
    other = stored("stand-in")
    for block in other.blocks:
        block.net[2].weight.tensor_type = "otherwise"
    kinds = [survey(model).kinds for model in (*models, other)]
    assert len(set(kinds)) == len(models) + 1
    # The largest weight's mark is read where memory is estimated alone.
    assert all(len(of_model) == 1 and not of_model[0].opaque for of_model in kinds)


def test_text_encoder_of_such_layers_is_compiled_once_for_every_prompt():
    encoders, random = ENCODERS["Z-Image"], torch.Generator().manual_seed(0)
    clip = encoders.load(custom_operations=StandIn)
    for part in clip.cond_stage_model.modules():
        if isinstance(part, StandInLayer):
            rows, columns = part.weight.shape
            data = torch.randint(0x14, (rows, columns // 32 * 34), dtype=torch.uint8, generator=random)
            of_bytes = StandInTensor(data, tensor_type="by 32", tensor_shape=torch.Size((rows, columns)), patches=[])
            part.weight = torch.nn.Parameter(of_bytes, False)
            part.bias = torch.nn.Parameter(torch.zeros(rows), False)
    fast = accelerate_clip(clip, EAGER, GraphCache())
    for length in (20, 33):
        tokens = encoders.tokens(length)
        assert torch.equal(fast.encode_from_tokens(tokens), clip.encode_from_tokens(tokens))
    assert graphs() == 1 and fallbacks.rows() == []


@pytest.mark.thorough  # compiles with inductor
@pytest.mark.parametrize("layout", [*STAND_INS, *(pytest.param(name, marks=SKIPPED) for name in ("Q4_K", "IQ4_XS"))])
def test_compiled_graph_serves_other_weights_and_loras_of_its_layout_and_is_saved(layout, tmp_path):
    settings, caches = CompileSettings(backend="inductor"), [saving(tmp_path), saving(tmp_path)]
    for seed, cache in enumerate(caches):
        model, x = stored(layout, seed), X[:, : 7 - seed]
        eager, compiled = both_ways(model, cache, x, settings)
        assert compare_to_rounding(compiled, eager) is None
        for name in ("three", "of rank 1"):
            patched(model, *LORAS[name])
            eager, compiled = both_ways(model, cache, x, settings)
            assert compare_to_rounding(compiled, eager) is None
    assert fallbacks.rows() == []
    counts = [[cache.statistics()[name] for name in ("loaded", "compilations")] for cache in caches]
    assert counts == [[0, 2], [2, 0]]
