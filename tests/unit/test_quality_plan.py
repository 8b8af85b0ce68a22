"""Which steps are skipped: as many as the allowance pays for, where they cost least by what the run shows of itself."""

import itertools
import math

import pytest
import torch
from comfy_accel.accel.step_cache import plan as planning
from comfy_accel.accel.step_cache.config import QUALITIES, DeepCacheSettings
from comfy_accel.accel.step_cache.plan import LONGEST, QualityPlan
from comfy_accel.accel.step_cache.run import DeepCacheRun
from comfy_accel.accel.step_cache.sampler_facts import SamplerFacts, measured

STEPS = 20
LEVELS = tuple(math.tan(1.5 * (1 - step / STEPS)) for step in range(STEPS + 1))
"""Even in radians."""


def begun(target=40.0, levels=LEVELS, gains=None):
    plan = QualityPlan(target)
    plan.begin(SamplerFacts(tuple(levels), False, False, gains or (0.2,) * (len(levels) - 1)))
    return plan


def planned(target=40.0, bend=0.5, levels=LEVELS, gains=None):
    """The letters of a run whose predictions bend like this: a number or function of the noise level in radians; for
    several samples a list."""
    plan, letters, fulls = begun(target, levels, gains), "", []
    for step in range(len(levels) - 1):
        if plan.skips(step):
            letters += "S"
            continue
        plan.note_full(step)
        if len(fulls) > 1:
            bends = torch.as_tensor(bend(math.atan(levels[step])) if callable(bend) else bend).reshape(-1).double()
            plan.note_shown(step, bends * plan._line_error(step, fulls[-1], fulls[-2]))
        fulls.append(step)
        letters += "F"
    return letters


def stretches(letters):
    return [len(part) for part in letters.split("F") if part]


@pytest.mark.parametrize(
    "bend, letters",
    [
        (1e-9, "FFFSSSFSSFSSSFSSSFSS"),
        (0.5, "FFFSFSFSFSFSSFSFSSFS"),
        (1.0, "FFFSFSFSFSFSFSFSFSFS"),
        (2.0, "FFFFFFFSFFSFFSFFSFSF"),
        (lambda at: 20.0 if at > 1.2 else 0.3, "FFFFFFFSSFSSFSSFSSFS"),
    ],
    ids=["straight", "a little", "bent", "more", "early"],
)
def test_what_is_skipped_at_40_db(bend, letters):
    """With the constants that were measured: each of them changes one of these runs."""
    assert planned(bend=bend) == letters


def test_three_full_steps_come_first_and_no_stretch_is_longer_than_the_longest():
    letters = planned(bend=1e-9)
    assert letters.startswith("FFFS") and max(stretches(letters)) == LONGEST - 1


@pytest.mark.parametrize("bend", [0.3, 1.0, lambda at: 1.0 + 0.3 * math.sin(40 * at)], ids=["a little", "more", "wavy"])
def test_more_decibels_never_skip_more_and_more_bend_never_does(bend):
    skipped = [planned(target, bend).count("S") for target in (30.0, 35.0, 40.0, 45.0, 50.0, 60.0)]
    assert skipped == sorted(skipped, reverse=True) and len(set(skipped)) > 3
    skipped = [planned(bend=value).count("S") for value in (1e-9, 0.5, 2.0, 30.0)]
    assert skipped == sorted(skipped, reverse=True) and skipped[-1] == 0


def test_steps_in_which_predictions_bend_early_are_full():
    """As large models, which decide the composition in their first steps."""
    early = planned(bend=lambda at: 20.0 if at > 1.0 else 0.1)
    decided = next(step for step, level in enumerate(LEVELS) if math.atan(level) <= 1.0)
    assert "S" not in early[: decided + 1] and early[decided:].count("S") > 5


def test_gains_of_the_sampler_count():
    assert planned(gains=(0.8,) * STEPS).count("S") < planned().count("S")
    dear = planned(gains=tuple(2.0 if 8 <= step < 12 else 0.1 for step in range(STEPS)))
    assert "S" not in dear[8:12] and dear.count("S") > 8


def test_the_last_step_is_skipped_where_it_is_narrow_and_not_where_it_is_wide():
    gains = (*(0.2,) * (STEPS - 1), 1.0)
    karras = [(14.6 ** (1 / 7) + i / (STEPS - 1) * (0.03 ** (1 / 7) - 14.6 ** (1 / 7))) ** 7 for i in range(STEPS)]
    wide = (*(math.tan(1.5 - 0.05 * step) for step in range(STEPS)), 0.0)
    narrow = planned(levels=(*karras, 0.0), gains=gains, bend=2.0)
    assert narrow.endswith("S") and planned(levels=wide, gains=gains, bend=2.0).endswith("F")


@pytest.mark.parametrize("bend", [0.4, 1.0, 2.5])
def test_what_is_planned_costs_no_more_than_is_allowed(bend):
    letters, plan = planned(bend=bend), begun()
    fulls = [step for step, letter in enumerate(letters) if letter == "F"]
    costs = [
        plan._cost(one, one - before, after)
        for before, one, after in zip(fulls, fulls[1:], [*fulls[2:], STEPS], strict=False)
    ]
    assert bend**2 * sum(costs) <= plan._allowed and letters.count("S") > 1


