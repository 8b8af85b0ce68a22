"""Group norms are replaced by an operator that computes the same; and its kernels are right."""

import math
from pathlib import Path

import pytest
import torch
from comfy_accel.accel.kernels import rewriting
from kit.interpreted import interpreted, kernels
from torch import nn
from torch.nn import functional

pytest.importorskip("triton", reason="torch has no Triton on this system")

KERNELS = Path(rewriting.__file__).parent / "group_norm.py"


def norm(x, weight, bias, groups, eps, silu, by_channel=None, by_image=None):
    rest = (1,) * (x.ndim - 2)
    added = [given.view(*given.shape, *rest) for given in (by_channel, by_image) if given is not None]
    y = functional.group_norm(sum(added, x), groups, weight, bias, eps)
    return functional.silu(y) if silu else y


@pytest.fixture
def rewritten(monkeypatch):
    """Runs a function over any size, rewritten; returns how many tensors each of its norms takes."""
    from comfy_accel.accel.kernels.group_norm import define

    define()
    monkeypatch.setattr(rewriting, "DEVICE", "cpu")

    def run(function, *args, dynamic=None):
        found = []

        def backend(module, _):
            rewriting.rewrite(module.graph)
            for node in module.graph.nodes:
                if node.target is torch.ops.accel.group_norm.default:
                    found.append(sum(isinstance(argument, torch.fx.Node) for argument in node.args))
                    node.target = norm
            module.graph.lint()
            module.recompile()
            return module.forward

        torch._dynamo.reset()
        given = [arg.clone() for arg in args]
        if dynamic is None:
            torch._dynamo.maybe_mark_dynamic(given[0], (0, 2, 3))
            torch._dynamo.maybe_mark_dynamic(given[1], 0)
        out = torch.compile(function, dynamic=dynamic, fullgraph=True, backend=backend)(*given)
        for actual, expected in zip((out, *given), (function(*args), *args), strict=True):
            torch.testing.assert_close(actual, expected)
        return found

    return run


def inputs():
    torch.manual_seed(0)
    return torch.randn(2, 64, 6, 10), torch.randn(2, 64), torch.randn(64)


group_norm = nn.GroupNorm(32, 64).requires_grad_(False)
nn.init.normal_(group_norm.weight)
nn.init.normal_(group_norm.bias)


def with_all(x, embedding, bias):
    h = x + bias.view(-1, 1, 1) + embedding[..., None, None]
    return x + (functional.silu(group_norm(h)) + bias.view(-1, 1, 1))


def read_twice(x, embedding, bias):
    h = x + embedding[:, :, None, None]
    return torch.cat([group_norm(h), h])


def norm_alone(x, embedding, bias):
    return group_norm(x) * bias.view(-1, 1, 1)


def of_other_shapes(x, embedding, bias):
    return group_norm(x + embedding[:1, :10] + embedding[:, :1, None, None])


def written_between(x, embedding, bias):
    h = x + embedding[..., None, None]
    embedding.mul_(2)
    return functional.silu(group_norm(h))


def added_in_place(x, embedding, bias):
    x += embedding[..., None, None]
    return group_norm(x)


def laid_out_otherwise(x, embedding, bias):
    return group_norm(x.contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize(
    ("function", "tensors_of_norms"),
    [
        (with_all, [5]),
        (read_twice, [3]),
        (norm_alone, [3]),
        (of_other_shapes, [3]),
        (written_between, [3]),
        (added_in_place, [3]),
        (laid_out_otherwise, []),
    ],
)
def test_graph_computes_the_same(rewritten, function, tensors_of_norms):
    assert rewritten(function, *inputs()) == tensors_of_norms


def test_graph_for_one_size_is_left_to_inductor(rewritten):
    assert rewritten(with_all, *inputs(), dynamic=False) == []


def attended(x, embedding, bias):
    q, k, v = (torch.cat([part, part * 2], 2) for part in (x, x + 1, x - 1))  # [B, H, L, D]
    return functional.scaled_dot_product_attention(q, k, v)


def by_tokens(x, embedding, bias):
    return attended(x, embedding, bias).transpose(1, 2).flatten(2)


def by_heads(x, embedding, bias):
    return attended(x, embedding, bias).transpose(2, 3)


def queries_read_twice(x, embedding, bias):
    q = x * 2
    return functional.scaled_dot_product_attention(q, x, x).transpose(1, 2).flatten(2).sum() + q


@pytest.mark.parametrize(
    ("function", "is_ordered"), [(by_tokens, True), (by_heads, False), (attended, False), (queries_read_twice, False)]
)
def test_queries_are_ordered_by_tokens_where_the_result_is_read_so(rewritten, monkeypatch, function, is_ordered):
    ordered = []
    order = rewriting._order_queries

    def seen(graph, node):
        order(graph, node)
        ordered.append(not node.args[0].meta["example_value"].is_contiguous())

    monkeypatch.setattr(rewriting, "_order_queries", seen)
    rewritten(function, *inputs())
    assert ordered == [is_ordered]


def test_kernels_compute_what_torch_does():
    """Interpreted on the CPU, by Triton: planes of a multiple of 16 and others, of one part and several, of video."""
    torch.manual_seed(0)
    given = []
    for shape, dtype in (
        ((2, 64, 6, 8), torch.float32),
        ((1, 32, 33, 35), torch.float32),
        ((1, 64, 3, 5, 7), torch.float32),
        ((1, 64, 2, 520), torch.float16),
    ):
        x, channels = torch.randn(shape, dtype=dtype) * 3 + 5, shape[1]
        given.append((x, *torch.randn(3, channels, dtype=dtype), torch.randn(shape[0], channels, dtype=dtype)))
    calls = [
        call
        for x, weight, bias, by_channel, by_image in given
        for call in (
            ("group_norm", None, (x, weight, bias, 32, 1e-5, True, by_channel, by_image)),
            ("group_norm", None, (x, weight, bias, 32, 1e-5, False, None, None)),
        )
    ]
    answers = iter(interpreted(kernels, str(KERNELS), calls))
    for x, weight, bias, by_channel, by_image in given:
        of = [part.double() for part in (x, weight, bias, by_channel, by_image)]
        exact = (norm(*of[:3], 32, 1e-5, True, *of[3:]), norm(*of[:3], 32, 1e-5, False))
        tolerance = 2 * torch.finfo(x.dtype).eps
        for expected in exact:
            actual = next(answers)
            assert actual.dtype == x.dtype
            assert math.isclose((actual - expected).abs().max() / expected.abs().max(), 0, abs_tol=tolerance)
