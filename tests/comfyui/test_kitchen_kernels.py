"""Functions of comfy-kitchen that are operators of torch: compiled blocks have its Python code in their place.

comfy-kitchen is stood in for by two modules with two such functions, since the core of the tests has none.
"""

import sys
import types

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import block_layers
from comfy_accel.accel.modules.substitution import Order, substitute
from kit.compiled import graphs

ROTATE = "accel_test::rotate"


@torch.library.custom_op(ROTATE, mutates_args=())
def _rotate(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    return x * freqs_cis


@_rotate.register_fake
def _(x, freqs_cis):
    return torch.empty_like(x)


def operator(x, freqs_cis):
    return torch.ops.accel_test.rotate(x, freqs_cis)


def in_python(x, freqs_cis):
    return x * freqs_cis


kitchen, eager = types.ModuleType("comfy_kitchen"), types.ModuleType("comfy_kitchen.backends.eager")
kitchen.apply_rope1 = kitchen.rms_adaln = operator
eager.apply_rope1 = eager.rms_adaln = in_python


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.out = (torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, freqs_cis):
        return x + self.out(kitchen.apply_rope1(self.q(kitchen.rms_adaln(x, freqs_cis)), freqs_cis))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, freqs_cis):
        for block in self.blocks:
            x = block(x, freqs_cis)
        return x


@pytest.mark.parametrize("is_there", [True, False])
def test_a_compiled_block_computes_them_itself_where_their_python_code_is_known(is_there, monkeypatch):
    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen)
    monkeypatch.setitem(sys.modules, "comfy_kitchen.backends.eager", eager if is_there else None)
    called = []

    def backend(graph, examples):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    model, cache = Model().requires_grad_(False), GraphCache()
    for tokens in (5, 9):
        x, freqs_cis = torch.randn(2, tokens, 8), torch.randn(1, tokens, 8)
        expected = model(x, freqs_cis)
        layers = block_layers(model, CompileSettings(backend=backend), cache)
        with substitute(layers, Order.COMPILED):
            assert torch.equal(model(x, freqs_cis), expected)
    assert graphs() == 1 and kitchen.apply_rope1 is kitchen.rms_adaln is operator
    assert ("accel_test.rotate" in called) == (not is_there)
