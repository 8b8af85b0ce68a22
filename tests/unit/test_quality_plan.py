"""Which steps are skipped: the floor that is safe without looking, and what a run shows of itself."""

import math

import pytest
import torch
from comfy_accel.accel.step_cache import plan as planning
from comfy_accel.accel.step_cache.config import QUALITIES, DeepCacheSettings
from comfy_accel.accel.step_cache.plan import FORMING, LONGEST, QualityPlan
from comfy_accel.accel.step_cache.sampler_facts import SamplerFacts

STEPS = 20
LEVELS = tuple(math.tan(1.5 * (1 - step / STEPS)) for step in range(STEPS + 1))
"""Even in radians, so that a curve of equal bend shows the same at each step."""


def planned(target=40.0, bend=0.01, pace=lambda angle: 1.0 + angle, levels=LEVELS, is_later=False, gains=None):
    """The letters of a run whose predictions bend and change like this.

    bend, pace: numbers or functions of the noise level in radians; for several samples, of which each is a list.
    """
    facts = SamplerFacts(levels, False, False, gains or (0.2,) * (len(levels) - 1))
    plan, angles, fulls, letters = QualityPlan(target), facts.angles, [], ""
    plan.begin(facts)
    for step in range(facts.steps):
        if plan.skips(step):
            plan.note_skipped(step)
            letters += "S"
            continue
        plan.note_full(step)
        if len(fulls) > 1:
            here, newest, older = (angles[at] for at in (step, fulls[-1], fulls[-2]))
            bends, paces = (value(here) if callable(value) else value for value in (bend, pace))
            bends, paces = torch.as_tensor(bends).reshape(-1), torch.as_tensor(paces).reshape(-1)
            reach = abs(here - newest) * abs(here - older)
            shown = torch.stack(torch.broadcast_tensors(bends * reach, paces * abs(here - newest)))
            plan.note_shown(step, shown.double())
        fulls.append(step)
        letters += "F"
    return letters


def stretches(letters):
    return [len(part) for part in letters.split("F") if part]


def test_nothing_is_skipped_before_the_picture_has_formed_nor_at_the_end_nor_many_in_a_row():
    letters = planned(bend=1e-9)
    formed = next(step for step, level in enumerate(LEVELS) if math.atan(level) <= FORMING)
    assert "S" not in letters[:formed] and letters[formed] == "S" and letters[-1] == "F"
    assert set(stretches(letters)[:-1]) == {LONGEST - 1}


def test_long_schedules_above_the_forming_level_wait_for_a_share_of_their_steps():
    slow = (*(math.tan(1.55 - 0.005 * step) for step in range(STEPS)), 0.0)
    assert planned(bend=1e-9, levels=slow).index("S") == int(planning.FORMING_SHARE * STEPS)


def test_more_is_skipped_the_less_predictions_bend_and_the_fewer_decibels_are_asked_for():
    skipped = [planned(bend=bend).count("S") for bend in (1e-9, 0.8, 2.0, 30.0)]
    assert skipped == sorted(skipped, reverse=True) and len(set(skipped)) > 2 and skipped[-1] == 0
    skipped = [planned(target, bend=0.8).count("S") for target in (30.0, 40.0, 50.0, 60.0)]
    assert skipped == sorted(skipped, reverse=True) and len(set(skipped)) > 2


@pytest.mark.parametrize(
    "bend, letters",
    [
        (1e-9, "FFFSSFSSFSSFSSFSSFSF"),
        (0.4, "FFFSSFSFSFSSFSFSSFSF"),
        (0.8, "FFFSFSFSFSFSFSFSFSFF"),
        (lambda at: 4.0 if at > 1.2 else 0.3, "FFFFFFFSSFSSFSSFSSFF"),
    ],
    ids=["straight", "bent", "more", "at first"],
)
def test_what_is_skipped_at_40_db(bend, letters):
    """With the constants that were measured: each of them changes one of these runs."""
    assert planned(bend=bend) == letters


def test_gains_of_the_sampler_count():
    assert planned(bend=0.8, gains=(0.8,) * STEPS).count("S") < planned(bend=0.8).count("S")


def test_what_is_planned_stays_within_the_target_where_predictions_bend_as_seen():
    """The sum of what stretches add, errors in a stretch pointing the same way."""
    bend, gain, target = 0.8, 0.2, 40.0
    letters, angles = planned(target, bend=bend), [math.atan(level) for level in LEVELS]
    assert letters.count("S") > 3
    squares, open_error, fulls = 0.0, 0.0, []
    for step, letter in enumerate(letters):
        if letter == "S":
            newest, older = (angles[full] for full in (fulls[-1], fulls[-2]))
            open_error += gain * bend * abs(angles[step] - newest) * abs(angles[step] - older)
        else:
            squares, open_error = squares + open_error**2, 0.0
            fulls.append(step)
    assert squares <= 10 ** (-target / 10)


def test_the_larger_of_the_last_errors_decides():
    """One full step that happens to be near its forecast is no reason to skip the next."""
    far = {step for step in range(0, STEPS, 2)}
    angles = [math.atan(level) for level in LEVELS]
    alternating = planned(bend=lambda at: 30.0 if min(range(STEPS), key=lambda s: abs(angles[s] - at)) in far else 1e-9)
    assert "S" not in alternating


def test_nothing_more_is_skipped_once_the_picture_changes_faster_again():
    quick = planned(bend=1e-9, pace=lambda at: 1.0 if at > 0.8 else 1.3)
    turn = next(step for step, level in enumerate(LEVELS) if math.atan(level) <= 0.8)
    assert "S" in quick[:turn] and "S" not in quick[turn + LONGEST :]
    assert planned(bend=1e-9, pace=lambda at: 1.0 if at > 0.8 else 1.15) == planned(bend=1e-9)


def test_the_farthest_sample_of_a_batch_decides():
    assert planned(bend=[1e-9, 2.0]) == planned(bend=2.0) != planned(bend=1e-9)
    touchy = planned(bend=1e-9, pace=lambda at: [1.0 + at, 1.0 if at > 0.8 else 1.3])
    assert touchy == planned(bend=1e-9, pace=lambda at: 1.0 if at > 0.8 else 1.3)


@pytest.mark.parametrize("bend", [math.nan, math.inf])
def test_what_is_no_number_skips_nothing(bend):
    assert "S" not in planned(bend=bend)


def test_runs_without_anything_shown_skip_nothing():
    plan = QualityPlan(30.0)
    plan.begin(SamplerFacts(LEVELS, False, False))
    for step in range(STEPS):
        assert not plan.skips(step)
        plan.note_full(step)


def test_what_the_host_would_wait_for_is_left_out(monkeypatch):
    """On a device a full step's error decides a step later, whether it has come by then or not."""
    at_once = planned(bend=1e-9)

    class Later(planning.HostCopy):
        def __init__(self, tensor):
            super().__init__(tensor)
            self.is_later = True

        def has_come(self):
            return True

    monkeypatch.setattr(planning, "HostCopy", Later)
    later = planned(bend=1e-9)
    assert later.count("S") > 4 and later.index("S") >= at_once.index("S")


def test_levels_plan_for_their_decibels():
    assert QUALITIES["Exact"] is None and DeepCacheSettings() == QUALITIES["Balanced"]
    assert QUALITIES["Fast"].plan().target < QUALITIES["Balanced"].plan().target
