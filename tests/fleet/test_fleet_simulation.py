"""The simulated fleet, in cases whose answers are known."""

import random

import pytest

from accel.sizing.resolution import Size
from bench.fleet_simulation import (
    RULES,
    Architecture,
    Costs,
    Fleet,
    Prompt,
    Store,
    Wishes,
    bursty,
    cold_start,
    steady,
)
from fleet.homes import Homes

FLUX = Architecture("Flux", graphs=2, compile_s=10, load_s=1)
WISHES = Wishes(5, [("Flux", [Size(1024, 1024), Size(832, 1248)])], 1.0, 1.0)


def prompts(*keys, at=0.0, image_s=1.0):
    return [Prompt(at, "model", key, image_s) for key in keys]


@pytest.mark.parametrize("rule", RULES)
def test_one_worker_with_random_prompts_waits_as_queueing_theory_says(rule):
    draw = random.Random(1)
    at, asked = 0.0, []
    for _ in range(100_000):
        at += draw.expovariate(0.7)
        asked.append(Prompt(at, "model", "key", draw.expovariate(1.0)))
    result = Fleet(rule, Costs()).run(asked, [0.0])
    mean = sum(result.waits) / len(result.waits)
    assert mean == pytest.approx(0.7 / (1 - 0.7), rel=0.05)  # M/M/1: rho / (mu - lambda)
    assert result.busy_s / result.end == pytest.approx(0.7, rel=0.02)


@pytest.mark.parametrize("rule", RULES)
def test_every_prompt_is_answered_once_and_a_second_run_is_the_same(rule):
    asked = bursty(WISHES, rate=3.0, many=2000, image_s=1.0, seed=3, burst=4, day_swing=0.5)
    first, second = (Fleet(rule, Costs(model_s=0.5, capture_s=0.2), seed=7).run(asked, [0.0] * 5) for _ in range(2))
    assert len(first.waits) == 2000
    assert first == second
    assert min(first.waits) >= -1e-9


def test_one_key_is_met_by_all_but_the_first():
    result = Fleet("by key", Costs(model_s=3, capture_s=2)).run(prompts(*"aaaa"), [0.0])
    assert (result.met_graph, result.met_model) == (3, 3)
    assert result.waits == [5, 6, 7, 8]  # one image takes 1, and the first loads and captures


def test_prompts_of_a_key_wait_for_its_worker_until_another_has_long_been_idle():
    result = Fleet("by key", Costs(capture_s=2), patience=5).run(prompts(*"aaaaaaaa", image_s=2), [0.0, 0.0])
    assert result.met_graph == 6  # the second worker captures the key when it takes over, at 5 s
    assert max(result.waits) < 8 * 2
    patient = Fleet("by key", Costs(capture_s=2), patience=1000).run(prompts(*"aaaaaaaa", image_s=2), [0.0, 0.0])
    assert patient.met_graph == 7
    assert sorted(patient.waits) == [2, 4, 6, 8, 10, 12, 14, 16]


def test_by_key_each_key_has_its_worker_and_least_loaded_spreads_them():
    asked = [Prompt(10.0 * number, "model", "ab"[number % 4 // 2], 1.0) for number in range(40)]
    by_key, least = (Fleet(rule, Costs()).run(asked, [0.0, 0.0]) for rule in ("by key", "least-loaded"))
    assert by_key.met_graph == 38
    assert least.met_graph == 36  # each worker meets each key for a first time
    assert by_key.keys == [1, 1]
    assert least.keys == [2, 2]


def test_sizes_of_one_model_come_together_where_keys_stay_evenly_spread():
    homes = Homes(patience=5)
    ran = {"a": set(), "b": set()}

    def home(key):
        ((replica,),) = homes.choose(key, 0.0, ran, lambda replica: 0, 0.0)
        return replica

    assert [home(key) for key in ("x 1x1", "y 1x1", "y 2x2", "x 2x2")] == ["a", "b", "b", "a"]
    assert sorted(home(f"x {size}x{size}") for size in range(3, 9)) == ["a", "a", "a", "b", "b", "b"]


def test_worker_lets_the_least_recently_used_key_and_model_go():
    result = Fleet("by key", Costs(keys=2)).run(prompts(*"abcab"), [0.0])
    assert result.met_graph == 0
    assert result.keys == [2]
    assert Fleet("by key", Costs(keys=3)).run(prompts(*"abcab"), [0.0]).met_graph == 2


def test_prompts_wait_until_a_worker_is_ready():
    result = Fleet("least-loaded", Costs()).run(prompts("a"), [30.0])
    assert result.waits == [30]


@pytest.mark.parametrize(
    ("kind", "starts", "compiled", "loaded", "ready"),
    [
        ("none", [0, 0, 50], 6, 0, [20, 20, 70]),
        ("shared", [0, 0, 50], 4, 2, [20, 20, 52]),  # who starts at the same time compiles the same
    ],
)
def test_cold_start_compiles_as_the_store_allows(kind, starts, compiled, loaded, ready):
    store = Store(kind)
    assert cold_start(starts, [FLUX], store) == ready
    assert (store.compiled, store.loaded) == (compiled, loaded)


def test_traffic_has_the_rate_and_the_preferences_that_were_asked_for():
    calm = steady(WISHES, rate=2.0, many=20_000, image_s=1.0, seed=1)
    assert calm[-1].at == pytest.approx(10_000, rel=0.03)
    popular = sum(prompt.model == "Flux-0.safetensors" for prompt in calm) / len(calm)
    assert popular == pytest.approx(1 / (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5), rel=0.03)
    assert calm[0].key.startswith("Flux-") and "x1" in calm[0].key
    rough = bursty(WISHES, rate=2.0, many=20_000, image_s=1.0, seed=1, burst=8, day_swing=0.5)
    assert rough[-1].at == pytest.approx(10_000, rel=0.1)
    morning = sum(prompt.at < 5000 for prompt in rough) / len(rough)
    assert morning == pytest.approx(0.5 + 0.5 / 3.1416, rel=0.1)  # the sine's first half
