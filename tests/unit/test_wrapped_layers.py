"""Blocks whose layers somebody has wrapped: one kind and one graph with the bare ones, and what is added counts."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.core.reasons import Reason, RunEagerly
from comfy_accel.accel.dispatch.block_runner import BlockRunner, BlocksRun
from comfy_accel.accel.dispatch.lora import add_updates
from comfy_accel.accel.fingerprint.kinds import template_of
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.modules.wrapped_layers import LowRank
from kit.blocks import model_of
from torch import nn


class Adapter(nn.Module):
    """Around a linear layer or a convolution, as a LoRA is."""

    def __init__(self, layer, rank=2, scale=0.5):
        super().__init__()
        self.layer = layer
        self.scale = scale
        self.refuses = False
        if isinstance(layer, nn.Linear):
            self.down = nn.Linear(layer.in_features, rank, bias=False)
            self.up = nn.Linear(rank, layer.out_features)
        else:
            self.down = nn.Conv2d(layer.in_channels, rank, layer.kernel_size, padding=layer.padding, bias=False)
            self.up = nn.Conv2d(rank, layer.out_channels, 1)
        self.requires_grad_(False)

    @property
    def weight(self):
        return self.layer.weight

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x)) * self.scale


class Adapters:
    def base(self, module):
        return module.layer if isinstance(module, Adapter) else None

    def reader(self, wrapper, base):
        def read():
            if wrapper.refuses:
                raise RunEagerly(Reason("lora_changed"))
            return [LowRank(wrapper.up.weight, wrapper.down.weight, wrapper.scale, wrapper.up.bias)]

        return read


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.lists = nn.ModuleList([nn.Linear(4, 4), nn.Identity()])

    def forward(self, x):
        return self.lists[1](self.lists[0](self.conv(x).transpose(1, 3))).transpose(1, 3)


class ReadsWeights(Block):
    def forward(self, x):
        return nn.functional.conv2d(x, self.conv.weight, padding=1) + self.lists[0](x.transpose(1, 3)).transpose(1, 3)


def model(*blocks):
    torch.manual_seed(0)
    return model_of(*(blocks or [Block(), Block()]))


def wrap(block, **options):
    block.conv = Adapter(block.conv, **options)
    block.lists[0] = Adapter(block.lists[0], **options)
    return block


def runner(made, cache, index=0):
    region = survey(made, wraps=Adapters()).regions[index]
    return BlockRunner(region, BlocksRun(cache, CompileSettings(backend="eager")))


X = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(1))


def test_wrapped_block_is_found_copied_and_called_as_the_bare_one():
    made = model()
    bare = survey(made).regions
    wrap(made.blocks[1])
    assert [(found.path, found.kind) for found in survey(made, wraps=Adapters()).regions] == [
        (found.path, found.kind) for found in bare
    ]
    assert [found.path for found in survey(made).regions] != [found.path for found in bare]
    template = template_of(made.blocks[1], Adapters())
    assert [type(part) for part in template.modules()] == [type(part) for part in model().blocks[0].modules()]
    assert isinstance(made.blocks[1].conv, Adapter)


def test_one_graph_serves_the_block_whatever_is_around_its_layers():
    made, cache = model(), GraphCache()
    block = made.blocks[0]
    stand_in = runner(made, cache)

    def same(other=None):
        out = stand_in(block.forward, X)
        torch.testing.assert_close(out, block(X), rtol=1e-5, atol=1e-6)
        assert other is None or not torch.allclose(out, other, atol=1e-3)
        return out

    out = same()
    wrap(block)
    out = same(out)
    block.conv.scale = 2.0
    out = same(out)
    block.conv.scale = torch.tensor(-1.0)
    out = same(out)
    block.conv.up.weight.mul_(3)
    out = same(out)
    block.conv = Adapter(block.conv.layer, rank=3)
    out = same(out)
    block.conv, block.lists[0] = block.conv.layer, block.lists[0].layer
    same(out)
    statistics = cache.statistics()
    assert statistics["graphs"] == statistics["misses"] == 1 and statistics["hits"] == 7
    assert not fallbacks.rows()


def replace(block):
    block.conv = nn.Conv2d(4, 4, 3, padding=1)
    return "conv was replaced after"


def refuse(block):
    wrap(block).conv.refuses = True
    return "another extension changes a layer's LoRA"


def learn(block):
    wrap(block).conv.up.weight.requires_grad_(True)
    return "gradients are requested"


def misfit(block):
    wrap(block).conv.up = nn.Conv2d(2, 5, 1).requires_grad_(False)
    return "what is added to its weights cannot be added"


@pytest.mark.parametrize("change", [replace, refuse, learn, misfit])
def test_block_changed_otherwise_runs_as_it_is_with_the_reason(change):
    made, cache = model(), GraphCache()
    block = made.blocks[0]
    stand_in = runner(made, cache)
    stand_in(block.forward, X)
    reason = change(block)
    assert stand_in(lambda x: "as it is", X) == "as it is"
    assert reason in fallbacks.rows()[0]["reason"]


def test_layer_whose_weight_is_used_past_its_wrapper_runs_as_it_is():
    shared = Block()
    shared.lists[1] = shared.lists[0]
    for block, reason in ((shared, "used elsewhere too"), (ReadsWeights(), "reads weights of its parts")):
        stand_in = runner(model(block), GraphCache())
        wrap(block)
        expected = block(X)
        assert torch.equal(stand_in(block.forward, X), expected)
        assert reason in fallbacks.rows()[-1]["reason"]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_is_added_keeps_type_and_layout_of_the_weight(kind, layout):
    layer = nn.Conv2d(4, 6, 3, padding=1).to(kind).to(memory_format=layout).requires_grad_(False)
    wrapper = Adapter(layer)  # of float32, whatever the layer is
    x = torch.randn(1, 4, 5, 5)
    added = [(0, 1, Adapters().reader(wrapper, layer)())]
    weight, bias = add_updates([layer.weight, layer.bias], added)
    assert (weight.dtype, weight.stride(), bias.dtype) == (kind, layer.weight.stride(), kind)
    expected = wrapper.float()(x)
    torch.testing.assert_close(
        nn.functional.conv2d(x, weight.float(), bias.float(), padding=1), expected, rtol=1e-2, atol=1e-2
    )
