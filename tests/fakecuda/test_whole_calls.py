"""Whole calls with compiled blocks and without, on a device that waits for Python or keeps it waiting."""

import time

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile.benchmark import Benchmark, Benchmarks
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.dispatch import call_times, whole_calls
from comfy_accel.accel.dispatch.block_runner import BlockRunner
from kit import made_up_device as device
from kit.blocks import heard
from kit.code_swaps import attribute
from kit.whole_calls import MEASURED, Net, Run, Tanh


@pytest.fixture(autouse=True)
def judged(monkeypatch):
    """Each graph is faster than its block."""
    fast = Benchmark()
    fast.done = True
    monkeypatch.setattr(Benchmarks, "get_or_create", lambda *how: fast)
    fallbacks.clear()
    yield
    device.launches_take(0)


@pytest.fixture
def delays(monkeypatch):
    """Seconds of the processor that each call takes more: of a block with its stand-in, and of a model without any."""
    more = {"compiled": 0.0, "bare": 0.0}
    of_runner, of_bare = BlockRunner._call, whole_calls._StandIns._call_counted

    def spend(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    def compiled(self, *args):
        spend(more["compiled"])
        return of_runner(self, *args)

    def bare(self, *args):
        spend(more["bare"])
        return of_bare(self, *args)

    monkeypatch.setattr(BlockRunner, "_call", compiled)
    monkeypatch.setattr(whole_calls._StandIns, "_call_counted", bare)
    return more


def run_of(net, cache=None, settings=MEASURED):
    return Run(net, cache, settings, "cuda")


@pytest.fixture
def net():
    return Net(3).cuda()


def calls(run, count, rows=4, **how):
    """Whether each of so many calls was compiled."""
    with torch.no_grad():
        return [run(rows, **how) > 0 for _ in range(count)]


TURNS = [True, False, False, True, True, False]
"""With stand-ins and without."""


def test_model_whose_whole_calls_are_slower_is_left_alone_in_later_runs_too_and_says_so(net, delays):
    delays["compiled"] = 0.01
    run = run_of(net)
    assert calls(run, 12) == [True] * 2 + TURNS + [False] * 4
    assert run.calls.end() == 3 * (3 + 4)
    (row,) = fallbacks.rows()
    assert (row["block"], row["code"], row["calls"]) == ("Net", "host_bound", 3 * (3 + 4))
    assert "its steps wait for Python" in row["reason"]
    later = run_of(net, run.cache)
    later.calls.unspared = Reason("cuda_malloc_async")
    assert calls(later, 3) == [False] * 3 and later.eager_calls == 9
    assert [row["code"] for row in fallbacks.rows()] == ["host_bound", "host_bound_without_graphs"]


def test_model_whose_whole_calls_are_faster_is_compiled(net, delays):
    delays["bare"] = 0.03
    run = run_of(net)
    assert calls(run, 12) == [True] * 2 + TURNS + [True] * 4
    run.calls.end()
    assert fallbacks.rows() == [] and calls(run_of(net, run.cache), 3) == [True] * 3


def test_it_is_taken_up_again_at_another_size_under_other_code_and_with_other_settings(net, delays):
    delays["compiled"] = 0.01
    run = run_of(net)
    assert calls(run, 9)[-1:] == [False]
    delays.update(compiled=0.0, bare=0.03)
    assert calls(run, 9, rows=64)[2:] == [*TURNS, True]
    assert calls(run, 1) == [False], "what was found of the first size is forgotten"
    with attribute(Tanh, "factor", 0.5):
        assert calls(run_of(net, run.cache), 9)[-1:] == [True]
    other = CompileSettings(backend="eager", measured=True, any_size=False)
    assert calls(run_of(net, run.cache, other), 9)[-1:] == [True]
    assert calls(run_of(net, run.cache), 1) == [False]


@pytest.mark.parametrize("aside", [False, True])
def test_what_cuda_graphs_would_give_is_said_where_the_allocator_forbids_them(net, delays, monkeypatch, aside):
    """By what the device takes for a call in which it need not wait for Python: all blocks left aside, too."""
    slow, cache = Benchmark(), GraphCache()
    if aside:
        slow.done, slow.verdict = True, Reason("slower", compiled="2", eager="1")
        monkeypatch.setattr(Benchmarks, "get_or_create", lambda *how: slow)
    delays.update(compiled=0.01, bare=0.01)
    device.launches_take(50)
    with heard("graphs_would_give") as told:
        for count, unspared in ((14, None), (3, Reason("cuda_malloc_async")), (1, Reason("cuda_malloc_async"))):
            run = run_of(net, cache)
            run.calls.unspared = unspared
            calls(run, count)
            run.calls.end()
            assert len(told) == (0 if unspared is None else 2 if count == 1 else 1)
        device.launches_take(3000)
        for few in (1, 12):  # calls of a larger size, of which the device is at work all the time
            calls(run, few, rows=64)
            run.calls.end()
    times = [fields["times"] for fields in told]
    assert times[0] == times[1] == times[2] > 3
    assert all(later < times[0] / 2 for later in times[3:])  # said where it is still worth it


def test_where_the_device_is_what_calls_wait_for_none_is_made_without_stand_ins(net, delays):
    delays["compiled"] = 0.001
    run = run_of(net)
    calls(run, 2)
    device.launches_take(3000)
    run.calls.unspared = Reason("cuda_malloc_async")
    assert calls(run, 6) == [True] * 6
    assert [known.times.spared for known in run.calls._met] == [1.0]


def test_nobody_asked_for_times(net, delays):
    delays["compiled"] = 0.01
    assert calls(run_of(net, settings=CompileSettings(backend="eager")), 9) == [True] * 9


def test_run_that_is_too_short_goes_on_in_the_next(net, delays):
    delays["compiled"] = 0.01
    run = run_of(net)
    assert calls(run, 4) == [True, True, *TURNS[:2]]
    later = run_of(net, run.cache)
    assert calls(later, 6) == [*TURNS[2:], False, False]


def test_call_that_fails_is_no_sample(net, delays, monkeypatch):
    run = run_of(net)
    calls(run, 2)
    with pytest.raises(ZeroDivisionError), run.calls.put_in_place((torch.zeros(4, 8, device="cuda"),)):
        raise ZeroDivisionError
    assert calls(run, 6) == TURNS


def test_clock_of_windows_that_stands_still_in_a_call_is_not_divided_by(net, monkeypatch):
    monkeypatch.setattr(call_times, "_thread_time", lambda: 0.0)
    run = run_of(net)
    calls(run, 12)
    assert not any(known.times.is_due for known in run.calls._met)


class Optional(Net):
    """Calls all its blocks but those named."""

    without = ()

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if number not in self.without:
                x = block(x)
        return x


@pytest.mark.parametrize("without", [(0,), (3,)])
def test_block_that_is_not_called_keeps_no_decision_away(delays, without):
    delays["bare"] = 0.03
    net = Optional(4).cuda()
    net.without = without
    run = run_of(net)
    assert calls(run, 10)[2:] == [*TURNS, True, True] and run.calls.end() == 3 * 3
    (known,) = run.calls._met
    assert not known.times.is_due and known.times.verdict is None


def test_calls_that_take_turns_in_calling_most_blocks_are_compared_with_their_like(delays):
    delays.update(compiled=0.001, bare=0.004)
    cut = Optional(8).cuda()
    run = run_of(cut)
    for number in range(24):
        cut.without = () if number % 2 else range(1, 8)
        calls(run, 1)
    assert [known.times.verdict for known in run.calls._met] == [None]


def test_call_that_skips_its_blocks_says_nothing_of_cuda_graphs(delays):
    delays.update(bare=0.03, compiled=0.005)
    net = Optional(3).cuda()
    run = run_of(net)
    calls(run, 8)
    run.calls.unspared, net.without = Reason("cuda_malloc_async"), range(3)
    calls(run, 1)
    assert [known.times.spared for known in run.calls._met] == [None]


def test_calls_of_other_types_are_others():
    run = run_of(Net(3).cuda())
    for kind in (torch.float32, torch.float16):
        with run.calls.put_in_place((torch.zeros(4, 8, dtype=kind, device="cuda"),)):
            pass
    assert len(run.calls._met) == 2


def test_nothing_is_timed_while_others_capture(net, delays):
    run = run_of(net)
    calls(run, 2)
    x, graph = torch.zeros(4, 8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        with run.calls.put_in_place((x,)):
            net(x)
    assert calls(run, 6) == TURNS
