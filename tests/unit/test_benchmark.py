"""The benchmark: a graph that does not pay, or is wrong, is not used; the output is right either way."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile import benchmark as module
from comfy_accel.accel.compile.benchmark import CLEAR_ROUNDS, ROUNDS, Benchmark, Benchmarks
from comfy_accel.accel.compile.compiled_graph import CompiledGraph
from comfy_accel.accel.signature.output_check import compare_to_rounding

CPU = torch.device("cpu")
VALUE = torch.linspace(-1, 1, 64)


def takes(seconds, value=VALUE):
    def run():
        time.sleep(seconds)
        return value

    return run


def run_all(benchmark, compiled, eager):
    outs = []
    while not benchmark.done:
        outs.append(benchmark.call(compiled, eager, CPU))
    return outs


def test_faster_graph_stays():
    benchmark = Benchmark()
    outs = run_all(benchmark, takes(0.001), takes(0.02))
    assert benchmark.verdict is None
    assert len(outs) == CLEAR_ROUNDS + 1


def test_slower_graph_is_given_up_with_both_times():
    benchmark = Benchmark()
    outs = run_all(benchmark, takes(0.02), takes(0.001))
    assert benchmark.verdict.code == "slower" and "slower at this size" in str(benchmark.verdict)
    assert len(outs) == ROUNDS + 1


@pytest.mark.parametrize(("seconds", "verdict", "rounds"), [(0.001, None, CLEAR_ROUNDS), (0.03, "slower", ROUNDS)])
def test_calls_that_must_not_run_twice_take_turns_and_the_first_of_each_way_does_not_count(seconds, verdict, rounds):
    benchmark, ran = Benchmark(), []

    def way(name, seconds):
        def run():
            time.sleep(seconds if name in ran else 0.1)
            ran.append(name)
            return VALUE

        return run

    fast, plain, calls = way("compiled", seconds), way("eager", 0.015), 0
    while not benchmark.done:
        assert benchmark.call_one_way(fast, plain, CPU) is VALUE
        calls += 1
    assert calls == len(ran) and ran.count("compiled") == ran.count("eager") == rounds + 1
    assert getattr(benchmark.verdict, "code", None) == verdict
    assert (benchmark.gain is None) if verdict else 0.005 < benchmark.gain < 0.03


def test_turns_do_not_pair_one_of_two_blocks_with_one_way():
    benchmark, ways = Benchmark(), [set(), set()]
    for number in range(8):
        one = ways[number % 2]
        benchmark.call_one_way(lambda one=one: one.add("compiled"), lambda one=one: one.add("eager"), CPU)
    assert ways == [{"compiled", "eager"}] * 2


def test_graph_that_was_slow_in_a_busy_moment_is_timed_again_in_a_run_some_minutes_later(monkeypatch):
    cache, passed = GraphCache(), [0.0]
    entry, graph = cache.find("a", "A", lambda found: True, lambda: CompiledGraph(len, bool))
    benchmark = entry.benchmarks(graph).get_or_create([VALUE])
    run_all(benchmark, takes(0.02), takes(0.001))
    monkeypatch.setattr(module.time, "perf_counter", lambda clock=time.perf_counter: clock() + passed[0])
    for waited, generations in ((module.ASKED_AGAIN - 60, 0), (120, 1)):
        passed[0] += waited
        before = cache.generation
        with cache.lease():
            assert (benchmark.verdict is None, cache.generation - before) == (bool(generations), generations)
    run_all(benchmark, takes(0.001), takes(0.02))
    assert benchmark.verdict is None and benchmark.gain > 0


def test_the_times_of_a_verdict_do_not_contradict_it():
    """Calls that something else made slow, both ways: the graph was slower in most, its median time is the smaller."""
    benchmark = Benchmark()
    benchmark._compiled = [1.2, 1.2, 1.2, 2.4, 0.1, 0.1, 0.1]
    benchmark._eager = [1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0]
    benchmark._judge()
    fields = dict(benchmark.verdict.fields)
    assert float(fields["compiled"]) > float(fields["eager"])


@pytest.mark.parametrize(
    ("milliseconds", "verdict"),
    [
        (lambda call: 1 if call == 2 else 20, "slower"),
        (lambda call: 20 if call in (1, 2, 4, 6) else 1, None),  # which something else made slow
    ],
)
def test_graph_that_is_slow_in_one_call_of_the_first_is_timed_further(monkeypatch, milliseconds, verdict):
    benchmark, calls, now = Benchmark(), [], [0.0]
    monkeypatch.setattr("comfy_accel.accel.compile.benchmark.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def steady():
        now[0] += 0.002
        return VALUE

    def graph():
        calls.append(1)
        now[0] += milliseconds(len(calls)) / 1000
        return VALUE

    outs = run_all(benchmark, graph, steady)
    assert len(outs) == ROUNDS + 1 and getattr(benchmark.verdict, "code", None) == verdict


def test_block_and_graph_take_turns_in_going_first():
    benchmark, order = Benchmark(), []
    while not benchmark.done:
        benchmark.call(lambda: order.append("graph") or VALUE, lambda: order.append("block") or VALUE, CPU)
    assert order[:6] == ["block", "graph", "graph", "block", "block", "graph"]


def test_threads_that_benchmark_at_once_judge_it_once():
    benchmark = Benchmark()

    def ask():
        while not benchmark.done:
            benchmark.call(takes(0.002), takes(0.001), CPU)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert benchmark.done and len(benchmark._compiled) <= ROUNDS


def test_each_power_of_two_in_size_is_judged_for_itself():
    benchmarks = Benchmarks()
    small, large = (benchmarks.get_or_create([torch.empty(3, 0), torch.empty(1, 4, side, side)]) for side in (8, 32))
    run_all(small, takes(0.01), takes(0.001))
    assert small.verdict is not None and large.verdict is None
    assert benchmarks.get_or_create([torch.empty(1, 4, 9, 8)]) is small


def test_wrong_graph_is_wrong_at_every_size():
    benchmarks = Benchmarks()
    pattern = benchmarks.pattern([torch.empty(8)])

    def difference(out, expected):
        return benchmarks.judge(pattern, compare_to_rounding(out, expected))

    out = benchmarks.compare(pattern, lambda: VALUE + 0.5, lambda: VALUE, difference)
    assert torch.equal(out, VALUE) and benchmarks.wrong.code == "wrong_output"


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_clock_waits_for_the_device(kind, monkeypatch):
    waited, device = [], torch.device(kind, 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    Benchmark().call(takes(0), takes(0), device)
    assert waited == [device] * 4


def test_wrong_graph_is_given_up_at_once_and_the_eager_output_goes_on():
    benchmark = Benchmark()
    outs = run_all(benchmark, takes(0, VALUE + 0.5), takes(0))
    assert len(outs) == 1 and torch.equal(outs[0], VALUE)
    assert benchmark.verdict.code == "wrong_output"
