"""A graph that is right at one size and wrong at another is found out in its first call there."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile import benchmark
from comfy_accel.accel.compile.compiled_graph import CompiledGraph, Facts
from comfy_accel.accel.dispatch.block_observer import BlockObserver
from comfy_accel.accel.dispatch.block_runner import BlockRunner, BlocksRun, NotReady
from comfy_accel.accel.dispatch.resolver import GraphResolver
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.report.account import compute_compile_saving
from kit.blocks import Block, eagerly, model_of, raising, reasons, runner, runners

FIRST = (1, 64, 77)
OTHERS = {  # (batch, tokens of the picture, of the prompt), and those it is called with before
    "as many bits of tokens": ((1, 96, 77), [FIRST]),
    "more tokens": ((1, 256, 77), [FIRST]),
    "a longer prompt": ((1, 64, 154), [FIRST]),
    "two images": ((2, 64, 77), [FIRST]),
    "three images after two": ((3, 64, 77), [FIRST, (2, 64, 77)]),
    "tokens of the same pattern": ((1, 56, 77), [(1, 40, 77)]),
    "a prompt of the same pattern": ((1, 64, 85), [FIRST]),
    "a batch of the same pattern": ((7, 64, 77), [FIRST, (5, 64, 77)]),
}


class Modulated(Block):
    """Tokens that a vector scales, which is of one size whatever theirs is, and that look at a prompt."""

    def forward(self, x, vec, context):
        return x + (self.first(x) * vec[:, None]) @ self.second(context).transpose(1, 2) @ context


class VectorFirst(Modulated):
    def forward(self, vec, x, context):
        return super().forward(x, vec, context)


def inputs(block, batch, tokens, prompt):
    x, vec, context = torch.randn(batch, tokens, 4), torch.randn(batch, 4), torch.randn(batch, prompt, 4)
    return (vec, x, context) if isinstance(block, VectorFirst) else (x, vec, context)


@pytest.fixture(autouse=True)
def whatever_the_clock_says(monkeypatch):
    monkeypatch.setattr(benchmark, "SLOWER", 1e9)


@pytest.mark.parametrize(("size", "before"), OTHERS.values(), ids=list(OTHERS))
@pytest.mark.parametrize(("cls", "measured"), [(Modulated, True), (VectorFirst, False)])
def test_graph_that_is_wrong_at_another_size_is_not_used_there(cls, measured, size, before, monkeypatch):
    block, cache = cls(), GraphCache()

    def wrong_there(tensors):
        shapes = [tensor.shape[:2] for tensor in tensors if tensor.ndim == 3]
        factor = 1.5 if size in [(*x, context[1]) for x in shapes for context in shapes] else 1
        return block.forward(*tensors[4:]) * factor

    loaded = CompiledGraph(wrong_there, lambda tensors: True, Facts(weights=4))
    monkeypatch.setattr(GraphResolver, "_load", lambda *_: loaded)
    stand_in = runner(block, cache, measured=measured)
    with torch.inference_mode():
        for known in before:
            for _ in range(benchmark.ROUNDS + 3):
                stand_in(block.forward, *inputs(block, *known))
        assert stand_in.eager_calls == 0 and reasons() == []
        for wanted in (size, size, FIRST):  # a graph that was wrong once is used nowhere
            given = inputs(block, *wanted)
            assert torch.equal(stand_in(block.forward, *given), block(*given))
    assert stand_in.eager_calls == 2 and "differs from the uncompiled one" in reasons()[0]
    assert cache.statistics()["loaded"] == 1


def test_blocks_of_a_kind_share_comparisons_at_two_sizes_of_each_pattern_and_one_of_the_last_block():
    ran, cache = [], GraphCache()
    model = model_of(*(Block() for _ in range(3)))

    def image(rows):
        """Three steps; how many calls of blocks ran beside their graph."""
        ran.clear()
        stand_ins = runners(model, cache)
        for _ in range(3):
            for block, stand_in in stand_ins.items():
                stand_in(lambda x, block=block: ran.append(1) or block(x), torch.randn(rows, 4))
        return len(ran)

    with torch.inference_mode():
        assert [image(rows) for rows in (64, 64, 96, 72, 88, 104, 160)] == [2, 0, 1, 1, 1, 0, 1]
    assert reasons() == [] and cache.statistics()["hits"] == 63


def test_graph_with_the_weights_of_the_first_block_in_it_is_found_out_at_the_last(monkeypatch):
    model, x = model_of(*(Block() for _ in range(4))), torch.randn(64, 4)
    first, *_ = model.blocks
    graph = CompiledGraph(lambda tensors: first.forward(*tensors[4:]), lambda tensors: True, Facts(weights=4))
    monkeypatch.setattr(GraphResolver, "_load", lambda *_: graph)
    stand_ins = runners(model, GraphCache())
    with torch.inference_mode():
        for _ in range(2):
            outs = [stand_in(block.forward, x) for block, stand_in in stand_ins.items()]
    torch.testing.assert_close(outs, [block(x) for block in stand_ins])
    assert "differs from the uncompiled one" in reasons()[0]


def test_comparing_values_alone_says_nothing_of_the_gain():
    block, cache = Block(), GraphCache()
    region, *_ = survey(model_of(block)).regions
    sizes = [80] * (benchmark.ROUNDS + 1) + [96]
    with torch.inference_mode(), cache.lease() as lease:
        for measured in (False, True):
            stand_in = BlockRunner(region, BlocksRun(cache, eagerly(measured=measured), lease))
            for rows in sizes:
                stand_in(block.forward, torch.randn(rows, 4))
    [(calls, count)] = lease.measured.items()
    timed = calls.benchmark
    assert lease.calls == 2 * len(sizes) and 0 < count < len(sizes)
    assert len(timed._eager) in (benchmark.CLEAR_ROUNDS, benchmark.ROUNDS)
    assert compute_compile_saving(lease.calls, lease.measured).seconds == pytest.approx(timed.gain * count * 96 / 80)


def test_block_that_does_not_fit_into_memory_beside_its_graph_is_left_to_it(caplog):
    block, x = Block(), torch.randn(2, 4)
    stand_in, short = runner(block), raising(torch.OutOfMemoryError("no more"))
    with torch.inference_mode():
        torch.testing.assert_close([stand_in(short, x) for _ in range(2)], [block(x)] * 2)
    assert [record.levelname for record in caplog.records if "unchecked" in record.message] == ["WARNING"]


def test_nothing_is_compared_while_a_call_is_captured():
    block, x = Block(), torch.randn(2, 4)
    stand_in = runner(block, measured=True)
    with torch.inference_mode():
        stand_in(block.forward, x)
        stand_in.observer = BlockObserver(capturing=True)
        with pytest.raises(NotReady):
            stand_in(block.forward, x)


def test_sizes_that_may_take_another_way_through_a_kernel_are_told_apart():
    def pattern(*shape):
        return benchmark.pattern_of([torch.empty(shape, device="meta")])

    others = [(0,), (1,), (2,), (3,), (64,), (96,), (77,), (154,), (128,), (256,), (384,), (1 << 31,), (1, 1)]
    assert len({pattern(*shape) for shape in others}) == len(others)
    assert pattern(1 << 15, 1 << 15) != pattern(1 << 16, 1 << 15)
    assert pattern(1, 3952, 64) == pattern(1, 3984, 64)  # 52 by 76 and 48 by 83 tokens


class WritesToWhatIsDense(Block):
    """Changes the caller's tensor where that is dense, and a copy of it elsewhere."""

    def forward(self, x):
        return self.first(x.contiguous().mul_(2))


class WritesToWhatIsTransposed(Block):
    """Changes the caller's tensor where its transpose is dense, and a copy of that elsewhere."""

    def forward(self, x):
        return self.first(x.t().reshape(-1).mul_(2).view(4, 4))


@torch.no_grad()
@pytest.mark.parametrize("is_strided", [(False, True, True), (True, False, False), (True, True, False, True)])
@pytest.mark.parametrize("cls", [WritesToWhatIsDense, WritesToWhatIsTransposed])
def test_what_a_block_writes_to_is_compared_in_the_layout_that_it_is_given(cls, is_strided):
    block = cls()
    stand_in = runner(block)
    for strided in is_strided:
        x, alone = (torch.arange(16.0).view(4, 4) for _ in range(2))
        x, alone = (x.t(), alone.t()) if strided else (x, alone)
        out = block.forward(alone)
        torch.testing.assert_close(stand_in(block.forward, x), out)
        torch.testing.assert_close(x, alone)
