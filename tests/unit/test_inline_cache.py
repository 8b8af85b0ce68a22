"""Calls of a block that are like earlier ones match, and never where anything about them has changed."""

import gc
import sys
import weakref

import kit.blocks
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.core.reasons import Reason, RunEagerly
from comfy_accel.accel.dispatch.block_observer import BlockObserver
from comfy_accel.accel.dispatch.block_runner import BlockRunner, BlocksRun
from comfy_accel.accel.dispatch.inline_cache import KnownCalls
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.signature import argument_guard
from kit.blocks import Block as Layers
from kit.blocks import raising, reasons


class Block(Layers):
    def forward(self, x, y=None, sign=1, scale=1.0, size=0, options=None):
        x = self.first(x.to(self.first.weight.dtype)).to(self.second.weight.dtype)
        return self.second(x) * scale * (-1 if sign is True else 1) / (1 + size) + (0 if y is None else y)


class InPlace(Block):
    def forward(self, x, y):
        x += self.first(y)
        return self.second(x + y)


class Counting(BlockRunner):
    """unmatched: calls that no guard matched."""

    unmatched = 0

    def _call_unmatched(self, *args):
        self.unmatched += 1
        return super()._call_unmatched(*args)


def runner(block, cache=None, simplify=None):
    return kit.blocks.runner(block, cache, Counting, [simplify])


def warmed_up(block, *args, cache=None, simplify=None, **kwargs):
    """Its stand-in, whose inline cache matches such calls."""
    stand_in = runner(block, cache, simplify)
    for _ in range(4):
        torch.testing.assert_close(stand_in(block.forward, *args, **kwargs), block(*args, **kwargs))
    assert stand_in.unmatched == 2
    return stand_in


def check(stand_in, block, *args, is_matched=False, **kwargs):
    """The call is right, and matches or not as expected."""
    before = stand_in.unmatched
    out = stand_in(block.forward, *args, **kwargs)
    torch.testing.assert_close(out, block(*args, **kwargs))  # of one type too
    assert (stand_in.unmatched == before) is is_matched


def test_this_torch_has_the_guard_and_one_without_it_has_each_call_described(monkeypatch):
    assert argument_guard.has_native_guard()
    monkeypatch.setattr(argument_guard, "has_native_guard", lambda: False)
    block, x = Block(), torch.randn(2, 4)
    stand_in = runner(block)
    for _ in range(4):
        check(stand_in, block, x)


def cast(block):
    block.first.to(torch.float64)


def replaced_by_another_type(block):
    block.first.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64), requires_grad=False)
    block.first.bias = torch.nn.Parameter(torch.randn(4, dtype=torch.float64), requires_grad=False)


def given_other_strides(block):
    block.first.weight = torch.nn.Parameter(torch.randn(4, 4).t(), requires_grad=False)


def made_a_class_of_its_own(block):
    class Other(torch.nn.Parameter):
        pass

    block.first.weight = Other(torch.randn(4, 4), requires_grad=False)


@pytest.mark.parametrize("change", [cast, replaced_by_another_type, given_other_strides, made_a_class_of_its_own])
def test_weights_that_are_others_are_noticed_in_mid_run_and_in_the_next(change):
    x = torch.randn(2, 4)
    for is_known in (True, False):
        runs = after_a_run(x)
        stand_in = runs.begin()
        if is_known:
            check(stand_in, runs.block, x, is_matched=True)
        change(runs.block)
        check(stand_in, runs.block, x)
        # What a LoRA adds to stored weights is of another rank in each, which the block's survey does not say.
        assert runs.cache.statistics()["compilations"] == (1 if change is made_a_class_of_its_own else 2)


def test_weights_of_other_values_are_read_and_none_is_kept():
    block, x = Block(), torch.randn(2, 4)
    stand_in = warmed_up(block, x)
    old = weakref.ref(block.first.weight)
    block.first.weight = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)
    gc.collect()
    assert old() is None
    check(stand_in, block, x, is_matched=True)
    block.first.weight.data = torch.randn(4, 4)
    check(stand_in, block, x, is_matched=True)


