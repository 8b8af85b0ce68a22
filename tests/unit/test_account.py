"""What was saved: mental arithmetic, and nothing where nothing was measured."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile.benchmark import CLEAR_ROUNDS, Benchmark
from comfy_accel.accel.compile.compiled_graph import CompiledGraph
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.report.account import Account, Saving, compute_compile_saving, compute_skip_saving


def calls_of(compiled, eager, elements=1):
    """Calls with so many elements, where those of one element took these seconds."""
    made = Benchmark()
    made._compiled, made._eager, made.done = list(compiled), list(eager), True
    made.find_calls(1)
    return made.find_calls(elements)


def test_gain_or_loss_of_a_call_times_calls():
    fast = calls_of([1.0, 2.0, 1.0], [3.0, 3.0, 9.0])  # medians 1 and 3
    saved = compute_compile_saving(10, {fast: 10})
    assert (saved.seconds, saved.took) == (20.0, 10.0) and "an estimate" in str(saved.how)
    assert compute_compile_saving(4, {calls_of([2.0] * 3, [1.5] * 3): 4}).seconds == -2.0


def test_calls_of_another_size_gain_in_proportion_and_no_more_than_the_run_took():
    smaller = calls_of([20.0] * 3, [30.0] * 3, elements=0.5)
    saved = compute_compile_saving(4, {smaller: 4})  # 4 calls of 10 s that would have taken 15 s
    assert (saved.seconds, saved.took) == (20.0, 40.0)
    assert Account(worked=50.0, savings=[saved]).saved == 20.0
    assert Account(worked=20.0, savings=[saved]).saved == 10.0  # they were timed in a busier moment


def test_calls_that_were_not_compared_count_nothing():
    saved = compute_compile_saving(10, {calls_of([1.0] * 3, [2.0] * 3): 6})
    assert saved.seconds == 6.0


@pytest.mark.parametrize(
    ("calls", "measured", "is_measured", "said"),
    [
        (0, {}, True, "No compiled block ran"),
        (5, {}, True, "too few calls"),
        (5, {}, False, "timing is off"),
        (5, {calls_of([1.0], [2.0]): 5}, True, "too few calls"),
    ],
)
def test_nothing_measured_is_not_guessed(calls, measured, is_measured, said):
    saved = compute_compile_saving(calls, measured, is_measured)
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
    saved = compute_skip_saving("FSSFSF", (0.0, 5.0, 6.0, 7.0, 11.0, 12.0))
    assert saved == Saving(3 * (4.0 - 1.0), Reason("skipping_saved"))


@pytest.mark.parametrize("steps", ["", "F", "FF", "FS", "FSF", "FSS"])
def test_too_few_steps_are_not_guessed_from(steps):
    assert compute_skip_saving(steps, tuple(range(len(steps)))).seconds is None


def test_sum_of_what_is_known():
    known, unknown = compute_skip_saving("FSFSF", (0.0, 1.0, 2.0, 4.0, 5.0)), compute_compile_saving(0, {})
    assert Account(9.0, [known, unknown]).saved == known.seconds == 2 * (2.0 - 1.0)
    assert Account(9.0, [unknown]).saved is None and Account(9.0, [unknown]).gain() == []


@pytest.mark.parametrize(
    ("saved", "paid", "owed", "said", "images"),
    [
        (3.0, 0.0, 0.0, "about 1.5× · about 3.0 s saved", 0),
        (3.0, 72.0, 69.0, "about 69 s slower than without Accel · later images about 1.5×, 3.0 s saved", 23),
        (0.3, 4.8, 4.5, "about 4.5 s slower than without Accel · later images about 1.1×, 0.3 s saved", 15),
        (3.0, 1.0, 0.0, "about 1.3× · about 2.0 s saved · later images about 1.5×, 3.0 s saved", 0),
        (-1.0, 0.0, 9.0, "about 1.0 s slower than without Accel", None),
        (0.2, 0.0, 9.0, "no faster than without Accel", 45),
    ],
)
def test_what_an_image_has_paid_is_in_what_it_gained(saved, paid, owed, said, images):
    account = Account(6.0 if saved > 0.3 else 5.0 if saved == 0.3 else 6.0, [Saving(saved)], paid, owed)
    assert " · ".join(map(str, (*account.gain(), *account.describe_later_images()))) == said
    assert account.pays_back_after == images


def test_savings_of_two_samplers_add_up_as_far_as_they_are_known():
    compiled, unknown = Saving(2.0, Reason("compiling_saved"), 5.0), Saving(None, Reason("compiling_unsure"))
    assert compiled.add(compiled) == Saving(4.0, compiled.how, 10.0)
    assert compiled.add(unknown) == unknown.add(compiled) == compiled
    assert Saving().add(unknown) == unknown.add(Saving()) == unknown


def test_calls_are_counted_by_their_size_and_the_entry_has_all():
    cache = GraphCache()
    with cache.lease() as lease:
        entry, graph = cache.find("a", "A", lambda found: True, lambda: CompiledGraph(len, bool), lease)
        small, large = (entry.benchmarks(graph).get_or_create([torch.zeros(size)]).find_calls(size) for size in (2, 99))
        entry.hits, small.hits, large.hits = 1, 2, 3
    assert lease.calls == 6 and lease.measured == {small: 2, large: 3}
    entry.drop(graph)
    assert entry.calls == 6
