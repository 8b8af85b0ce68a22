"""One run of DeepCache without a host: which evaluations call the model, and what stands for it in the others."""

import gc
import math
import weakref

import pytest
import torch
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.accel.step_cache.forecast import forecast
from comfy_accel.accel.step_cache.noise_levels import angle
from kit.step_cache import SCHEDULE, bent, euler, every, letters, run_of

LEVELS = tuple(math.tan(1.5 * (1 - step / 20)) for step in range(21))


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"start_percent": -0.1}, "start_percent -0.1 is outside 0.0 to 1.0."),
        ({"end_percent": 1.5}, "end_percent 1.5 is outside 0.0 to 1.0."),
        ({"end_percent": float("nan")}, "end_percent nan is outside 0.0 to 1.0."),
        ({"start_percent": 0.8, "end_percent": 0.2}, "start_percent (0.8) must not be above end_percent (0.2)."),
        ({"quality": 0.0}, "quality 0.0 is not a number of dB above 0."),
        ({"quality": float("nan")}, "quality nan is not a number of dB above 0."),
    ],
)
def test_settings_out_of_range_are_refused_with_the_range(settings, said):
    with pytest.raises(ValueError) as error:
        DeepCacheSettings(**settings)
    assert str(error.value) == f"DeepCache: {said}"


def sampled(run, bend=0.0, levels=SCHEDULE, **how):
    """The steps that called the model, and the final latent."""
    return euler(run, bent(bend), torch.full((1, 4), levels[0]), levels, **how)


def evaluated(run, *levels, size=4):
    """Whether each of these evaluations called the model."""
    called = []
    for level in levels:
        run.begin(level)
        latent = torch.full((1, size), level)
        called.append(run.forecast(latent) is None)
        if called[-1]:
            run.end(latent, latent / 2)
    return called


# What is skipped, and what the sampler is given


@pytest.mark.parametrize("interval", [2, 3, 5])
def test_skipped_steps_call_no_model_and_the_first_two_are_full(interval):
    run = run_of(every(interval))
    calls, _ = sampled(run)
    assert run.letters == letters(6, interval) and calls == [i for i, one in enumerate(run.letters) if one == "F"]
    assert run.letters.count("S") == 6 - len(calls) and run.skipped_work == (6 - len(calls)) / 6
    assert len(run.began) == 6 and sorted(run.began) == list(run.began)


def test_sampler_is_given_the_line_through_the_last_two_full_steps():
    run, points = run_of(), []
    for step, level in enumerate(SCHEDULE[:4]):
        run.begin(level)
        latent = torch.tensor([[level, 2.0, 0.0, 1.0]])
        points = list(run._known)
        given = run.forecast(latent)
        if given is None:
            run.end(latent, latent * 0.5 + step)
    assert torch.equal(given, forecast(points, angle(2.0), 2.0, latent)) and len(points) == 2


@pytest.mark.parametrize("adds_noise", [True, False])
def test_forecast_follows_a_latent_that_is_moved_but_not_by_noise_of_the_sampler(adds_noise):
    run = run_of(adds_noise=adds_noise)
    for level in SCHEDULE[:3]:
        run.begin(level)
        latent = torch.full((1, 4), level)
        given = run.forecast(latent + 5.0)
        if given is None:
            run.end(latent, torch.full((1, 4), angle(level)))
    assert torch.allclose(given, torch.tensor(angle(4.0))) == adds_noise


def test_plan_is_told_of_skipped_steps_and_behind_two_full_ones_of_what_skipping_would_have_cost():
    run = run_of()
    sampled(run, levels=SCHEDULE)
    assert run.letters == "FFSSFS" and run.plan.told == [[2, 3]]
    run = run_of(every(1))
    evaluated(run, *SCHEDULE[:-1])
    assert run.plan.told == [[step] for step in range(2, 6)]


# What forgets


def test_second_evaluation_of_a_step_shares_its_decision_and_counts_no_step():
    run = run_of()
    called = evaluated(run, 14.6, 8.0, 8.0, 4.0, 4.0, 2.0, 2.0, 1.0)
    assert called == [True, True, True, False, False, False, False, True]
    assert run.letters == "FFSSF" and run.skipped_work == 0.5


def test_looking_ahead_and_coming_back_keeps_each_step_s_decision():
    run = run_of()
    assert evaluated(run, 14.6, 8.0, 4.0, 8.0, 2.0, 4.0) == [True, True, False, True, False, False]
    assert run.letters == "FFSS"


def test_sampler_that_restarts_begins_with_full_steps():
    run = run_of(every(9))
    assert evaluated(run, *SCHEDULE[:6]) == [True, True] + [False] * 4
    assert evaluated(run, 14.6, 8.0, 4.0) == [True, True, False]