@pytest.mark.parametrize("wanted", ["input", "weight"])
def test_gradients_wanted_from_one_call_to_the_next_are_the_blocks_own(wanted):
    block, x = Block(), torch.randn(2, 4)
    if wanted == "weight":
        with torch.no_grad():
            stand_in = runner(block)
            block.first.weight.requires_grad_()  # as diffusers leaves them
            for _ in range(4):
                stand_in(block.forward, x)
        assert stand_in.unmatched == 2
    else:
        stand_in = warmed_up(block, x)
        x.requires_grad_()
    stand_in._settings = CompileSettings(backend="eager", stop_on_trouble=True)  # which this is not
    stand_in(block.forward, x).sum().backward()
    assert (x if wanted == "input" else block.first.weight).grad.abs().max() > 0
    assert reasons() == ["gradients are requested, and compiled graphs give none"]
    with torch.no_grad():
        before = fallbacks.counts()
        stand_in(block.forward, x)
        assert fallbacks.counts() == before


def test_autocast_from_one_call_to_the_next_is_seen():
    block, x = Block(), torch.randn(2, 4)
    stand_in = warmed_up(block, x)
    with torch.autocast("cpu", torch.bfloat16):
        check(stand_in, block, x)
    assert len(reasons()) == 1 and "autocast" in reasons()[0]
    check(stand_in, block, x, is_matched=True)


CALLS = {
    "type": (lambda x, y: ((x.double(), y), {})),
    "shape": (lambda x, y: ((torch.cat([x, x]), y[:1]), {})),
    "strides": (lambda x, y: ((torch.randn(4, 2).t(), y), {})),
    "class": (lambda x, y: ((torch.nn.Parameter(x, requires_grad=False), y), {})),
    "one tensor twice": (lambda x, y: ((x, x), {})),
    "no tensor": (lambda x, y: ((x, None), {})),
    "a number for a tensor": (lambda x, y: ((x, 3.0), {})),
    "a flag that equals the number": (lambda x, y: ((x, y), {"sign": True})),
    "another number": (lambda x, y: ((x, y), {"scale": 2.0})),
    "minus nought": (lambda x, y: ((x, y), {"scale": -0.0})),
    "another size": (lambda x, y: ((x, y), {"size": 7})),
    "by name": (lambda x, y: ((x,), {"y": y})),
    "one argument less": (lambda x, y: ((x,), {})),
    "an empty dict": (lambda x, y: ((x, y), {"options": {}})),
}


def test_call_that_is_made_in_another_way_is_described_again():
    block, x, y = Block(), torch.randn(2, 4), torch.randn(2, 4)
    stand_in = warmed_up(block, x, y)
    for variant in CALLS.values():
        args, kwargs = variant(x, y)
        check(stand_in, block, *args, **kwargs)
        check(stand_in, block, torch.randn(2, 4), torch.randn(2, 4), is_matched=True)


def test_nested_arguments_are_matched_too():
    class Nested(Block):
        def forward(self, x, pairs, size):
            return super().forward(x) * pairs[0] + pairs[1][0] / size

    block, x, y = Nested(), torch.randn(2, 4), torch.randn(2, 4)
    stand_in = warmed_up(block, x, (x + 1, [y]), size=8)
    check(stand_in, block, y, (x + 2, [x]), size=8, is_matched=True)
    check(stand_in, block, y, (x + 2, [y]), size=8)
    check(stand_in, block, y, (x + 2, [x]), size=9)
    check(stand_in, block, y, (x + 2, (x,)), size=8)


def test_strided_input_is_made_dense_in_each_call():
    block = Block()
    stand_in = warmed_up(block, torch.randn(4, 2).t())
    check(stand_in, block, torch.randn(4, 2).t(), is_matched=True)


def test_strided_input_that_is_written_to_has_what_was_written_and_is_handed_back():
    class HandedBack(Block):
        def forward(self, x, times, y):
            x += self.first(y) * times
            return y + 1, x

    block = HandedBack()
    stand_in = runner(block)
    for _ in range(4):
        x, y = torch.randn(4, 4).t(), torch.randn(4, 2).repeat(1, 2)
        theirs = x.clone()
        expected = block(theirs, 2, y)
        out = stand_in(block.forward, x, 2, y)
        assert out[1] is x
        torch.testing.assert_close((*out, x), (*expected, theirs))
    assert stand_in.unmatched == 2
    x = torch.randn(8, 4)
    mine, theirs = x.clone(), x.clone()
    out = stand_in(block.forward, mine[:4].t(), 2, mine[1:5])  # overlapping rows
    torch.testing.assert_close(out, block(theirs[:4].t(), 2, theirs[1:5]))
    torch.testing.assert_close(mine, theirs)
    assert stand_in.unmatched == 3


