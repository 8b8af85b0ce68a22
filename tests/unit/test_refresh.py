"""DeepCache without a host: which steps are full, and what the others use."""

import math

import pytest
import torch
from comfy_accel.accel.step_cache import config, refresh
from comfy_accel.accel.step_cache.predictions.forecast import ORDER, REACH
from kit.step_cache import ADAPTIVE, SCHEDULE, Sampler

# Which steps are full


@pytest.mark.parametrize(
    "interval, full", [(1, SCHEDULE[:-1]), (2, (14.6, 4.0, 1.0)), (3, (14.6, 2.0)), (4, (14.6, 1.0)), (100, (14.6,))]
)
def test_every_interval_th_step_is_full(interval, full):
    assert Sampler(interval=interval).full_sigmas(*SCHEDULE[:-1]) == list(full)


def test_steps_outside_the_window_are_full_and_the_count_starts_from_the_last_of_them():
    sampler = Sampler(interval=3)
    sampler.run.window = (4.0, 1.0)
    assert sampler.full_sigmas(*SCHEDULE[:-1]) == [14.6, 8.0, 1.0, 0.5]


@pytest.mark.parametrize("settings", [{"interval": 1}, {"start_percent": 0.5, "end_percent": 0.5}])
def test_settings_that_are_off_hand_back_every_tensor_itself(settings):
    run = Sampler(**settings).run
    for sigma in SCHEDULE[:-1]:
        run.begin_evaluation(sigma)
        keys = run.branches(torch.zeros(2, 4, 8, 8), ["a", "b"], [0, 1], None)
        feature = torch.ones(2, 3, 8, 8)
        assert not run.can_skip(keys)
        assert run.exchange(keys, feature) is feature


def test_step_that_a_sampler_looked_ahead_to_keeps_its_decision():
    # heunpp2: three evaluations, at the step's own level and at the next two.
    ahead = [SCHEDULE[step + extra] for step in range(4) for extra in range(3)]
    assert Sampler(interval=3).full_sigmas(*ahead) == [14.6, 2.0, 2.0, 2.0]


# The adaptive schedule

EVEN = tuple(100.0 - step for step in range(10)) + (0.0,)
"""Its shallow features, which are the levels themselves, change by 0.01 a step."""


@pytest.fixture
def equal_weights(monkeypatch):
    monkeypatch.setattr(refresh, "step_weight", lambda start, end: 1.0)


def test_drift_counts_by_the_weight_of_its_step(monkeypatch):
    monkeypatch.setattr(refresh, "step_weight", lambda start, end: 10.0 if start == math.atan(95.0) else 0.1)
    # 99: nothing is measured yet. 95: 0.04 of change, times 10. Then 0.01 of change times 0.1 and more.
    assert Sampler(EVEN, threshold=0.1, **ADAPTIVE).full_sigmas(*EVEN[:10]) == [100.0, 99.0, 95.0]


def test_adaptive_refreshes_before_the_change_passes_the_threshold(equal_weights):
    # 99: nothing is measured yet. 98: 0.01 expected. 97: 0.02. 96: 0.03. 95 and 94: as 98 and 97.
    assert Sampler(EVEN, threshold=0.025, **ADAPTIVE).full_sigmas(*EVEN[:8]) == [100.0, 99.0, 96.0, 93.0]


@pytest.mark.parametrize("threshold, full", [(0.0, list(EVEN[:8])), (0.011, [100.0, 99.0, 97.0, 95.0, 93.0])])
def test_lower_threshold_refreshes_more_often(equal_weights, threshold, full):
    assert Sampler(EVEN, threshold=threshold, **ADAPTIVE).full_sigmas(*EVEN[:8]) == full


def test_interval_bounds_the_adaptive_schedule(equal_weights):
    sampler = Sampler(EVEN, schedule="adaptive", interval=3, threshold=9.0)
    assert sampler.full_sigmas(*EVEN[:8]) == [100.0, 99.0, 96.0, 93.0]


def test_branch_that_changes_most_decides_for_all_joined_or_split(equal_weights):
    quick = {sigma: 100.0 + 10 * step for step, sigma in enumerate(EVEN)}
    decisions = []
    for calls in (["ab"], ["a", "b"], ["b", "a"]):
        run = Sampler(EVEN, threshold=0.15, **ADAPTIVE).run
        full = []
        for sigma in EVEN[:6]:
            run.begin_evaluation(sigma)
            for uuids in calls:
                values = torch.tensor([sigma if uuid == "a" else quick[sigma] for uuid in uuids]).reshape(-1, 1)
                keys = run.branches(values, list(uuids), [0] * len(uuids), None)
                run.measure(keys, values)
                if not run.can_skip(keys):
                    run.exchange(keys, values)
                    full.append((sigma, uuids))
        decisions.append({sigma for sigma, _ in full})
    # b changes by 0.1 of what it was at first; a alone would never refresh again.
    assert decisions == [{100.0, 99.0, 97.0, 95.0}] * 3


def test_change_that_is_not_a_number_refreshes(equal_weights):
    sampler = Sampler(EVEN, threshold=9.0, **ADAPTIVE)
    run = sampler.run
    for sigma in EVEN[:3]:
        run.begin_evaluation(sigma)
        keys = run.branches(torch.zeros(1, 4), ["a"], [0], None)
        run.measure(keys, torch.full((1, 4), math.nan))
        assert not run.can_skip(keys)
        run.exchange(keys, torch.zeros(1, 4))