@pytest.mark.parametrize("room", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
def test_no_other_way_with_fewer_full_steps_costs_as_little(room):
    """By trying all of a short run's, after three full steps."""
    steps = 12
    levels = tuple(math.tan(1.5 * (1 - step / steps)) for step in range(steps + 1))
    gains = tuple(0.1 + 0.05 * (step * 7 % 5) for step in range(steps))
    plan = begun(levels=levels, gains=gains)

    def cost_of(fulls):
        pairs = zip([1, 2, *fulls], [2, *fulls], [*fulls, steps], strict=False)
        return sum(plan._cost(one, min(one - before, LONGEST), after) for before, one, after in pairs)

    ways = [fulls for n in range(10) for fulls in itertools.combinations(range(3, steps), n)]
    ways = [fulls for fulls in ways if all(b - a <= LONGEST for a, b in itertools.pairwise((2, *fulls, steps)))]
    fewest = min(len(fulls) for fulls in ways if cost_of(fulls) <= room)
    for step in range(3):
        plan.note_full(step)
    taken, spent = [], 0.0
    while (after := plan._next(plan._fulls[-1], 1.0, room - spent)) < steps:
        spent += plan._cost(plan._fulls[-1], plan._gap, after)
        plan.note_full(after)
        taken.append(after)
    assert cost_of(taken) <= room and len(taken) == fewest


def test_the_larger_of_the_last_errors_decides():
    """One full step that happens to be near its forecast is no reason to skip the next."""
    angles = [math.atan(level) for level in LEVELS]
    far = lambda at: min(range(STEPS), key=lambda step: abs(angles[step] - at)) % 2 == 0  # noqa: E731
    assert "S" not in planned(bend=lambda at: 60.0 if far(at) else 1e-9)


def test_one_bend_in_mid_run_is_not_the_end_of_skipping():
    letters = planned(bend=lambda at: 0.5 if 0.7 < at < 0.95 else 0.2)
    assert letters[3:8].count("S") > 2 and letters[-6:].count("S") > 2 and letters != planned(bend=0.2)


def test_the_farthest_sample_of_a_batch_decides():
    assert planned(bend=[1e-9, 1.0]) == planned(bend=1.0) != planned(bend=1e-9)


@pytest.mark.parametrize("bend", [math.nan, math.inf])
def test_what_is_no_number_skips_nothing(bend):
    assert "S" not in planned(bend=bend)


def test_runs_without_anything_shown_skip_nothing():
    plan = begun(30.0)
    for step in range(STEPS):
        assert not plan.skips(step)
        plan.note_full(step)


@pytest.mark.parametrize("steps", [1, 2, 3, 1000])
def test_runs_of_any_length_are_planned(steps):
    letters = planned(levels=tuple(math.tan(1.5 * (1 - step / steps)) for step in range(steps + 1)), bend=0.1)
    assert len(letters) == steps and ("S" in letters) == (steps > 3)


def test_steps_that_had_to_be_full_after_all_are_planned_around():
    plan = begun()
    for step in range(STEPS):
        wanted = plan.skips(step)
        if wanted and step % 4 == 0 or not wanted:
            plan.note_full(step)
            if step > 1:
                plan.note_shown(step, torch.tensor([1e-9]))
    assert plan._fulls[-1] >= STEPS - LONGEST


def test_on_a_device_the_same_steps_are_skipped(monkeypatch):
    """What a full step shows is on its way when the next step is asked about."""
    at_once = planned()

    class Later(planning.HostCopy):
        def __init__(self, tensor):
            super().__init__(tensor)
            self.is_later = True

        def has_come(self):
            return True

    monkeypatch.setattr(planning, "HostCopy", Later)
    assert planned() == at_once


def test_levels_plan_for_their_decibels():
    assert QUALITIES["Exact"] is None and DeepCacheSettings() == QUALITIES["Balanced"]
    assert QUALITIES["Fast"].plan().target < QUALITIES["Balanced"].plan().target


def sampled(settings, curve):
    """Euler's method over a model whose prediction is `curve` of the noise level in radians: letters, final latent."""

    def euler(predict, noise, latent):
        for level, after in itertools.pairwise(LEVELS):
            prediction = predict(latent, level)
            latent = prediction + (latent - prediction) * (after / level)
        return latent

    facts = measured(LEVELS, False, euler)
    run, known = DeepCacheRun(settings, facts, lambda model: None, (math.inf, 0.0), (1.0,) * len(LEVELS)), []
    picture = torch.rand(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))

    def predict(latent, level):
        run.begin(level)
        at = math.atan(level)
        if run.is_full:
            known.append((at, curve(at)))
        (one, a), (two, b) = known[-2:] if len(known) > 1 else [(at + 1, known[0][1]), known[0]]
        foretold = b + (b - a) * (at - two) / (two - one)
        run.count(not run.is_full)
        return run.end(latent, level, picture * (curve(at) if run.is_full else foretold), None)

    final = euler(predict, None, torch.full((1, 4, 8, 8), LEVELS[0]))
    return run.letters, final


def test_a_model_that_decides_its_picture_in_the_first_steps_is_left_alone_there_and_keeps_its_quality():
    """And one that never bends is skipped from the fourth step on."""
    curves = {"early": lambda at: 1 + math.sin(12 * max(at - 1.0, 0.0)), "straight": lambda at: 2 - at}
    letters = {}
    for name, curve in curves.items():
        letters[name], made = sampled(DeepCacheSettings(), curve)
        _, plain = sampled(DeepCacheSettings(start_percent=1.0), curve)
        error = (made - plain).square().mean() / (plain.max() - plain.min()) ** 2
        assert -10 * math.log10(error.item() + 1e-12) > 40
    decided = next(step for step, level in enumerate(LEVELS) if math.atan(level) <= 1.0)
    assert letters["early"][:decided].count("S") <= 1 and letters["early"][decided:].count("S") >= 5
    assert letters["straight"].startswith("FFFS")
