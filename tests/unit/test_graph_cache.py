"""The shared cache: one compilation a key, bounds, eviction, failures."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import MOST_GRAPHS, GraphCache, NoGraph
from comfy_accel.accel.compile.compiled_graph import CompiledGraph, CompileFailed, Facts
from comfy_accel.accel.core.reasons import Reason
from kit.blocks import heard, raising


def graph(nbytes=0, limit=None):
    """A graph for calls of up to `limit` tensors, all of them weights."""
    return CompiledGraph(len, lambda tensors: limit is None or len(tensors) <= limit, Facts(weights=9), nbytes)


def find(cache, key, make=graph, tensors=0, lease=None):
    return cache.find(key, f"name of {key}", lambda g: g.accepts([torch.empty(2)] * tensors), make, lease)


def keys(cache):
    return [entry.name.removeprefix("name of ") for entry in cache.entries()]


def refuses(*_):
    pytest.fail("made once more")


def test_second_look_up_hits_what_the_first_compiled():
    cache = GraphCache()
    with heard() as events:
        _, first = find(cache, "a")
    assert find(cache, "a", refuses)[1] is first
    assert cache.statistics()["compilations"] == cache.statistics()["misses"] == 1
    told = [(name, fields["name"]) for name, fields in events]
    assert told == [("compile_start", "name of a"), ("compile_end", "name of a")]


def test_call_that_no_graph_fits_gets_one_of_its_own():
    cache = GraphCache()
    find(cache, "a", lambda: graph(limit=1), tensors=1)
    find(cache, "a", lambda: graph(limit=2), tensors=2)
    assert cache.statistics()["entries"] == 1
    assert cache.statistics()["graphs"] == 2


def test_graphs_of_one_key_are_bounded():
    cache = GraphCache()
    for size in range(MOST_GRAPHS):
        find(cache, "a", lambda size=size: graph(limit=size), tensors=size)
    with pytest.raises(NoGraph, match=f"none of its {MOST_GRAPHS} graphs fits"):
        find(cache, "a", lambda: pytest.fail("compiled one more"), tensors=MOST_GRAPHS)


def test_threads_that_ask_for_one_key_share_one_compilation():
    cache, made = GraphCache(), []

    def make():
        made.append(threading.get_ident())
        time.sleep(0.05)
        return graph()

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: find(cache, "a", make)[1], range(8)))
    assert len(made) == 1
    assert len(set(map(id, found))) == 1


def test_thread_that_waited_for_an_interrupted_compilation_makes_the_graph_for_all():
    cache, made, waiting = GraphCache(), [], threading.Event()

    def stop():
        threading.Thread(target=wait, name="waits").start()
        waiting.wait(5)
        time.sleep(0.05)  # for the other thread to ask for the key meanwhile
        raise KeyboardInterrupt

    def make():
        made.append(graph())
        return made[-1]

    def wait():
        waiting.set()
        find(cache, "a", make)

    with pytest.raises(KeyboardInterrupt):
        find(cache, "a", stop)
    for thread in threading.enumerate():
        if thread.name == "waits":
            thread.join()
    assert find(cache, "a", make)[1] is made[0] and len(made) == 1


def test_different_keys_compile_side_by_side():
    cache = GraphCache()
    both = threading.Barrier(2, timeout=5)

    def make():
        both.wait()
        return graph()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda key: find(cache, key, make), "ab"))
    assert cache.statistics()["compilations"] == 2


@pytest.mark.parametrize("budget", [{"max_entries": 2}, {"max_bytes": 100}])
def test_least_recently_used_leaves_first_and_at_once_where_the_budget_becomes_smaller(budget):
    cache = GraphCache(**budget)
    for key in ("a", "b", "a", "c"):
        find(cache, key, lambda: graph(nbytes=40))
    assert keys(cache) == ["a", "c"]
    assert cache.statistics()["evictions"] == 1 and cache.statistics()["bytes"] == 80
    cache.set_budget(max_entries=1)
    assert keys(cache) == ["c"]


@pytest.mark.parametrize("budget", [{"max_entries": 0}, {"max_bytes": 0}])
def test_budget_of_zero_compiles_nothing(budget):
    with pytest.raises(NoGraph):
        find(GraphCache(**budget), "a", lambda: pytest.fail("compiled"))


def test_failure_is_remembered_and_not_tried_again_until_it_is_cleared():
    cache, no_compiler = GraphCache(), raising(CompileFailed(Reason("compile_failed", error="no compiler")))
    for make, tried in [(no_compiler, True), (refuses, False)]:
        with pytest.raises(NoGraph, match="no compiler") as refusal:
            find(cache, "a", make)
        assert refusal.value.tried is tried
    assert str(cache.get("a").failure) == "no compiler"
    assert cache.statistics()["compilations"] == 0
    cache.clear_failure("a")
    assert cache.statistics()["entries"] == 0
    find(cache, "a")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError])
def test_interrupted_compiling_or_loading_leaves_nothing_behind(stop):
    cache, interrupted = GraphCache(), raising(stop)
    with pytest.raises(stop):
        find(cache, "a", interrupted)
    with pytest.raises(stop):
        load(cache, "a", interrupted)
    assert cache.statistics()["entries"] == 0
    find(cache, "a")


def test_evict_and_clear_tell_holders_through_the_generation():
    cache = GraphCache()
    for key in "abc":
        find(cache, key)
    before = cache.generation
    assert cache.evict("a") and not cache.evict("a")
    assert cache.generation > before
    assert cache.clear() == 2
    assert cache.statistics()["entries"] == 0


@pytest.mark.parametrize("budget", [{"max_entries": 2}, {"max_bytes": 100}])
def test_what_a_run_uses_stays_and_the_rest_is_not_compiled(budget):
    cache = GraphCache(**budget)
    made = []

    def make():
        made.append(1)
        return graph(nbytes=40)

    for run in range(3):
        with cache.lease() as lease:
            for key in "abcdabcd":
                if key in "ab":
                    find(cache, key, make, lease=lease)
                else:
                    with pytest.raises(NoGraph, match="are in use|need more than"):
                        find(cache, key, make, lease=lease)
        assert keys(cache) == ["a", "b"]
        # In bytes, what a graph weighs is known only once it is there; that is found out once for each.
        assert len(made) == (2 if "max_entries" in budget else min(3 + run, 4))


def test_next_run_may_replace_what_the_last_one_used():
    cache, leases = GraphCache(max_entries=2), []
    for names in ("ab", "cd"):
        with cache.lease() as lease, cache.lease() as other:
            leases.append(lease)  # a lease that nobody has any more holds nothing anyway
            for key in names:
                find(cache, key, lease=lease)
            with pytest.raises(NoGraph):
                find(cache, "e", lease=other)
    assert keys(cache) == ["c", "d"]


def test_graph_that_a_run_holds_counts_as_used_until_the_run_ends():
    cache = GraphCache(max_entries=2)
    with cache.lease() as lease:
        find(cache, "a", lease=lease)  # and then from the holder's own memory, at every step
        find(cache, "b")
    find(cache, "c")
    assert keys(cache) == ["a", "c"]


def test_larger_budget_lets_in_what_did_not_fit():
    cache = GraphCache(max_bytes=10)
    with cache.lease() as lease, pytest.raises(NoGraph, match="more than the memory limit of .* MB"):
        find(cache, "a", lambda: graph(nbytes=40), lease=lease)
    assert cache.generation == 0
    cache.set_budget(max_bytes=100)
    with cache.lease() as lease:
        find(cache, "a", lambda: graph(nbytes=40), lease=lease)


def load(cache, key, make, lease=None):
    return cache.find(key, f"name of {key}", lambda graph: True, refuses, lease, make)


def test_loaded_graph_counts_as_loaded_and_is_found_again():
    cache = GraphCache()
    with heard() as events:
        _, first = load(cache, "a", graph)
    assert load(cache, "a", refuses)[1] is first
    statistics = cache.statistics()
    assert (statistics["loaded"], statistics["compilations"], statistics["seconds"]) == (1, 0, 0.0)
    assert [name for name, _ in events] == ["graph_loaded"]


def test_loaded_graph_takes_no_place_that_its_run_uses():
    cache = GraphCache(max_bytes=100)
    with cache.lease() as lease:
        load(cache, "a", lambda: graph(60), lease)
        with pytest.raises(NoGraph, match="more than"):
            load(cache, "b", lambda: graph(60), lease)
        with pytest.raises(NoGraph, match="more than"):
            load(cache, "b", lambda: pytest.fail("loaded, to be thrown away again"), lease)
    assert keys(cache) == ["a"]
    load(cache, "b", lambda: graph(60))
    assert keys(cache) == ["b"]
