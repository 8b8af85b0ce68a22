"""The simulated fleet, in cases whose answers are known."""

import random

import pytest

from dev import Problem
from dev.bench import fleet_simulation
from dev.bench.fleet_simulation import ROUTES, TRAINED, Costs, Fleet, Prompt, traffic


def prompts(*keys, at=0.0, image_s=1.0):
    return [Prompt(at, "model", key, image_s) for key in keys]


@pytest.mark.parametrize("route", ROUTES)
def test_one_worker_with_random_prompts_waits_as_queueing_theory_says(route):
    draw = random.Random(1)
    at, asked = 0.0, []
    for _ in range(100_000):
        at += draw.expovariate(0.7)
        asked.append(Prompt(at, "model", "key", draw.expovariate(1.0)))
    result = Fleet(route, Costs()).run(asked, 1)
    mean = sum(result.waits) / len(result.waits)
    assert mean == pytest.approx(0.7 / (1 - 0.7), rel=0.05)  # M/M/1: rho / (mu - lambda)
    assert result.busy_s / result.end == pytest.approx(0.7, rel=0.02)


@pytest.mark.parametrize("route", ROUTES)
def test_every_prompt_is_answered_once_and_a_second_run_is_the_same(route):
    asked = traffic(models=5, rate=3.0, many=2000, image_s=1.0, seed=3)
    first, second = (Fleet(route, Costs(model_s=0.5, capture_s=0.2), seed=7).run(asked, 5) for _ in range(2))
    assert len(first.waits) == 2000
    assert first == second
    assert min(first.waits) >= -1e-9


def test_one_key_is_met_by_all_but_the_first():
    result = Fleet("graph", Costs(model_s=3, capture_s=2)).run(prompts(*"aaaa"), 1)
    assert (result.met_graph, result.met_model) == (3, 3)
    assert result.waits == [5, 6, 7, 8]  # one image takes 1, and the first loads and captures


def test_prompts_of_a_key_wait_for_its_worker_until_another_has_long_been_idle():
    result = Fleet("graph", Costs(capture_s=2), patience=5).run(prompts(*"aaaaaaaa", image_s=2), 2)
    assert result.met_graph == 6  # the second worker captures the key when it takes over, at 5 s
    assert max(result.waits) < 8 * 2
    patient = Fleet("graph", Costs(capture_s=2), patience=1000).run(prompts(*"aaaaaaaa", image_s=2), 2)
    assert patient.met_graph == 7
    assert sorted(patient.waits) == [2, 4, 6, 8, 10, 12, 14, 16]


def test_by_key_each_key_has_its_worker_and_chance_spreads_them():
    asked = [Prompt(10.0 * number, "model", "ab"[number % 4 // 2], 1.0) for number in range(40)]
    by_key, anywhere = (Fleet(route, Costs()).run(asked, 2) for route in ("graph", "any"))
    assert by_key.met_graph == 38
    assert anywhere.met_graph == 36  # each worker meets each key for a first time


def test_worker_lets_the_least_recently_used_key_and_model_go():
    result = Fleet("graph", Costs(keys=2)).run(prompts(*"abcab"), 1)
    assert result.met_graph == 0
    assert Fleet("graph", Costs(keys=3)).run(prompts(*"abcab"), 1).met_graph == 2


def test_traffic_has_the_rate_and_the_preferences_that_were_asked_for():
    asked = traffic(models=5, rate=2.0, many=20_000, image_s=1.0, seed=1)
    assert asked[-1].at == pytest.approx(10_000, rel=0.03)
    popular = sum(prompt.model == f"{next(iter(TRAINED))}-0.safetensors" for prompt in asked) / len(asked)
    assert popular == pytest.approx(1 / (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5), rel=0.03)
    assert asked[0].key.startswith(asked[0].model) and "x1" in asked[0].key


def test_assumptions_are_numbers_that_there_are():
    ours = {name: value for name, (value, _) in fleet_simulation.ASSUMED.items()}
    assert fleet_simulation.assumed(["models=5", "capture_s=0"]) == {**ours, "models": 5, "capture_s": 0}
    for given, sentence in (("size=5", "no assumption size"), ("models=many", "a number"), ("load=0", "above 0")):
        with pytest.raises(Problem, match=sentence):
            fleet_simulation.assumed([given])
