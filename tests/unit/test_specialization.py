"""What a trace of a block tells of the sizes that its graph serves, and of what it writes to."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile.specialization import holds
from kit.blocks import Block, reasons, runner


class Rows(Block):
    """Loops over the batch, so that a graph has as many rows as it was traced for."""

    def forward(self, x):  # [B, T, 4]
        return torch.stack([super(Rows, self).forward(row) for row in x])


class Asks(Block):
    """Does something else at one number of tokens."""

    def forward(self, x):
        return super().forward(x) * (2.0 if x.shape[1] == 8 else 1.0)


@pytest.mark.parametrize(
    ("kind", "first", "same", "other"), [(Rows, (3, 8), (3, 5), (2, 8)), (Asks, (3, 8), (2, 8), (3, 5))]
)
def test_size_that_code_was_traced_for_has_a_graph_of_its_own(kind, first, same, other):
    block, cache = kind(), GraphCache()
    stand_in = runner(block, cache)
    with torch.no_grad():
        for size, graphs in ((first, 1), (same, 1), (other, 2), (first, 2)):
            x = torch.randn(*size, 4)
            assert torch.equal(stand_in(block, x), block(x)), size
            assert cache.statistics()["graphs"] == graphs


def block_of(function):
    class Calls(Block):
        def forward(self, x):
            return function(super().forward(x))

    return Calls()


def graphs_of(function, *sizes):
    """The graphs that there are after a call at each size, all of which are right."""
    block, cache = block_of(function), GraphCache()
    stand_in, counts = runner(block, cache), []
    for size in sizes:
        x = torch.randn(*size, 4)
        with torch.no_grad():
            assert torch.equal(stand_in(block, x), block(x)), size
        counts.append(cache.statistics()["graphs"])
    assert reasons() == []
    return counts


@pytest.mark.parametrize(
    ("function", "is_same"),
    [
        (lambda x: (x * 2).reshape(-1, 2).softmax(-1), True),
        (lambda x: torch.nn.functional.group_norm(x.transpose(1, 2), 2), True),
        (lambda x: x + 1 if x.shape[0] == 1 else x - 1, False),
        (lambda x: x * (2.0 if x.shape[0] == 1 else 3.0), False),
        (lambda x: x.squeeze(0) * 2, False),
        (lambda x: x[:2] * 2, True),
    ],
    ids=["alike", "norm", "another operation for one", "another number for one", "vanishes at one", "stops growing"],
)
def test_a_graph_serves_a_batch_of_one_where_the_block_same_ops_with_with_it(function, is_same):
    assert graphs_of(function, (3, 5), (1, 5), (1, 6)) == ([1, 1, 1] if is_same else [1, 2, 2])


def test_what_code_asks_of_the_other_sizes_in_a_batch_of_one_counts():
    def function(x):
        return x * 2 if x.shape[0] == 1 and x.shape[1] > 8 else x + x.mean()

    assert graphs_of(function, (3, 5), (1, 5), (1, 9)) == [1, 1, 2]


@pytest.mark.parametrize(
    "sizes",
    [
        [(3, 5), (1, 49), (7, 7), (1, 50), (9, 9)],
        [(9, 9), (5, 10), (1, 50), (1, 20), (3, 5)],
        [(1, 30), (2, 30)],  # of a batch of 1 a larger one is traced first
    ],
)
def test_code_that_asks_how_many_values_there_are_has_a_graph_a_side(sizes):
    """As core's Wan blocks, which take another kernel from 16 M values on."""
    is_small = [4 * rows * tokens < 200 for rows, tokens in sizes]
    graphs = [len(set(is_small[:number])) for number in range(1, len(sizes) + 1)]
    assert graphs_of(lambda x: x.sin() if x.numel() < 200 else x.cos(), *sizes) == graphs


library = torch.library.Library("accel_tests", "FRAGMENT")
library.define("add_one(Tensor(a!) y) -> ()")
library.impl("add_one", lambda y: [y.view(-1).add_(1)] and None, "CPU")
library.impl("add_one", lambda y: None, "Meta")


class Writes(Block):
    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x, y):
        self.write(y)
        return super().forward(x) + y


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.view(-1).add_(1),
        lambda y: y.data.mul_(2),
        lambda y: y.data.view(-1)[1:].add_(1),
        lambda y: torch._foreach_add_([y], 1.0),
        lambda y: torch.ops.accel_tests.add_one(y),
    ],
    ids=["a view", "by data", "a part by data", "one of many", "by an operator of others"],
)
def test_inputs_that_are_written_to_are_written_to_by_the_graph(write):
    block, cache = Writes(write), GraphCache()
    stand_in = runner(block, cache)
    x, y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    given, expected = y.clone(), y.clone()
    with torch.no_grad():
        for _ in range(2):  # the first is compared with the block
            assert torch.equal(stand_in(block, x, given), block(x, expected))
    assert torch.equal(given, expected) and not torch.equal(given, y)
    assert cache.statistics()["graphs"] == 1


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("", True),
        ("2 <= L['tensors'][0].size()[0] and L['tensors'][0].size()[1] <= 2147483647", True),
        ("4 <= L['tensors'][0].size()[0] < 6", False),
        ("L['tensors'][0].stride()[0] == 5*L['tensors'][0].size()[2]", False),
        ("L['tensors'][0].stride()[0] == L['tensors'][0].size()[1]*L['tensors'][0].size()[2]", True),
        ("((-4) + L['tensors'][1].size()[0]) != 0 or not (1 == 1)", True),
        ("(L['tensors'][0].size()[2] % 3) == 2 and L['tensors'][0].size()[2] // 2 == 2", True),
        ("max(3, L['tensors'][0].size()[2], 4) == 5 and math.floor(0.5*L['tensors'][0].size()[2]) == 2", True),
        ("math.trunc(torch.sym_float(L['tensors'][1].size()[0]) / 2.0) == 3 or (7 > 8)", True),
    ],
)
def test_what_a_trace_asks_of_sizes_is_answered(asked, expected):
    assert holds(asked, [torch.empty(3, 4, 5), torch.empty(7)]) is expected


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize(
    "asked",
    [
        *("().__class__.__base__", "L['tensors']", "torch.load", "math.inf.__class__", "max.__call__(1)"),
        *("print(1) or 1", "__import__('os').getpid()", "(lambda: 1)()", "max(*(1, 2))", "max(1, 2, key=abs)"),
        *("[1 for _ in (1,)]", "(x := 1)", "f'{1}'", "'a'*9 != 1", "[1]*9 != 1", "None", "...", "{1: 1}", "yield"),
        *("9**9**9**9", "1 << 9**9", "round(5, -10**9)", "1 // 0 == 0", "1e308*10 == 1j or 1j < 1", "1 +", "1\x00"),
        *("L['tensors'][9].size()[0] == 1", "L['tensors'][0].size()[9] == 1", "L['tensors'][0].numel() == 60"),
        *("-" * 4000 + "1", "-" * 10**6 + "1", "1+" * 10**6 + "1", "(" * 4000, "not " * 1000 + "0", "9" * 10**6),
    ],
    ids=lambda asked: asked[:20],
)
def test_what_no_trace_asks_is_refused_and_runs_nothing(asked):
    """As a stranger may have written it into a store."""
    assert holds(asked, [torch.empty(3, 4, 5)]) is False
