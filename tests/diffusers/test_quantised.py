"""Transformers with quantised weights: the eager images, all blocks compiled, with LoRA too."""

import peft
import pytest
import torch
from comfy_accel.accel import accelerate_pipeline, restore
from comfy_accel.accel.cache.graph_cache import shared
from comfy_accel.accel.core.fallbacks import fallbacks
from kit import deep_transformers
from kit.blocks import Stored
from kit.compiled import graphs
from torch import nn


class StandIn(nn.Linear):
    called_with: set = set()

    def forward(self, x):
        self.called_with.add(type(x))
        data = torch.from_numpy(self.weight.as_subclass(torch.Tensor).numpy().astype("float32"))
        return nn.functional.linear(x, data / 100, self.bias)


def stand_in(layer):
    made = StandIn(layer.in_features, layer.out_features, layer.bias is not None)
    made.weight = Stored((layer.weight * 100).round().clamp(-127, 127).to(torch.int8), requires_grad=False)
    made.bias = layer.bias
    return made


def nf4(layer):
    nn4 = pytest.importorskip("bitsandbytes", reason="an optional package of diffusers").nn
    made = nn4.Linear4bit(*_sizes(layer), compute_dtype=torch.float32, quant_type="nf4")
    made.weight = nn4.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=made)
    made.bias = layer.bias
    made.weight._quantize("cpu")
    return made


def llm_int8(layer):
    nn8 = pytest.importorskip("bitsandbytes", reason="an optional package of diffusers").nn
    made = nn8.Linear8bitLt(*_sizes(layer), has_fp16_weights=False)
    made.weight = nn8.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
    made.bias = layer.bias
    return made.to("cpu")


def gguf_q8_0(layer):
    gguf = pytest.importorskip("gguf", reason="an optional package of diffusers")
    from diffusers.quantizers.gguf import utils

    if layer.in_features % 32:
        return layer
    of = gguf.GGMLQuantizationType.Q8_0
    made = utils.GGUFLinear(*_sizes(layer), compute_dtype=torch.float32)
    made.weight = utils.GGUFParameter(torch.from_numpy(gguf.quants.quantize(layer.weight.numpy(), of)), quant_type=of)
    made.bias = layer.bias
    return made


def _sizes(layer):
    return layer.in_features, layer.out_features, layer.bias is not None


def torchao(config):
    def make(layer):
        ao = pytest.importorskip("torchao.quantization", reason="an optional package of diffusers")
        ao.quantize_(layer, getattr(ao, config)())
        return layer

    return make


FORMS = {
    "stand-in": stand_in,
    "bitsandbytes nf4": nf4,
    "bitsandbytes int8": llm_int8,
    "GGUF Q8_0": gguf_q8_0,
    "torchao int8 weight-only": torchao("Int8WeightOnlyConfig"),
    "torchao int8 dynamic": torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao fp8 weight-only": torchao("Float8WeightOnlyConfig"),
}


def pipeline(form):
    """Flux, the linear layers of its blocks in one of `FORMS`."""
    model = deep_transformers.transformer("Flux").requires_grad_(False)
    for path, part in list(model.named_modules()):
        for name, layer in list(part.named_children()):
            if type(layer) is nn.Linear and "transformer_blocks" in path:
                setattr(part, name, FORMS[form](layer))
    return deep_transformers.pipeline("FluxPipeline", transformer=model)


SIZES = [{"height": 64, "width": 96}, {"height": 96, "width": 64, "batch": 2}]


def images(pipe):
    return [deep_transformers.sample(pipe, steps=2, **size) for size in SIZES]


def assert_compiled(pipe, plain, kinds, tolerance=1e-5):
    """The images are the plain ones, and this many graphs have been made since the test began."""
    hits = shared.statistics()["hits"]
    for image, expected in zip(images(pipe), plain, strict=True):
        assert (image - expected).abs().max() <= tolerance * expected.abs().max()
    assert shared.statistics()["hits"] - hits == 2 * 2 * 9 and fallbacks.rows() == []
    assert graphs() == kinds


@pytest.mark.parametrize("form", FORMS)
def test_all_blocks_of_quantised_weights_are_compiled_once(form):
    shared.clear()
    pipe = pipeline(form)
    plain = images(pipe)
    accelerate_pipeline(pipe, backend="eager")
    assert_compiled(pipe, plain, 2, tolerance=0)
    assert StandIn.called_with <= {torch.Tensor}  # a kernel would read memory that is not there
    restore(pipe)
    assert torch.equal(images(pipe)[0], plain[0])


@pytest.mark.thorough  # tests/comfyui/test_partial_load.py and test_gguf.py have quick ones of the same layers
@pytest.mark.parametrize("form", FORMS)
def test_lora_on_quantised_weights_makes_one_graph_a_kind_for_every_strength(form):
    shared.clear()
    pipe = pipeline(form)
    model = pipe.transformer
    plain = images(pipe)
    accelerate_pipeline(pipe, backend="eager")
    assert_compiled(pipe, plain, 2)
    torch.manual_seed(0)
    targets = ["to_q", "to_k", "to_v", "proj_mlp", "ff.net.2"]
    model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets), "a")
    made = None
    for strength in (1.0, 0.3):
        model.set_adapters("a", strength)
        restore(pipe)
        expected = images(pipe)
        assert not torch.allclose(expected[0], plain[0])
        accelerate_pipeline(pipe, backend="eager")
        if made is None:
            images(pipe)
            made = graphs()
        assert_compiled(pipe, expected, made)
    assert made <= 4