def test_changed_input_that_shares_memory_from_one_call_to_the_next_runs_as_it_is():
    block, reference = InPlace(), InPlace()
    reference.load_state_dict(block.state_dict())
    stand_in = runner(block)
    base = torch.randn(4, 4)
    for number in range(6):
        if number < 4:
            x, y = base.clone()[:2], base.clone()[2:]
            theirs = x.clone(), y.clone()
        else:  # overlapping rows
            mine, other = base.clone(), base.clone()
            x, y, theirs = mine[:2], mine[1:3], (other[:2], other[1:3])
        out = stand_in(block.forward, x, y)
        assert torch.equal(out, reference(*theirs)) and torch.equal(x, theirs[0]) and torch.equal(y, theirs[1])
    assert stand_in.unmatched == 4
    assert reasons() == ["it changes an argument that shares memory with another"]


def test_options_that_change_in_place_are_asked_about_in_each_call():
    def simplify(options):
        if options.get("patches"):
            raise RunEagerly(Reason("patched", patch="attn1"))
        return {name: value for name, value in options.items() if name == "strength"} if "step" in options else options

    block, x, options = Block(), torch.randn(2, 4), {"step": 1}
    stand_in = warmed_up(block, x, simplify=simplify, options=options)
    options["step"] = 2
    check(stand_in, block, x, is_matched=True, options=options)
    options["patches"] = ["somebody's"]
    assert stand_in(lambda x, options: "eager", x, options=options) == "eager"
    options["patches"] = []
    check(stand_in, block, x, is_matched=True, options=options)
    options["strength"] = 0.5
    check(stand_in, block, x, options=options)


def test_graph_that_left_the_cache_is_not_used():
    block, x, cache = Block(), torch.randn(2, 4), GraphCache()
    stand_in = warmed_up(block, x, cache=cache)
    cache.clear()
    check(stand_in, block, x)
    assert cache.statistics()["compilations"] == 2


def test_many_sizes_and_numbers_take_turns_and_none_is_described_again():
    block = Block()
    stand_in = runner(block)
    for turn in range(4):
        if turn == 2:
            assert stand_in.unmatched
            stand_in.unmatched = 0
        for rows in range(1, 13):
            x = torch.randn(rows, 4)
            for size in (0, rows + 1):  # as text tokens
                assert torch.equal(stand_in(block.forward, x, size=size), block(x, size=size))
    assert not stand_in.unmatched


def without_step(options):
    return {} if "step" in options else options


def moved_in_memory(block):
    block.first.weight = torch.nn.Parameter(torch.randn(5, 4)[1:], requires_grad=False)


@pytest.mark.parametrize("change", [None, cast, given_other_strides, moved_in_memory, "refused"])
def test_what_is_known_of_a_block_serves_those_of_its_kind_that_are_like_it(change):
    def simplify(options):
        if change == "refused" and "step" in options:
            raise RunEagerly(Reason("patched", patch="attn1"))
        return {} if "step" in options else options

    cache, blocks = GraphCache(), [Block() for _ in range(3)]
    regions = survey(kit.blocks.model_of(*blocks)).regions
    if callable(change):
        change(blocks[2])
    run = BlocksRun(cache, CompileSettings(backend="eager"))
    stand_ins = [Counting(region, run, simplify if at == 2 else without_step) for at, region in enumerate(regions)]
    for rows in (2, 2, 3):
        for stand_in, block in zip(stand_ins, blocks, strict=True):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(stand_in(block.forward, x, options={"step": rows}), block(x))
        found = [stand_in.unmatched for stand_in in stand_ins]
    # The first one finds the graphs, the second one makes the guards, and the third has them once it was called.
    assert found == [3, 2, 1 if change is None else 3]
    assert stand_ins[2].eager_calls == (3 if change == "refused" else 0), reasons()


class Runs:
    """Runs of one block over one survey of it, each with a stand-in and a lease of its own."""

    def __init__(self, cache=None, **settings):
        self.block, self.cache = Block(), cache or GraphCache()
        self.settings = CompileSettings(backend="eager", **settings)
        self.region, *_ = survey(kit.blocks.model_of(self.block)).regions

    def begin(self):
        self.lease = self.cache.begin_lease()
        return Counting(self.region, BlocksRun(self.cache, self.settings, self.lease))

    @property
    def entry(self):
        return self.cache.entries()[0]

    def first_call_is_matched(self, x):
        stand_in = self.begin()
        torch.testing.assert_close(stand_in(self.block.forward, x), self.block(x))
        return not stand_in.unmatched


