"""What skipped steps got wrong is taken back by the next full one, whatever the sampler makes of predictions."""

import math

import pytest
import torch
from comfy_accel.accel.step_cache.predictions import correction
from comfy_accel.accel.step_cache.predictions.correction import Correction, response_of
from comfy_accel.accel.step_cache.step_schedule import angle

SCHEDULE = (14.6, 9.0, 6.0, 4.0, 2.7, 1.8, 1.2, 0.8, 0.6, 0.45, 0.4, 0.35)
"""It ends before the image: a last step to noise level 0 makes the latent of its prediction alone."""


def sampler(memory):
    """One that takes, beside the newest prediction, `memory` earlier ones; without any it is Euler's."""

    def sample(predict, latent):
        known = []
        for now, end in zip(SCHEDULE, SCHEDULE[1:], strict=False):
            known = [predict(latent, now), *known[:memory]]
            drawn = sum((-0.3) ** back * one for back, one in enumerate(known))
            latent = latent * end / now + (1 - end / now) * drawn / sum((-0.3) ** back for back in range(len(known)))
        return latent

    return sample


def heun(predict, latent):
    for now, end in zip(SCHEDULE, SCHEDULE[1:], strict=False):
        slope = (latent - predict(latent, now)) / now
        ahead = latent + slope * (end - now)
        if end:
            slope = (slope + (ahead - predict(ahead, end)) / end) / 2
        latent = latent + slope * (end - now)
    return latent


def test_response_says_how_predictions_reach_the_final_latent():
    response = response_of(SCHEDULE, sampler(0))
    assert response.levels == pytest.approx(SCHEDULE[:-1])
    shares = [1 - end / now for now, end in zip(SCHEDULE, SCHEDULE[1:], strict=False)]
    kept = [math.prod(1 - share for share in shares[step + 1 : 6]) for step in range(6)]
    expected = [share * rest for share, rest in zip(shares[:6], kept, strict=True)]
    assert response.effects[6][:6] == pytest.approx(expected, rel=1e-4)
    assert not any(response.effects[6][6:])


@pytest.mark.parametrize(
    "schedule, sample",
    [
        (SCHEDULE, heun),
        (SCHEDULE, lambda predict, latent: sampler(0)(lambda *given: predict(*given) ** 2, latent)),
        (SCHEDULE, lambda predict, latent: sampler(0)(predict, latent) + 1.0),
        (SCHEDULE, sampler(correction.MEMORY + 2)),
        (SCHEDULE[::-1], sampler(0)),
    ],
    ids=["evaluates beside its way", "is not linear", "adds of its own", "remembers too much", "makes noise"],
)
def test_no_response_of_a_sampler_that(schedule, sample):
    assert response_of(schedule, sample) is None


def run(sample, skipped, correct, changes=(), scale=lambda step: None):
    """The final latent where predictions lie on a line over the noise level's angle, and are wrong in skipped steps."""
    corrections = Correction(response_of(SCHEDULE, sample), changes) if correct else None
    step = -1

    def predict(latent, level):
        nonlocal step
        step += 1
        place = angle(level)
        prediction = torch.full_like(latent, 2.0 + place) + (0.1 * (step + 1) if step in skipped else 0.0)
        if corrections is None:
            return prediction
        return corrections.corrected(latent, level, place, prediction, step in skipped, scale(step))

    return sample(predict, torch.full((2, 4, 3, 5), SCHEDULE[0]))


@pytest.fixture
def exactly(monkeypatch):
    """All is corrected, of predictions that do not follow the latent."""
    monkeypatch.setattr(correction, "GAIN", 1.0)
    monkeypatch.setattr(correction, "FOLLOWS", 0.0)


@pytest.mark.parametrize("memory", [0, 1, 3])
@pytest.mark.parametrize("skipped", [{3}, {2, 3, 4, 5, 6, 7}, {1, 2, 4, 6, 7}])
def test_latent_is_as_if_nothing_had_been_skipped(exactly, memory, skipped):
    plain, wrong, right = (run(sampler(memory), *how) for how in ((set(), False), (skipped, False), (skipped, True)))
    assert torch.allclose(right, plain, rtol=1e-4)
    assert not torch.allclose(wrong, plain, rtol=1e-3)


def test_full_steps_alone_stay_bit_identical():
    assert torch.equal(run(sampler(1), set(), True), run(sampler(1), set(), False))


@pytest.mark.parametrize(
    "how", [{"changes": [angle(1.5)]}, {"scale": lambda step: 7.0 if step > 4 else 3.0}], ids=["prompt", "guidance"]
)
def test_nothing_is_interpolated_where_another_thing_is_asked_from_then_on(monkeypatch, how):
    """What is asked changes between the full steps 3 and 6."""
    monkeypatch.setattr(correction, "FOLLOWS", 1.0)  # then extrapolated predictions stay as they are
    wrong = run(sampler(0), {4, 5}, False)
    assert torch.allclose(run(sampler(0), {4, 5}, True, **how), wrong, rtol=1e-6)
    assert not torch.allclose(run(sampler(0), {4, 5}, True), wrong, rtol=1e-3)


def test_predictions_stay_as_they_are_once_the_run_leaves_the_response():
    corrections = Correction(response_of(SCHEDULE, sampler(0)))
    prediction = torch.ones(1, 4, 2, 2)

    def given(level, is_skipped, latent=prediction):
        return corrections.corrected(latent, level, angle(level), torch.full_like(latent, level), is_skipped)

    for level, is_skipped in ((14.6, False), (9.0, True), (5.0, True)):
        got = given(level, is_skipped)
    assert torch.equal(got, torch.full_like(got, 5.0)), "of another level"
    assert torch.equal(given(4.0, False), torch.full_like(got, 4.0)), "and for good"


def test_another_size_ends_it():
    corrections = Correction(response_of(SCHEDULE, sampler(0)))
    for level, size, is_skipped in ((14.6, 4, False), (9.0, 4, True), (6.0, 2, False), (4.0, 4, False)):
        prediction = torch.full((1, 4, size, size), level)
        got = corrections.corrected(2 * prediction, level, angle(level), prediction, is_skipped)
    assert torch.equal(got, prediction)
