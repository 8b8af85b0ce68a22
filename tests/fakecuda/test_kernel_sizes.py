"""Generated kernels take sizes of 32 bits where guards prove that these are enough, and of 64 bits elsewhere."""

import re
from pathlib import Path

import torch
from comfy_accel.accel.compile import block_compiler, generated_code
from comfy_accel.accel.core import torch_internals
from comfy_accel.accel.fingerprint.kinds import describe, kinds_of, template_of, weight_slots
from comfy_accel.accel.signature import tree_spec


class Scaled(torch.nn.Module):
    """The index of a channel is a division by height times width."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64, 1, 1))

    def forward(self, x):
        return torch.relu(x) * self.scale


def compiled(*shape):
    """Whether the graph for an image of this shape accepts others, and the types of the sizes in its kernels."""
    block = Scaled().half().cuda().requires_grad_(False)
    (kind,) = kinds_of([describe(block)])
    inputs: list[torch.Tensor] = []
    spec = tree_spec.flatten(((torch.empty(shape, dtype=torch.half, device="cuda"),), {}), inputs)
    weights = weight_slots(block, kind.weights).read()
    before = {module.__file__ for module in generated_code.all_modules()}
    with torch.inference_mode():
        graph = block_compiler.compile_block(template_of(block), kind, weights, spec, inputs, savable=False)
    files = {module.__file__ for module in generated_code.all_modules()} - before
    signatures = re.findall(r"'signature': {(.*?)}", "".join(Path(file).read_text() for file in files))
    return (
        lambda *shape: graph.accepts([*weights, torch.empty(shape, dtype=torch.half, device="meta")]),
        set(re.findall(r"'ks\d': '(i\d+)'", "".join(signatures))),
    )


SMALL, LARGE = (2, 64, 30, 40), (2, 64, 4096, 4100)


def test_sizes_whose_products_fit_32_bits_have_them_and_others_another_graph():
    accepts, types = compiled(*SMALL)
    assert types == {"i32"}
    assert accepts(3, 64, 2000, 3000)
    assert not accepts(*LARGE)
    accepts, types = compiled(*LARGE)
    assert types == {"i64"}
    assert accepts(*LARGE)


def test_torch_that_lacks_a_name_compiles_with_64_bits(monkeypatch):
    monkeypatch.setattr(torch_internals, "NARROW_SIZES", (torch_internals.Internal("torch", "gone", "2.7", "."),))
    assert compiled(3, 64, 30, 50)[1] == {"i64"}
