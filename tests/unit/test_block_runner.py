"""A block's stand-in: when it lets a call run as it is."""

import functools
import gc
import logging
import time
import weakref

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import Trouble
from comfy_accel.accel.dispatch.block_observer import BlockObserver
from kit.blocks import Block, reasons, runner


def check(stand_in, block, *args):
    """The call is right."""
    with torch.inference_mode():
        assert torch.equal(stand_in(block, *args), block(*args))


def differs():
    return any("differs from the uncompiled one" in reason for reason in reasons())


def test_weights_that_are_not_where_the_inputs_are_run_as_they_are_until_they_are_back():
    block, cache = Block(), GraphCache()
    second = block.second.state_dict()
    block.second.to("meta")  # as a partly loaded model's weights wait elsewhere until their layer is called
    stand_in = runner(block, cache)
    assert stand_in(lambda x: "eager", torch.zeros(2, 4)) == "eager"
    assert cache.statistics()["graphs"] == 0
    assert reasons() == ["its weights are partly on meta, its inputs are not"]
    block.second.to_empty(device="cpu").load_state_dict(second)
    for _ in range(4):  # until calls like them are known
        check(stand_in, block, torch.randn(2, 4))
    assert cache.statistics()["graphs"] == 1
    block.second.to("meta")
    assert stand_in(lambda x: "eager", torch.zeros(2, 4)) == "eager"


TABLE = torch.arange(4.0)


class WithTable(Block):
    """Cannot be run without values beside a table that has some, so which of its inputs it changes is not known."""

    def forward(self, x, e):
        return super().forward(x) + e * TABLE


def test_input_that_is_expanded_is_not_written_to_where_it_is_not_known_which_are():
    block = WithTable()
    stand_in = runner(block)
    with torch.no_grad():
        e = torch.ones(2, 1, 1).expand(2, 3, 4)
        check(stand_in, block, torch.randn(2, 3, 4), e)
    assert reasons() == []


class Finds(Block):
    """Reads what its code has no name for."""

    def forward(self, x):
        found = self.__dict__["".join(map(chr, (108, 101, 102, 116)))]
        return super().forward(x) * found


@pytest.mark.parametrize("cls", [Block, Finds])
def test_tensor_that_another_program_left_on_a_block_is_in_no_graph(cls):
    block, cache = cls(), GraphCache()
    block.left = torch.full((4,), 3.0)
    check(runner(block, cache), block, torch.randn(2, 4))
    assert cache.statistics()["graphs"] == (cls is Block)


@pytest.mark.parametrize("known", [False, True])
def test_what_torch_func_makes_of_a_block_is_the_blocks_own_and_fails_no_graph(known):
    block, cache = Block(), GraphCache()
    stand_in, x = runner(block, cache, stop_on_trouble=True), torch.randn(2, 4)
    with torch.inference_mode():
        if known:
            check(stand_in, block, x)
        got, derivative = torch.func.jvp(functools.partial(stand_in, block), (x,), (torch.ones_like(x),))
        expected = torch.func.jvp(block, (x,), (torch.ones_like(x),))
        assert torch.equal(got, expected[0]) and torch.equal(derivative, expected[1])
        assert torch.equal(torch.func.vmap(functools.partial(stand_in, block))(x), torch.func.vmap(block)(x))
        assert reasons() == ["torch.func takes its derivative or batches it, and compiled graphs can do neither"]
        check(stand_in, block, x)
    assert cache.statistics()["graphs"] == 1


def test_hook_on_the_block_itself_is_left_to_the_blocks_call():
    block, x = Block(), torch.randn(2, 4)
    block.register_forward_hook(lambda module, args, out: out * 2)
    stand_in = runner(block)
    with torch.inference_mode():
        assert torch.equal(stand_in(block.forward, x), block.forward(x))
    assert stand_in.eager_calls == 0 and reasons() == []


class Masked(Block):
    """Takes a mask apart by rows, for which torch fixes their number."""

    def forward(self, x, mask):
        return self.second(self.first(x) * torch.stack([row.exp() for row in mask]))


