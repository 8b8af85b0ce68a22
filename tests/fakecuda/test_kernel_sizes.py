"""Generated kernels take sizes of 32 bits where guards prove that these are enough, and of 64 bits elsewhere."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comfy_accel.accel.compile import generated_code
from comfy_accel.accel.core import torch_internals
from kit.block_graphs import compiled, on_card, zeros
from kit.interpreted import GraphCall, computed


class Scaled(torch.nn.Module):
    """The index of a channel is a division by height times width."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64, 1, 1))

    def forward(self, x):
        return torch.relu(x) * self.scale


class Counted(torch.nn.Module):
    """The product of sizes may be larger than any index."""

    def forward(self, x):
        return torch.relu(x) * (x.shape[2] * x.shape[3] * 4096)


class Joined(torch.nn.Module):
    """Text beside an image, in heads, moved and summed: indices are divided by numbers of tokens."""

    def forward(self, text, image, move):
        both = torch.cat([text, image], 1) + move[:, None]
        heads = both.unflatten(2, (3, 8)).transpose(1, 2)
        return (heads * 2).contiguous(), (image * (move[:, None] + 1)).sum(2)


class Rotated(torch.nn.Module):
    """As many heads as there are angles, each as wide as the width divided by them, as in LTX 2."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(64))

    def forward(self, x, angles):
        heads = (x * self.scale).reshape(*x.shape[:2], angles.shape[2], -1)
        return heads[..., ::2] * angles


class Channels(torch.nn.Module):
    """Any number of channels, as in blocks of one kind whose widths differ."""

    def forward(self, x, scale):
        return torch.relu(x) * scale[:, None, None]


class Attended(torch.nn.Module):
    """Text and image joined by heads, whose attention is read by tokens."""

    def forward(self, text, image):
        queries, keys = (torch.cat([text * scale, image], 2) for scale in (2, 3))
        out = torch.nn.functional.scaled_dot_product_attention(queries, keys, keys)
        return out.transpose(1, 2).flatten(2)


def made(block, *shapes, dtype=torch.half):
    """The graph of the block for tensors of these shapes, its weights, and the file of its source."""
    block = on_card(block, dtype)
    with torch.inference_mode(), generated_code.collect_modules() as modules:
        graph, weights = compiled(block, zeros(*shapes, dtype=dtype), backend="inductor", savable=False)
    (file,) = (module.__file__ for module in modules if hasattr(module, "call"))
    return graph, weights.take(), file


def types(file):
    """Of the sizes in kernels, by their names."""
    return dict(re.findall(r"'(ks\d+)': '(i\d+)'", Path(file).read_text()))


def accepts(graph, weights, *shape):
    return graph.accepts([*weights, torch.empty(shape, dtype=torch.half, device="meta")])


@pytest.fixture(scope="module")
def joined():
    """Compiled as on Windows."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(generated_code, "sys", SimpleNamespace(platform="win32", modules=sys.modules))
        return made(Joined(), (2, 7, 24), (2, 30, 24), (2, 24), dtype=torch.float32)


def test_kernels_have_names_whose_files_windows_can_open(joined):
    """Behind a user's folder, inductor's and Triton's, a hash of 52 and a temporary folder with an id of 36."""
    _, _, file = joined
    names = re.findall(r"^(triton_\w+) = async_compile", Path(file).read_text(), re.MULTILINE)
    folder = len(r"\AppData\Local\Temp\torchinductor_\triton\0\tmp.pid_123456_\.source") + 60 + 20 + 52 + 36
    assert names and folder + max(map(len, names)) < 260
    assert torch._inductor.config.triton.descriptive_names


SMALL, LARGE = (2, 64, 30, 40), (2, 64, 4096, 4100)


def test_sizes_whose_products_fit_32_bits_have_them_and_others_another_graph():
    graph, weights, file = made(Scaled(), SMALL)
    assert types(file) == {"ks0": "i32", "ks1": "i64"}  # the inverse
    assert f"cc={os.environ.get('FAKECUDA_CC', 90)}," in Path(file).read_text()
    assert accepts(graph, weights, 3, 64, 2000, 3000)
    assert not accepts(graph, weights, *LARGE)
    graph, weights, file = made(Scaled(), LARGE)
    assert types(file) == {"ks0": "i64"}
    assert accepts(graph, weights, *LARGE)


def test_product_of_sizes_has_64_bits():
    assert set(types(made(Counted(), SMALL)[2]).values()) == {"i64"}


def test_indices_are_divided_without_divisions_and_rightly(joined):
    graph, _, file = joined
    code = Path(file).read_text()
    assert "divided0(" in code
    assert not re.search(r"(//|%) \(?ks", code)
    tensors = [torch.randn(size) for size in ((3, 5, 24), (3, 60, 24), (3, 24))]
    (kernels,) = computed([GraphCall(graph, tensors)])
    assert kernels.within and kernels.configurations > kernels.kernels
    for answer in kernels.answers:
        for actual, expected in zip(answer, Joined()(*tensors), strict=True):
            torch.testing.assert_close(actual, expected)
    empty = [torch.empty(size, device="cuda") for size in ((0, 7, 24), (0, 30, 24), (0, 24))]
    assert graph.accepts(empty)
    with torch.inference_mode():
        assert graph.run(empty)[0].shape == (0, 3, 37, 8)


def test_remainder_of_a_quotient_takes_no_division():
    graph, _, file = made(Channels(), (2, 24, 5, 7), (24,), dtype=torch.float32)
    assert not re.search(r"(//|%) \(?ks", Path(file).read_text())
    tensors = [torch.randn(size) for size in ((3, 40, 3, 11), (40,))]
    (kernels,) = computed([GraphCall(graph, tensors)])
    torch.testing.assert_close(kernels.answers, [Channels()(*tensors)] * len(kernels.answers))


def test_kernels_divide_by_no_number_of_heads():
    graph, weights, file = made(Rotated(), (2, 7, 64), (2, 7, 4, 1))
    assert not re.search(r"(//|%) \(?ks|divided", Path(file).read_text())
    half = [torch.empty(size, dtype=torch.half, device="meta") for size in ((3, 5, 64), (3, 5, 4, 1), (3, 5, 8, 1))]
    assert graph.accepts([*weights, *half[:2]]) and not graph.accepts([*weights, half[0], half[2]])


def test_result_of_attention_is_not_copied():
    code = Path(made(Attended(), (2, 4, 7, 64), (2, 4, 30, 64))[2]).read_text()
    _, after = code.split("aten._scaled_dot_product_flash_attention.default(")
    assert "triton" not in after.partition("return (")[0]


def test_torch_that_lacks_a_name_compiles_with_64_bits(monkeypatch):
    monkeypatch.setattr(torch_internals, "NARROW_SIZES", (torch_internals.Internal("torch", "gone", "2.7", "."),))
    assert types(made(Scaled(), (3, 64, 30, 50))[2]) == {"ks0": "i64"}
