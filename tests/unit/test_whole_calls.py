"""Blocks that run uncompiled for the rest of a run: their calls cost nothing, are counted, and are looked at anew."""

import collections
import sys
from types import SimpleNamespace

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile import block_compiler
from comfy_accel.accel.compile.benchmark import Benchmark, Benchmarks
from comfy_accel.accel.compile.compiled_graph import CompileFailed
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.dispatch.call_times import CallTimes
from kit.blocks import raising
from kit.code_swaps import attribute
from kit.whole_calls import Net, Run, Tanh

SLOWER = Reason("slower", compiled="2", eager="1")


@pytest.fixture(autouse=True)
def forgotten():
    fallbacks.clear()


@pytest.fixture
def slower(monkeypatch):
    """Graphs are judged before their first call: all of them, or those of calls with so many elements."""
    judged, fast, sizes = Benchmark(), Benchmark(), set()
    judged.done, judged.verdict, fast.done = True, SLOWER, True

    def of(self, inputs, captured=False, one_way=False):
        return judged if not sizes or sum(tensor.numel() for tensor in inputs) in sizes else fast

    monkeypatch.setattr(Benchmarks, "get_or_create", of)
    return sizes


def entered(run):
    """Python's functions of ours that a call enters."""
    ours = collections.Counter()

    def hook(frame, event, _):
        if event == "call" and "/accel/" in frame.f_code.co_filename.replace("\\", "/"):
            ours[frame.f_code] += 1

    x = torch.randn(4, 8)
    sys.setprofile(hook)
    try:
        with run.calls.put_in_place((x,)):
            run.net(x)
    finally:
        sys.setprofile(None)
    return ours.total()


def test_calls_enter_no_function_for_a_block_that_is_left_aside(slower):
    few, many = Run(Net(3)), Run(Net(30))
    assert (few(), many()) == (3, 30)
    assert (few(), many()) == (0, 0)
    assert entered(few) == entered(many)


def test_first_call_of_a_later_run_is_looked_at_and_recognised_without_being_described(slower):
    net, cache = Net(3), GraphCache()
    first = Run(net, cache)
    assert [first(), first()] == [3, 0]
    later = Run(net, cache)
    per_block = (entered(later) - entered(later)) / 3
    assert later.eager_calls == 6 and per_block < 40


def test_calls_left_aside_are_counted_with_their_reason(slower):
    run = Run(Net(3))
    for _ in range(5):
        run()
    left = run.calls.end()
    (row,) = fallbacks.rows()
    assert (row["code"], row["calls"], left) == ("slower", 15, 12)


def test_only_blocks_whose_graph_is_left_aside_lose_their_stand_in(slower):
    slower.add(4 * 8)
    run = Run(Net(3, wide=2))
    asked = [run() for _ in range(4)]
    assert asked[0] == 5 and asked[-1] == 2
    assert run.eager_calls == 4 * 3


def test_block_without_a_graph_loses_its_stand_in_too(monkeypatch):
    failed = CompileFailed(Reason("compile_failed", error="why"))
    monkeypatch.setattr(block_compiler, "compile_block", raising(failed))
    run = Run(Net(3))
    assert [run() for _ in range(3)] == [3, 0, 0] and run.eager_calls == 9


def test_another_size_is_looked_at_and_the_first_is_known_still(slower):
    run = Run(Net(3))
    assert [run(4), run(4), run(6), run(6), run(4)] == [3, 0, 3, 0, 0]
    assert [run(4, are_alike=False), run(4)] == [3, 0]  # the first may be captured, so has all stand-ins


def test_calls_are_looked_at_until_nothing_is_compared(monkeypatch):
    times = iter(range(1000))
    monkeypatch.setattr("comfy_accel.accel.compile.benchmark.time.perf_counter", lambda: float(next(times)))
    run = Run(Net(2))
    asked = [run() for _ in range(12)]
    assert asked[:4] == [2] * 4
    # Both ways took as long, so the graphs are used.
    assert set(asked) == {2} and run.eager_calls == 0


def test_code_that_changes_is_noticed_after_a_few_calls_and_looked_at(slower):
    run = Run(Net(3))
    assert [run(), run()] == [3, 0]
    with attribute(Tanh, "factor", 0.5):
        asked = [run() for _ in range(10)]
    assert asked[0] == 0 and asked[-1] == 3 and sorted(asked) == asked
    assert [run(), run()] == [3, 0]


def test_graph_that_leaves_the_cache_has_calls_looked_at(slower):
    run = Run(Net(3))
    assert [run(), run()] == [3, 0]
    run.cache.clear()
    assert [run(), run()] == [3, 0] and run.eager_calls == 4 * 3


def timed(known, compiled, normal, thread=None, device=0.0):
    """Have three calls of so many seconds each way timed."""
    for is_bare in (False, True, True, False, False, True):
        seconds = normal if is_bare else compiled
        took = {"wall": seconds, "thread": seconds if thread is None else thread[is_bare], "device": device}
        assert known.next_is_bare is is_bare
        known.add(SimpleNamespace(**took, device_waited=not is_bare or device < seconds), is_bare)
    assert not known.is_due
    return known.verdict is not None


@pytest.mark.parametrize(
    ("how", "is_left"),
    [
        ({"compiled": 0.97, "normal": 1.0}, False),
        ({"compiled": 0.99, "normal": 1.0}, True),
        ({"compiled": 0.9, "normal": 1.0, "thread": (1.0, 1.0)}, True),
        ({"compiled": 1.0, "normal": 1.0, "thread": (0.9, 1.0)}, True),
        ({"compiled": 0.9, "normal": 0.9, "device": 1.0}, False),
    ],
)
def test_compiled_calls_are_faster_by_the_clock_and_by_the_processor_or_not_made(how, is_left):
    """The last: uncompiled, the device is what the call waits for."""
    assert timed(CallTimes(), **how) is is_left


def test_sentence_says_what_a_step_takes_both_ways():
    known = CallTimes()
    timed(known, 0.0146, 0.0119)
    assert str(known.verdict) == ("its steps wait for Python (14.6 ms a step compiled, 11.9 uncompiled)")


def test_what_other_code_was_found_to_do_is_not_kept_for_the_first(slower, monkeypatch):
    net, cache = Net(3), GraphCache()
    with attribute(Tanh, "factor", 0.5):
        assert Run(net, cache)() == 3
    fast = Benchmark()
    fast.done = True
    monkeypatch.setattr(Benchmarks, "get_or_create", lambda *how: fast)
    later = Run(net, cache)
    assert [later() for _ in range(4)] == [3] * 4 and later.calls.end() == 0


def test_calls_that_were_looked_at_anew_are_made_by_what_was_found_then(slower):
    run = Run(Net(3))
    for _ in range(2):
        run()
        (known,) = run.calls._met
        assert run.calls._make_stand_ins(known, False).left is known.left
        known.left = None