class Heads(Block):
    """Repeats a mask for every head, as diffusers' attention does."""

    def forward(self, x, mask):
        mask = mask.repeat_interleave(2, dim=0, output_size=mask.shape[0] * 2)
        heads = torch.cat((self.first(x), self.second(x)))
        return (heads * mask).unflatten(0, (2, -1)).sum(0)


class Placed(Block):
    """Its places are those of one image, whatever the batch is."""

    def forward(self, x, places):
        return self.second(self.first(x) * places.view(places.shape[1:]))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (Masked, [((1, rows), (1, rows)) for rows in (3, 3, 5, 3)]),
        (Heads, [(size, size) for size in ((1, 5), (3, 5), (2, 5))]),
        (Placed, [((1, 5), (1, 5)), ((2, 5), (1, 5)), ((3, 7), (1, 7))]),
    ],
)
def test_one_graph_serves_calls_whatever_is_done_with_an_argument_of_one_row_or_many(kind, sizes):
    block, cache = kind(), GraphCache()
    stand_in = runner(block, cache)
    for size, of_argument in sizes:
        check(stand_in, block, torch.randn(*size, 4), torch.rand(*of_argument, 1 + 3 * (kind is Placed)))
    assert stand_in.eager_calls == 0
    assert cache.statistics()["graphs"] == 1 and reasons() == []
    assert "repeat_interleave" not in vars(torch.Tensor)


def test_call_that_fails_by_itself_is_not_held_against_the_block(caplog, capfd):
    block, cache = Block(), GraphCache()
    stand_in = runner(block, cache)
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            stand_in(block, torch.randn(2, 5))
        assert reasons() == [] and cache.statistics()["entries"] == 0
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        assert "Traceback" not in capfd.readouterr().err
        x = torch.randn(2, 4)
        assert torch.equal(stand_in(block, x), block(x))
    assert cache.statistics()["graphs"] == 1


def slow(graph, examples):
    def run(*args):
        if max(arg.numel() for arg in args if isinstance(arg, torch.Tensor)) < 1000:
            time.sleep(0.005)
        return graph(*args)

    return run


def call_often(stand_in, block, rows, times=10):
    for _ in range(times):
        check(stand_in, block, torch.randn(rows, 4))


def test_slow_graph_is_left_alone_at_its_size_and_only_while_gain_is_asked_for():
    block, cache = Block(), GraphCache()
    # Stopping on trouble is about blocks that cannot be compiled; this one can.
    stand_in = runner(block, cache, backend=slow, measured=True, stop_on_trouble=True)
    call_often(stand_in, block, rows=4)
    assert len(reasons()) == 1 and "slower at this size" in reasons()[0]
    hits = cache.statistics()["hits"]
    call_often(stand_in, block, rows=4)
    assert cache.statistics()["hits"] == hits
    call_often(stand_in, block, rows=2000)
    assert cache.statistics()["hits"] > hits
    hits = cache.statistics()["hits"]
    call_often(runner(block, cache, backend=slow), block, rows=4, times=3)
    assert cache.statistics()["hits"] == hits + 3
    assert cache.statistics()["compilations"] == 1


@pytest.mark.parametrize("may_capture", [True, False])
def test_first_call_of_a_graph_takes_all_comparisons_where_calls_are_captured(may_capture):
    """One round in each call would use up the four steps of a distilled model before anything is captured; all at once
    would bring streamed weights to the device again and again within one call, where nothing is captured."""
    block = Block()
    stand_in = runner(block, measured=True)
    stand_in.observer = BlockObserver(may_capture=may_capture)
    call_often(stand_in, block, rows=4, times=1)
    assert not stand_in.observer.is_stable  # it was compiled
    stand_in.observer.reset()
    call_often(stand_in, block, rows=4, times=1)
    assert stand_in.observer.is_stable is may_capture


