"""Which steps are skipped, by what the run shows of itself."""

import math

import pytest
import torch
from comfy_accel.accel.step_cache.config import QUALITIES, DeepCacheSettings
from comfy_accel.accel.step_cache.plan import QualityPlan
from comfy_accel.accel.step_cache.sampler_facts import SamplerFacts

STEPS = 20
GAIN = 0.2


def planned(target=40.0, error=1e-3, steps=STEPS, gains=None):
    """The letters of a run in which skipping a step is seen to cost this much: a number, one for each sample of a
    batch, or a function of the step."""
    levels = tuple(math.tan(1.5 * (1 - step / steps)) for step in range(steps + 1))
    plan, letters, skipped = QualityPlan(target), "", []
    plan.begin(SamplerFacts(levels, False, False, gains or (GAIN,) * steps))

    def seen(step):
        return torch.as_tensor(error(step) if callable(error) else error, dtype=torch.float32).reshape(-1)

    for step in range(steps):
        if plan.skips(step):
            letters += "S"
            skipped.append(step)
            continue
        letters += "F"
        plan.note_full(step)
        if step > 1:
            plan.note_errors({one: seen(one) for one in skipped or [step]})
        skipped = []
    return letters


def skipped(*args, **how):
    return planned(*args, **how).count("S")


@pytest.mark.parametrize("error", [1e-4, 1e-2, 0.05, lambda step: 0.01 * (1 + math.sin(step))])
def test_more_decibels_never_skip_more(error):
    each = [skipped(target, error) for target in (20.0, 30.0, 35.0, 40.0, 50.0, 60.0, 90.0)]
    assert each == sorted(each, reverse=True)


def test_larger_errors_never_skip_more_and_more_decibels_do_matter():
    each = [skipped(error=error) for error in (1e-6, 1e-3, 1e-2, 0.1, 1.0, 10.0)]
    assert each == sorted(each, reverse=True) and STEPS // 3 <= each[0] < STEPS and each[-2:] == [0, 0]
    assert skipped(60.0, 0.02) < skipped(25.0, 0.02)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8, 20, 50, 1000])
def test_first_steps_and_the_last_are_full(steps):
    letters = planned(error=1e-6, steps=steps)
    assert len(letters) == steps and letters.startswith("FFF"[:steps]) and letters.endswith("F")
    assert steps >= 6 or "S" not in letters


def test_errors_count_as_far_as_the_sampler_enlarges_them():
    assert skipped(error=0.02, gains=(1.5,) * STEPS) < skipped(error=0.02, gains=(0.05,) * STEPS)


def test_steps_whose_neighbours_would_cost_much_are_full_and_later_ones_may_be_skipped():
    letters = planned(error=lambda step: 1.0 if step < 8 else 1e-4)
    assert "S" not in letters[:8] and "S" in letters[8:]


SEEN = [0, 0, 1.1, 1.1, 2.6, 0.8, 1.1, 0.9, 1.3, 1.2, 0.7, 0.4, 0.3, 0.3, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1]
"""Errors of a real run, with a large one behind what would be the first skipped step."""


@pytest.mark.parametrize("size", [0.02, 0.04, 0.06])
def test_one_large_reading_neither_ends_nor_frees_a_run(size):
    each, calm = (
        [skipped(target, lambda step, errors=errors: size * errors[step]) for target in range(50, 29, -1)]
        for errors in (SEEN, [*SEEN[:4], 1.1, 1.1, *SEEN[6:]])
    )
    assert each == sorted(each) and min(each) > 1
    assert max(abs(one - other) for one, other in zip(each, calm, strict=True)) <= 2


@pytest.mark.parametrize("steps, least", [(20, 10), (30, 15), (50, 25)])
def test_half_of_the_steps_run_for_balanced_however_straight_predictions_are(steps, least):
    assert skipped(steps=steps, error=1e-9) == steps - least
    assert "SSS" not in planned(steps=steps, error=1e-9)


def test_farthest_sample_of_a_batch_decides():
    assert planned(error=[1e-4, 0.03, 1e-4]) == planned(error=0.03) != planned(error=1e-4)


@pytest.mark.parametrize("error", [math.nan, math.inf, [1e-6, math.nan]])
def test_reading_that_is_no_number_skips_nothing(error):
    assert skipped(error=error) == 0


def test_nothing_is_skipped_before_anything_is_shown():
    plan = QualityPlan(20.0)
    plan.begin(SamplerFacts(tuple(range(STEPS, -1, -1)), False, False))
    for step in range(STEPS):
        assert not plan.skips(step)
        plan.note_full(step)


def test_plan_that_begins_anew_forgets_what_it_saw():
    plan, letters = QualityPlan(40.0), []
    for _ in range(2):
        plan.begin(SamplerFacts(tuple(range(STEPS, -1, -1)), False, False))
        for step in range(3):
            letters.append(plan.skips(step))
            plan.note_full(step)
            plan.note_errors({step: torch.tensor([1e-6])})
        letters.append(plan.skips(3))
    assert letters == [False, False, False, True] * 2


def test_fast_skips_no_less_than_balanced():
    for error in (1e-4, 1e-2, 0.03):
        assert skipped(QUALITIES["Fast"].quality, error) >= skipped(QUALITIES["Balanced"].quality, error)
    assert QUALITIES["Exact"] is None and QUALITIES["Balanced"] == DeepCacheSettings()