def test_branch_that_ended_has_no_say(equal_weights):
    sampler = Sampler(EVEN, threshold=0.025, **ADAPTIVE)
    sampler.evaluate(100.0, "ab")
    sampler.evaluate(99.0, "ab")
    assert sampler.full_sigmas(98.0, 97.0, 96.0) == [96.0]
    assert len(sampler.run._drift._references) == 2
    assert sampler.full_sigmas(95.0, 94.0, 93.0) == [93.0]
    assert len(sampler.run._drift._references) == 1


def test_uniform_schedule_measures_nothing():
    sampler = Sampler(EVEN)
    sampler.evaluate(100.0, "ab")
    assert not sampler.run._drift._references


# A policy of somebody else's


class FirstHalf:
    """Skips every step of the first half of six, and none of the second."""

    uses_drift = True

    def __init__(self, interval, threshold):
        self.interval, self.threshold, self.asked = interval, threshold, []

    def should_refresh(self, step, drift):
        self.asked.append((step, drift.predicted(step.index)))
        return step.index >= 3


def test_registered_policy_decides_for_a_run(monkeypatch):
    monkeypatch.setitem(config.POLICIES, "first half", FirstHalf)
    sampler = Sampler(schedule="first half", interval=2, threshold=0.5)
    assert sampler.full_sigmas(*SCHEDULE[:-1]) == [14.6, 2.0, 1.0, 0.5]
    policy = sampler.run.policy
    assert (policy.interval, policy.threshold) == (2, 0.5)
    assert [(step.index, step.since_refresh) for step, _ in policy.asked] == [(1, 1), (2, 2), (3, 3), (4, 1), (5, 1)]
    assert (policy.asked[0][0].start, policy.asked[0][0].end) == (math.atan(8.0), math.atan(4.0))
    # One measure, of 8.0 against 14.6, is there when step 2 is decided.
    assert [drift for _, drift in policy.asked[:2]] == [None, pytest.approx(2 * (14.6 - 8.0) / 14.6)]


def test_name_of_no_policy_is_refused_with_the_registered_ones(monkeypatch):
    monkeypatch.setitem(config.POLICIES, "first half", FirstHalf)
    with pytest.raises(ValueError, match="must be one of: uniform, adaptive, first half"):
        config.DeepCacheSettings(schedule="second half")


# Forecasts


def test_forecast_holds_until_there_are_two_points_then_follows_the_line():
    sampler = Sampler(SCHEDULE, interval=2, between="forecast")
    got = [sampler.evaluate(sigma, "a")[0][0] for sigma in SCHEDULE[:-1]]
    assert got[:3] == pytest.approx([14.6, 14.6, 4.0])
    way = lambda one, other: math.atan(other) - math.atan(one)  # noqa: E731
    line = lambda at, new, old: new + (new - old) * min(way(new, at) / way(old, new), REACH)  # noqa: E731
    assert got[3:] == pytest.approx([line(2.0, 4.0, 14.6), 1.0, line(0.5, 1.0, 4.0)], rel=1e-5)


def test_joined_split_and_mixed_calls_get_the_same_forecasts():
    seen = []
    for calls in (["ab"], ["b", "a"]):
        sampler = Sampler(SCHEDULE, interval=2, between="forecast")
        for sigma in SCHEDULE[:3]:
            sampler.run.begin_evaluation(sigma)
            sampler.call(sigma, "a", conds=[ord("a")])
        sampler.run.begin_evaluation(2.0)  # b is new on a step that a skips
        got = [sampler.call(2.0, uuids, conds=[ord(uuid) for uuid in uuids]) for uuids in calls]
        seen.append(dict(zip("".join(calls), [value for call in got for value in call], strict=True)))
    assert seen[0] == pytest.approx(seen[1])
    assert seen[0]["b"] == 2.0
    assert seen[0]["a"] < 2.0


def test_each_part_of_a_boundary_has_a_history_of_its_own():
    run = Sampler(interval=3).run
    run.begin_evaluation(14.6)
    keys = run.branches(torch.zeros(1, 4), ["a"], [0], None)
    run.exchange(keys, torch.ones(1, 4), part="text")
    run.exchange(keys, torch.zeros(1, 4), part="image")
    run.begin_evaluation(8.0)
    keys = run.branches(torch.zeros(1, 4), ["a"], [0], None)
    assert run.can_skip(keys)
    assert (run.gather(keys, "text").mean(), run.gather(keys, "image").mean()) == (1, 0)


def test_branch_that_lacks_one_part_recomputes_all_of_them():
    run = Sampler(interval=3).run
    run.begin_evaluation(14.6)
    keys = run.branches(torch.zeros(2, 4), ["a", "b"], [0, 1], None)
    run.exchange(keys, torch.ones(2, 4), part="text")
    run.exchange(keys[:1], torch.ones(1, 4), part="image")
    run.begin_evaluation(8.0)
    keys = run.branches(torch.zeros(2, 4), ["a", "b"], [0, 1], None)
    assert run.can_skip(keys[:1])
    assert not run.can_skip(keys)
    for part in ("text", "image"):
        assert run.exchange(keys, torch.zeros(2, 4), part).mean(1).tolist() == [1, 0]


def test_memory_is_that_of_the_present_branches():
    sampler = Sampler(EVEN, interval=2, between="forecast")
    for step, sigma in enumerate(EVEN[:8]):
        sampler.evaluate(sigma, "abcdefgh"[step])
    assert len(sampler.run._histories) <= 4
    assert all(len(history._points) <= ORDER + 1 for history in sampler.run._histories.values())
