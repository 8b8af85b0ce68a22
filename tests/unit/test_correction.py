"""What skipped steps got wrong is taken back by the next full one, whatever the sampler makes of predictions."""

import math

import pytest
import torch
from comfy_accel.accel.step_cache import correction, sampler_facts
from comfy_accel.accel.step_cache import run as running
from comfy_accel.accel.step_cache.forecast import forecast
from comfy_accel.accel.step_cache.noise_levels import angle
from comfy_accel.accel.step_cache.sampler_facts import measure
from kit.sampling import SCHEDULE, ancestral, heun, sampler
from kit.step_cache import every, skipping


def response_of(schedule, sample):
    return measure(schedule, False, sample).response


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
        (SCHEDULE, lambda predict, noise, latent: sampler(0)(lambda *given: predict(*given) ** 2, noise, latent)),
        (SCHEDULE, lambda predict, noise, latent: sampler(0)(predict, noise, latent) + 1.0),
        (SCHEDULE, sampler(sampler_facts.MEMORY + 2)),
        (SCHEDULE[::-1], sampler(0)),
    ],
    ids=["is not linear", "adds of its own", "remembers too much", "makes noise"],
)
def test_no_response_of_a_sampler_that(schedule, sample):
    assert response_of(schedule, sample) is None


@pytest.fixture(autouse=True)
def exactly(monkeypatch):
    """All is corrected, of predictions that do not move with the latent; what is foretold is wrong."""
    monkeypatch.setattr(correction, "FOLLOW_RATIO", 0.0)
    monkeypatch.setattr(running, "forecast", lambda *given: forecast(*given) + 0.3)


def made(sample, settings, corrects=True, schedule=SCHEDULE, changes=(), scale=lambda step: None):
    """The final latent where predictions lie on a line over the noise level's angle, and by how much each was
    corrected."""
    run = running.DeepCacheRun(settings, measure(schedule, False, sample), (math.inf, 0.0), changes)
    off, step = [], -1
    if not corrects:
        run.stop_correcting()

    def predict(latent, level):
        nonlocal step
        step += 1
        run.begin(level, scale(step))
        given = run.forecast(latent)
        if given is None:
            prediction = torch.full_like(latent, 2.0 + angle(level))
            given = run.end(latent, prediction)
            off.append((given - prediction).abs().max().item())
        return given

    return sample(predict, torch.ones_like, torch.full((2, 4, 3, 5), schedule[0])), off


@pytest.mark.parametrize("sample", [sampler(0), sampler(1), sampler(3), heun, ancestral])
@pytest.mark.parametrize("skipped", [{3}, {2, 3, 4, 5, 6, 7}, {2, 4, 6, 7}])
def test_latent_is_as_if_nothing_had_been_skipped(sample, skipped):
    plain, _ = made(sample, every(1))
    (right, _), (wrong, _) = (made(sample, skipping(*skipped), corrects) for corrects in (True, False))
    assert torch.allclose(right, plain, rtol=1e-4)
    assert (wrong - plain).abs().max() > 10 * (right - plain).abs().max()


def test_step_that_hardly_uses_its_prediction_leaves_it_to_the_next():
    """One of 300 times what the latent lacks would be far from any prediction."""
    near = 4.0 * (1 - 1 / 300)
    levels = (14.6, 9.0, 6.0, 4.0, near, 2.0, 1.0, 0.0)
    _, off = made(sampler(0, levels), skipping(2), schedule=levels)
    assert [one > 0 for one in off] == [False, False, False, True, False, False]


@pytest.mark.parametrize(
    "how", [{"changes": [angle(2.0)]}, {"scale": lambda step: 7.0 if step > 4 else 3.0}], ids=["prompt", "guidance"]
)
def test_nothing_is_interpolated_where_another_thing_is_asked_from_then_on(how):
    _, off = made(sampler(0), skipping(3, 4), **how)
    assert not any(off)
    assert any(made(sampler(0), skipping(3, 4))[1])


def evaluated(*evaluations):
    """What a run that skips step 2 gives for each (level, size)."""
    run, got = running.DeepCacheRun(skipping(2), measure(SCHEDULE, False, sampler(0)), (math.inf, 0.0)), []
    for level, size in evaluations:
        run.begin(level)
        latent = torch.full((1, 4, size, size), 2 * level)
        given = run.forecast(latent)
        got.append(run.end(latent, latent / 2) if given is None else given)
    return got


def test_predictions_stay_as_they_are_once_the_run_leaves_the_response():
    got = evaluated((14.6, 2), (9.0, 2), (6.0, 2), (3.0, 2), (2.7, 2))
    assert torch.equal(got[3], torch.full_like(got[3], 3.0)), "of another level"
    assert torch.equal(got[4], torch.full_like(got[4], 2.7)), "and for good"


def test_nothing_is_interpolated_between_sizes():
    got = evaluated((14.6, 4), (9.0, 4), (6.0, 4), (4.0, 2), (2.7, 4))
    assert got[4].isfinite().all()