def after_a_run(x, calls=4, **settings):
    runs = Runs(**settings)
    stand_in = runs.begin()
    for _ in range(calls):
        stand_in(runs.block.forward, x)
    runs.cache.end_lease(runs.lease)
    return runs


def test_first_call_of_the_next_run_is_matched_and_its_graph_leased():
    x = torch.randn(2, 4)
    runs = after_a_run(x)
    assert runs.first_call_is_matched(x)
    assert list(runs.lease.keys) == runs.cache.keys()
    runs.cache.end_lease(runs.lease)
    assert runs.lease.calls == 1
    assert not runs.first_call_is_matched(torch.randn(3, 4))
    assert runs.first_call_is_matched(x) and runs.cache.statistics()["compilations"] == 1


def test_run_of_one_call_is_enough_for_the_second_to_guard_it():
    x = torch.randn(2, 4)
    runs = after_a_run(x, calls=1)
    assert [runs.first_call_is_matched(x) for _ in range(3)] == [False, True, True]


def test_run_with_other_settings_or_another_cache_knows_nothing():
    x = torch.randn(2, 4)
    runs = after_a_run(x)
    runs.settings = CompileSettings(backend="eager", any_size=False)
    assert not runs.first_call_is_matched(x)
    runs.settings, runs.cache = CompileSettings(backend="eager"), GraphCache()
    assert not runs.first_call_is_matched(x)


def test_between_runs_no_graph_is_kept_that_left_the_cache():
    x = torch.randn(2, 4)
    runs = after_a_run(x)
    graph = weakref.ref(runs.entry.graphs[0])
    runs.cache.clear()
    gc.collect()
    assert graph() is None
    assert not runs.first_call_is_matched(x) and runs.cache.statistics()["compilations"] == 2


def test_graph_leaves_the_cache_while_another_thread_begins_a_run():
    x, others = torch.randn(2, 4), []
    runs = after_a_run(x)

    def another(*_):
        others.append(KnownCalls(runs.cache))
        return another

    before = sys.gettrace()
    sys.settrace(another)
    try:
        runs.cache.clear()
    finally:
        sys.settrace(before)
    assert others and not runs.first_call_is_matched(x)


def test_capture_that_leaves_the_cache_makes_nobody_look_graphs_up_again():
    x = torch.randn(2, 4)
    runs = after_a_run(x)
    graph = runs.entry.graphs[0]
    runs.cache.find("a capture", "M", lambda graph: False, lambda: graph, action="capture")
    assert runs.cache.evict("a capture") and runs.first_call_is_matched(x)


def test_graph_that_failed_in_one_block_is_run_by_none_and_forgotten_by_all():
    x = torch.randn(2, 4)
    runs = after_a_run(x)
    other, [graph] = Runs(runs.cache), runs.entry.graphs
    graph.run, graph = raising(RuntimeError("simulated")), weakref.ref(graph)
    assert not other.first_call_is_matched(x) and runs.entry.failure is not None
    gc.collect()
    assert graph() is None
    assert not runs.first_call_is_matched(x) and runs.cache.statistics()["compilations"] == 1
    assert reasons() == ["its compiled graph failed: RuntimeError: simulated", "RuntimeError: simulated"]


@pytest.mark.parametrize("captured", [False, True])
def test_comparison_counts_where_it_was_made_and_unless_another_found_the_graph_wrong(captured, monkeypatch):
    monkeypatch.setattr("comfy_accel.accel.compile.benchmark.SLOWER", 1e9)  # whatever the clock says
    x = torch.randn(2, 4)
    runs = after_a_run(x, calls=1, measured=True)
    benchmark = runs.entry.benchmarks(runs.entry.graphs[0]).get_or_create([x])
    benchmark.done = True
    assert not runs.first_call_is_matched(x) and runs.first_call_is_matched(x)
    stand_in = runs.begin()
    stand_in.observer = BlockObserver(may_capture=captured)
    stand_in(runs.block.forward, x)
    assert stand_in.unmatched == captured
    [graph] = runs.entry.graphs
    run, graph.run = graph.run, lambda tensors: run(tensors) + 1
    assert not runs.first_call_is_matched(torch.randn(64, 4))
    graph.run = run
    assert not runs.first_call_is_matched(x) and "differs from the uncompiled" in reasons()[-1]
