"""The memory that captured calls share: how it is counted, and which are evicted when it is too much."""

from concurrent.futures import ThreadPoolExecutor

from comfy_accel.accel.compile.compiled_graph import CompiledGraph
from kit.captures import Toy, capturing_cache, check_calls, left, reasons, run


def images(model, cache, *sizes, calls=4):
    """A run for each of these numbers of tokens; how often the model ran in the last."""
    for tokens in sizes:
        with run(model, cache) as call:
            ran = check_calls(model, call, calls, tokens=tokens)
    return ran


def held(cache, capturer):
    """Bytes that are really there."""
    return capturer.bytes + sum(member.buffer_bytes for member in cache.captures.members)


def kernel(cache, key, nbytes):
    make = lambda: CompiledGraph(run=lambda tensors: None, guards=lambda tensors: True, nbytes=nbytes)  # noqa: E731
    cache.find(key, key, lambda graph: True, make)


def weight_of(tokens):
    model, (cache, capturer) = Toy(), capturing_cache()
    images(model, cache, tokens, calls=3)
    return held(cache, capturer)


def test_entries_weigh_what_there_is_and_sizes_share_it():
    model, (cache, capturer) = Toy(), capturing_cache()
    with run(model, cache) as call:
        for tokens in (40, 30, 20, 10):
            check_calls(model, call, 5, tokens=tokens)
    assert capturer.captures == left(capturer) == 4
    assert capturer.bytes == max(graph.own_bytes for graph in capturer.graphs)
    assert abs(cache.statistics()["bytes"] - held(cache, capturer)) <= 4
    for key in [member.key for member in cache.captures.members][:3]:
        cache.evict(key)
        # What is evicted takes its buffers along; the memory that the others share stays.
        assert abs(cache.statistics()["bytes"] - held(cache, capturer)) <= 4
    cache.clear()
    assert cache.statistics()["bytes"] == 0 and left(capturer) == 0


def test_forty_sizes_in_a_row_stay_under_the_budget_and_are_all_right():
    budget = 4 * weight_of(30)
    model, (cache, capturer) = Toy(), capturing_cache(max_bytes=budget)
    for tokens in [*range(1, 41)] * 3:
        images(model, cache, tokens)
        assert held(cache, capturer) <= budget and cache.statistics()["bytes"] <= budget
    assert capturer.replays >= 120 and reasons() == []


def test_least_recently_used_size_leaves_first():
    model, (unbound, capturer) = Toy(), capturing_cache()
    images(model, unbound, 1, 2, 3)
    too_little = held(unbound, capturer) - 1
    for bounds in ({"max_entries": 2}, {"max_bytes": too_little}):
        model, (cache, capturer) = Toy(), capturing_cache(**bounds)
        images(model, cache, 1, 2, 1, 3)
        assert left(capturer) == cache.statistics()["entries"] == 2
        assert images(model, cache, 1, calls=2) == 0 < images(model, cache, 2, calls=2)
    assert reasons() == []


def test_captures_leave_before_kernels_since_they_cost_least_to_make():
    model, (cache, capturer) = Toy(), capturing_cache()
    kernel(cache, "old kernel", 1000)
    images(model, cache, 5)
    cache.set_budget(max_bytes=1000)
    assert left(capturer) == 0
    assert [entry.name for entry in cache.entries()] == ["old kernel"]


def test_room_is_what_kernels_leave():
    model, (cache, capturer) = Toy(), capturing_cache(max_bytes=weight_of(20) + 1000)
    kernel(cache, "kernel", 1001)
    images(model, cache, 20, calls=6)
    assert left(capturer) == 0 and "the captured calls of this run need" in reasons()[0] and len(reasons()) == 1
    assert cache.get("kernel").graphs


def test_larger_size_makes_room_by_letting_all_others_go():
    budget = weight_of(40) + 100
    model, (cache, capturer) = Toy(), capturing_cache(max_bytes=budget)
    for tokens in (20, 30, 40, 20):
        with run(model, cache) as call:
            assert check_calls(model, call, 8, tokens=tokens) < 8 + 3
        assert held(cache, capturer) <= budget
    assert reasons() == []


def test_two_sizes_of_one_run_that_do_not_fit_together_do_not_take_turns():
    budget = weight_of(40) + 100
    model, (cache, capturer) = Toy(), capturing_cache(max_bytes=budget)
    with run(model, cache) as call:
        for _ in range(8):
            check_calls(model, call, 2, tokens=40)
            check_calls(model, call, 2, tokens=39)
    assert capturer.captures <= 4
    assert held(cache, capturer) <= budget
    assert "the captured calls of this run need" in reasons()[0] and len(reasons()) == 1


def test_budget_of_nothing_captures_nothing_and_a_larger_one_does_again():
    model, (cache, capturer) = Toy(), capturing_cache(max_bytes=100)
    images(model, cache, 5, calls=5)
    assert left(capturer) == 0 and "the captured calls of this run need" in reasons()[0]
    cache.set_budget(max_bytes=1 << 20)
    images(model, cache, 5, calls=5)
    assert left(capturer) == 1


def test_models_captures_leave_with_it():
    (cache, _), models = capturing_cache(), [Toy(1), Toy(2)]
    for model in models:
        images(model, cache, 5)
    cache.captures.drop(cache, lambda call: call.key.model() is models[0])
    assert [member.key.model() for member in cache.captures.members] == [models[1]]


def test_threads_of_one_run_each_capture_the_calls_of_a_model_of_their_own():
    cache, capturer = capturing_cache()

    def calls(model):
        with run(model, cache) as call:
            for tokens in (5, 6, 7):
                check_calls(model, call, 5, tokens=tokens)

    models = [Toy(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(calls, models))
    assert reasons() == []
    assert capturer.captures == left(capturer) == cache.statistics()["captures"] == 12
    assert abs(cache.statistics()["bytes"] - held(cache, capturer)) <= 12
