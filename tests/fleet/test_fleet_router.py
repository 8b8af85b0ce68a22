"""Where a fleet sends a prompt; with Ray's own classes around made-up replicas, and once with all of it."""

import asyncio
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve.request_router", reason="an optional package of 200 MB")

# ruff: noqa: E402
from dev.bench import fleet
from fleet.graph_router import GraphRouter


@pytest.fixture
def router():
    made = GraphRouter.__new__(GraphRouter)  # its constructor belongs to a running Serve
    made.initialize_state(patience=5)
    made._replica_queue_len_cache = {}
    return made


def replicas(*names):
    return [SimpleNamespace(replica_id=name, multiplexed_model_ids=set()) for name in names]


def choose(router, candidates, key, waited=0.0):
    asked = SimpleNamespace(
        metadata=SimpleNamespace(multiplexed_model_id=key),
        created_at=time.time() - waited,
        routing_context=SimpleNamespace(should_backoff=False),
    )
    ranks = asyncio.run(router.choose_replicas(candidates, asked))
    assert asked.routing_context.should_backoff
    return [{replica.replica_id for replica in rank} for rank in ranks]


def test_new_key_goes_to_one_replica_alone_and_keys_are_spread_as_replicas_report_them(router):
    candidates = {replica.replica_id: replica for replica in replicas("a", "b", "c")}
    for number in range(30):
        burst = [choose(router, list(candidates.values()), f"key {number}") for _ in range(3)]
        assert burst[0] == burst[1] == burst[2]
        (home,) = burst[0]
        assert len(home) == 1
        candidates[min(home)].multiplexed_model_ids.add(f"key {number}")
    assert all(9 <= len(replica.multiplexed_model_ids) <= 11 for replica in candidates.values())


def test_sizes_of_one_model_come_together_where_keys_stay_evenly_spread(router):
    candidates = {replica.replica_id: replica for replica in replicas("a", "b")}
    candidates["a"].multiplexed_model_ids = {"x 1x1"}
    candidates["b"].multiplexed_model_ids = {"y 1x1"}
    for key, expected in (("y 2x2", "b"), ("x 2x2", "a"), ("y 3x3", "b"), ("x 3x3", "a")):
        assert choose(router, list(candidates.values()), key) == [{expected}]
        candidates[expected].multiplexed_model_ids.add(key)


def test_replica_that_says_it_has_run_the_key_gets_it(router):
    candidates = replicas("a", "b")
    for replica in candidates:
        replica.multiplexed_model_ids = {"key"}
        assert choose(router, candidates, "key") == [{replica.replica_id}]
        replica.multiplexed_model_ids = set()


def test_key_of_a_replica_that_ended_goes_to_another(router):
    candidates = replicas("a", "b")
    (home,) = choose(router, candidates, "key")
    left = [replica for replica in candidates if {replica.replica_id} != home]
    assert choose(router, left, "key") == [{left[0].replica_id}]


def test_prompt_that_waited_long_takes_an_idle_replica_but_none_that_is_busy(router):
    candidates = replicas("a", "b", "c")
    (home,) = choose(router, candidates, "key")
    idle, busy = sorted({"a", "b", "c"} - home)
    router._replica_queue_len_cache = {min(home): 2, idle: 0, busy: 1}
    assert choose(router, candidates, "key", waited=4) == [home]
    assert choose(router, candidates, "key", waited=6) == [home, {idle}]


def test_prompt_without_a_key_may_go_anywhere(router):
    assert choose(router, replicas("a", "b"), "") == [{"a", "b"}]


@pytest.mark.thorough  # starts Ray and two ComfyUIs, and a third in place of the one that it kills
def test_every_prompt_is_answered_once_though_a_replica_is_killed():
    fleet.main(["--replicas", "2", "--prompts", "60", "--routes", "graph"])  # raises if not