@pytest.mark.parametrize(
    "more, how",
    [({"changes": [angle(3.0)]}, {}), ({}, {"scale": lambda step: 4.0 if step > 2 else 7.0})],
    ids=["prompt", "guidance"],
)
def test_nothing_is_foretold_from_before_another_thing_was_asked(more, how):
    assert sampled(run_of(every(9)))[0] == [0, 1]
    calls, _ = sampled(run_of(every(9), **more), **how)
    assert calls == [0, 1, 3, 4]


def test_nothing_is_foretold_for_another_size():
    run = run_of(every(9))
    assert evaluated(run, 14.6, 8.0, 4.0) == [True, True, False]
    assert evaluated(run, 2.0, 1.0, size=6) == [True, True] and run.why_full is None


def test_closed_run_keeps_no_tensor():
    run = run_of(every(9))
    evaluated(run, 14.6, 8.0, 4.0)
    kept = [weakref.ref(one.latent) for one in (*run._known, *run._skipped.values())]
    assert len(kept) == 3
    run.close()
    gc.collect()
    assert not any(latent() is not None for latent in kept)


# What keeps steps full


def test_steps_outside_the_window_are_full():
    run = run_of(every(9), window=(4.0, 1.0))
    sampled(run)
    assert run.letters == "FFSSSF"


@pytest.mark.parametrize(
    "run, why",
    [
        ({"levels": SCHEDULE[::-1]}, "this run makes noise of an image"),
        ({"levels": (14.6, 4.0, 8.0, 0.0)}, "the noise levels of this run go up and down"),
        ({"why_full": "a test says so"}, "a test says so"),
    ],
)
def test_runs_that_may_skip_nothing_are_full_and_say_why(run, why, caplog):
    run = run_of(every(9), **run)
    assert all(evaluated(run, *run.facts.levels[:-1]))
    assert run.letters == "F" * run.facts.steps or "up and down" in why  # then steps cannot be distinguished
    assert run.why_full == why and caplog.text.count(f"{why}; every step runs in full") == 1


def test_run_without_a_schedule_is_full():
    for levels in ((), (1.0,)):
        run = run_of(every(9), levels)
        assert evaluated(run, 1.0, 1.0, 1.0) == [True] * 3 and run.letters == ""


def test_off_gives_the_model_s_predictions_and_compares_nothing():
    run = run_of(every(1), LEVELS)
    calls, latent = sampled(run, 0.3, LEVELS)
    assert len(calls) == 20
    expected = torch.full((1, 4), LEVELS[0])
    for level, end in zip(LEVELS, LEVELS[1:], strict=False):
        given = bent(0.3)(expected, level)
        expected = given + (expected - given) * (end / level)
    assert torch.equal(latent, expected)


def fail(*_, **__):
    raise ValueError("odd")


@pytest.mark.parametrize(
    "break_it, said, full",
    [
        (lambda run, patch: patch.setattr(run.plan, "skips", fail), "whether to skip a step cannot be judged", 6),
        (lambda run, patch: patch.setattr(run, "_find_correction", fail), "its predictions cannot be compared", 6),
        (lambda run, patch: patch.setattr(run.plan, "note_errors", fail), "its predictions cannot be compared", 4),
        (lambda run, patch: patch.setattr(f"{type(run).__module__}.forecast", fail), "a skipped step failed", 6),
    ],
)
def test_failure_ends_skipping_with_a_sentence_and_the_model_is_called(monkeypatch, caplog, break_it, said, full):
    run = run_of()
    break_it(run, monkeypatch)
    calls, latent = sampled(run)
    assert len(calls) == full and latent.isfinite().all()
    assert run.why_full == f"{said} (ValueError: odd)"
    assert caplog.text.count("every step runs in full") == 1


def test_host_that_calls_the_model_after_all_makes_its_step_full():
    run = run_of()
    evaluated(run, 14.6, 8.0)
    run.begin(4.0)
    assert run.skips
    run.keep_full()
    assert not run.skips and run.forecast(torch.zeros(1, 4)) is None


def test_parts_are_foretold_each_on_its_own_line():
    run = run_of(adds_noise=True)
    for level in (14.6, 8.0, 4.0):
        run.begin(level)
        latent, place = torch.full((1, 4), level), angle(level)
        if run.forecast(latent) is None:
            run.end(latent, latent * 0, [latent * 0 + place, latent * 0 - 2 * place])
    parts = run.forecast_parts(latent)
    assert [one[0, 0].item() for one in parts] == pytest.approx([angle(4.0), -2 * angle(4.0)])
