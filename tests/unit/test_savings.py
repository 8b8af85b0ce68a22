"""What was saved: mental arithmetic, and nothing where nothing was measured."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile.benchmark import CLEAR_ROUNDS, Benchmark
from comfy_accel.accel.compile.compiled_graph import CompiledGraph
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.report.savings import Saving, by_compiling, by_skipping, together


def benchmark(compiled, eager):
    made = Benchmark()
    made._compiled, made._eager, made.done = list(compiled), list(eager), True
    return made


def test_gain_or_loss_of_a_call_times_calls():
    fast = benchmark([1.0, 2.0, 1.0], [3.0, 3.0, 9.0])  # medians 1 and 3
    saved = by_compiling(10, {fast: 10})
    assert saved.seconds == 20.0
    assert "median" in str(saved.how) and "not subtracted" in str(saved.how)
    assert by_compiling(4, {benchmark([2.0] * 3, [1.5] * 3): 4}).seconds == -2.0


def test_calls_that_were_not_compared_count_nothing():
    saved = by_compiling(10, {benchmark([1.0] * 3, [2.0] * 3): 6})
    assert saved.seconds == 6.0 and "at the sizes that were timed" in str(saved.how)


@pytest.mark.parametrize(
    ("calls", "measured", "is_measured", "said"),
    [
        (0, {}, True, "No compiled block ran"),
        (5, {}, True, "too few calls"),
        (5, {}, False, "timing is off"),
        (5, {benchmark([1.0], [2.0]): 5}, True, "too few calls"),
    ],
)
def test_nothing_measured_is_not_guessed(calls, measured, is_measured, said):
    saved = by_compiling(calls, measured, is_measured)
    assert saved.seconds is None and said in str(saved.how)


def test_a_real_benchmark_knows_its_gain_after_enough_calls():
    made = Benchmark()
    for _ in range(CLEAR_ROUNDS + 6):
        if not made.done:
            made.call(lambda: torch.ones(2), lambda: [torch.ones(2) for _ in range(20_000)][0], torch.device("cpu"))
    assert made.done and made.verdict is None
    assert made.gain > 0


def test_skipped_steps_cost_less_than_full_ones():
    # Durations: F 5 (the first, left out), S 1, S 1, F 4, S 1, and the last, which has no end.
    saved = by_skipping("FSSFSF", (0.0, 5.0, 6.0, 7.0, 11.0, 12.0))
    assert saved == Saving(3 * (4.0 - 1.0), Reason("skipping_saved"))


@pytest.mark.parametrize("steps", ["", "F", "FF", "FS", "FSF", "FSS"])
def test_too_few_steps_are_not_guessed_from(steps):
    assert by_skipping(steps, tuple(range(len(steps)))).seconds is None


def test_sum_of_what_is_known():
    known, unknown = by_skipping("FSFSF", (0.0, 1.0, 2.0, 4.0, 5.0)), by_compiling(0, {})
    assert together(known, unknown)["saved_seconds"] == known.seconds == 2 * (2.0 - 1.0)
    assert together(unknown)["saved_seconds"] is None


def test_savings_of_two_samplers_add_up_as_far_as_they_are_known():
    compiled, unknown = Saving(2.0, Reason("compiling_saved")), Saving(None, Reason("compiling_unsure"))
    assert compiled.with_next(compiled) == Saving(4.0, compiled.how)
    assert compiled.with_next(unknown) == unknown.with_next(compiled) == compiled
    assert Saving().with_next(unknown) == unknown.with_next(Saving()) == unknown


def test_benchmarks_count_the_calls_at_their_size_and_the_entry_all():
    cache = GraphCache()
    with cache.lease() as lease:
        entry, graph = cache.find("a", "A", lambda found: True, lambda: CompiledGraph(len, bool), lease)
        small, large = (entry.benchmarks(graph).of([torch.zeros(size)]) for size in (2, 99))
        entry.hits, small.hits, large.hits = 1, 2, 3
    assert lease.calls == 6 and lease.measured == {small: 2, large: 3}
    entry.drop(graph)
    assert entry.calls == 6