def test_second_graph_of_a_kind_is_compared_too():
    made = []

    def second_is_wrong(graph, examples):
        made.append(1)
        factor = len(made)
        return lambda *args: [out * factor for out in graph(*args)]

    class Branching(Block):
        def forward(self, x):
            return self.second(self.first(x)) if x.shape[0] > 8 else self.first(x)

    block, cache = Branching(), GraphCache()
    stand_in = runner(block, cache, backend=second_is_wrong, measured=True)
    call_often(stand_in, block, rows=4)
    call_often(stand_in, block, rows=20)
    assert len(made) == 2 and differs()


@pytest.mark.parametrize("is_strided", [False, True])
def test_block_that_hands_back_what_it_was_given_hands_back_that_very_tensor(is_strided):
    class InPlace(Block):
        def forward(self, x, y):
            x += self.second(self.first(y))
            return x, y * 2

    block, cache = InPlace(), GraphCache()
    with torch.inference_mode():
        for measured in (True, False):
            stand_in = runner(block, cache, measured=measured)
            for _ in range(3):
                x, y = torch.randn(4, 3).t() if is_strided else torch.randn(3, 4), torch.randn(3, 4)
                expected, _ = block(x.clone(), y)
                out, _ = stand_in(block, x, y)
                assert out is x and torch.allclose(out, expected, atol=1e-6)
    assert cache.statistics()["hits"] == 6 and reasons() == []


def test_comparing_copies_what_a_block_changes_alone():
    """Copies of all inputs were as much memory as a video's tokens, in the image that needs most anyhow."""
    given = []

    class Changing(Block):
        def forward(self, x, y):
            return self.second(self.first(x)) + y.add_(1)

    def inner(x, y):
        given.append((x, y))
        return block(x, y)

    block = Changing()
    stand_in = runner(block, measured=True)
    with torch.inference_mode():
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        stand_in(inner, x, y)
    assert [(one is x, other is y) for one, other in given] == [(True, False)]
    assert reasons() == []


def test_wrong_graph_leaves_the_inputs_as_the_block_would():
    class Changing(Block):
        def forward(self, x):
            x += self.first(x)
            return self.second(x)

    def wrong(graph, examples):
        def run(*args):
            outs = graph(*args)
            for arg in args:
                if isinstance(arg, torch.Tensor) and arg.shape == (2, 4):
                    arg.add_(1)
            return outs

        return run

    block, cache = Changing(), GraphCache()
    stand_in = runner(block, cache, backend=wrong, measured=True)
    with torch.inference_mode():
        x = torch.randn(2, 4)
        expected = x.clone()
        out = block(expected)
        assert torch.equal(stand_in(block, x), out)
    assert torch.equal(x, expected) and differs()


@pytest.mark.parametrize("in_place", [False, True])
def test_graph_that_adds_nothing_is_wrong_beside_a_channel_that_is_a_thousand_times_larger(in_place):
    class Residual(Block):
        def forward(self, x):
            added = self.second(self.first(x / x.new_tensor([1000, 1, 1, 1])))
            return x.add_(added) if in_place else x + added

    def adds_nothing(graph, examples):
        return lambda *args: [next(arg for arg in args if getattr(arg, "shape", ()) == (64, 4))]

    block = Residual(4)
    stand_in = runner(block, backend=adds_nothing, measured=True)
    with torch.inference_mode():
        x = torch.randn(64, 4) * torch.tensor([1000, 1, 1, 1])
        assert torch.equal(stand_in(block, x.clone()), block(x.clone()))
    assert differs()


def test_stopping_names_the_budget_that_is_too_small():
    block = Block()
    with torch.inference_mode(), pytest.raises(Trouble, match="need more than the memory limit of 0 MB"):
        runner(block, GraphCache(max_bytes=0), stop_on_trouble=True)(block, torch.randn(2, 4))


def test_refused_call_keeps_nothing_alive():
    """Without the garbage collector: on a card it would hold the memory of all that the call's frames refer to."""
    stand_in = runner(Block())

    def refused() -> weakref.ref:
        x = torch.randn(2, 4)
        assert stand_in(lambda x, _: "eager", x, object()) == "eager"
        return weakref.ref(x)

    gc.collect()
    gc.disable()
    try:
        assert refused()() is None
    finally:
        gc.enable()
