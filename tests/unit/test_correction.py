"""What skipped steps got wrong is taken back by the next full one, whatever the sampler makes of predictions."""

import math

import pytest
import torch
from comfy_accel.accel.step_cache import correction, sampler_facts
from comfy_accel.accel.step_cache.noise_levels import angle
from comfy_accel.accel.step_cache.run import DeepCacheRun
from comfy_accel.accel.step_cache.sampler_facts import measured
from kit.sampling import SCHEDULE, heun, sampler
from kit.step_cache import EveryFew, EveryFewSettings


def response_of(schedule, sample):
    return measured(schedule, False, sample).response


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
        (SCHEDULE, lambda predict, noise, latent: sampler(0)(lambda *given: predict(*given) ** 2, noise, latent)),
        (SCHEDULE, lambda predict, noise, latent: sampler(0)(predict, noise, latent) + 1.0),
        (SCHEDULE, sampler(sampler_facts.MEMORY + 2)),
        (SCHEDULE[::-1], sampler(0)),
    ],
    ids=["evaluates beside its way", "is not linear", "adds of its own", "remembers too much", "makes noise"],
)
def test_no_response_of_a_sampler_that(schedule, sample):
    assert response_of(schedule, sample) is None


class Steps(EveryFew):
    """Skips these steps."""

    def __init__(self, skipped):
        super().__init__(0, points=2)
        self.skips = lambda step: step in skipped


class StepsSettings(EveryFewSettings):
    def __init__(self, skipped):
        super().__init__()
        object.__setattr__(self, "plan", lambda: Steps(skipped))


def run(sample, skipped, correct, changes=(), scale=lambda step: None, follows=1.0):
    """The final latent where predictions lie on a line over the noise level's angle, and are wrong in skipped steps."""
    facts, step = measured(SCHEDULE, False, sample), -1
    follow = (follows,) * len(SCHEDULE) if correct else None
    made = DeepCacheRun(StepsSettings(skipped), facts, lambda model: None, (math.inf, 0.0), follow, changes)

    def predict(latent, level):
        nonlocal step
        step += 1
        made.begin(level)
        prediction = torch.full_like(latent, 2.0 + angle(level)) + (0.1 * (step + 1) if step in skipped else 0.0)
        made.count(step in skipped)
        return made.end(latent, level, prediction, scale(step))

    return sample(predict, torch.zeros_like, torch.full((2, 4, 3, 5), SCHEDULE[0]))


@pytest.fixture
def exactly(monkeypatch):
    """All is corrected, of predictions that do not follow the latent."""
    monkeypatch.setattr(correction, "FOLLOW_RATIO", 0.0)


@pytest.mark.parametrize("memory", [0, 1, 3])
@pytest.mark.parametrize("skipped", [{3}, {2, 3, 4, 5, 6, 7}, {1, 2, 4, 6, 7}])
def test_latent_is_as_if_nothing_had_been_skipped(exactly, memory, skipped):
    plain, wrong, right = (run(sampler(memory), *how) for how in ((set(), False), (skipped, False), (skipped, True)))
    assert torch.allclose(right, plain, rtol=1e-4)
    assert not torch.allclose(wrong, plain, rtol=1e-3)


def test_step_that_hardly_uses_its_prediction_leaves_it_to_the_next(monkeypatch):
    """One of 300 times what the latent lacks would be far from any prediction."""
    monkeypatch.setattr(correction, "FOLLOW_RATIO", 0.0)
    near = 4.0 * (1 - 1 / 300)
    levels, given = (14.6, 9.0, 6.0, 4.0, near, 2.0, 1.0, 0.0), []
    facts = measured(levels, False, sampler(0, levels))
    made = DeepCacheRun(StepsSettings({2}), facts, lambda model: None, (math.inf, 0.0), (1.0,) * len(levels))

    def predict(latent, level):
        made.begin(level)
        prediction = torch.full_like(latent, 2.0 + angle(level) + (0.3 if level == 6.0 else 0.0))
        made.count(level == 6.0)
        given.append(made.end(latent, level, prediction, None) - prediction)
        return given[-1] + prediction

    sampler(0, levels)(predict, torch.zeros_like, torch.full((1, 1, 2, 2), 14.6))
    assert [bool(off.any()) for off in given] == [False, False, True, False, True, False, False]


def test_predictions_are_taken_to_follow_the_latent_half_way():
    latent, moved = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    full = correction.FullEvaluations()
    for index, place in enumerate((1.2, 1.1)):
        full.add(correction.Evaluation(index, place, 2.0, latent, torch.zeros_like(latent)))
    error = full.error_of(correction.Evaluation(2, 1.0, 2.0, latent + moved, moved / 2))
    assert error.item() < 1e-6


def test_full_steps_alone_stay_bit_identical():
    assert torch.equal(run(sampler(1), set(), True), run(sampler(1), set(), False))


@pytest.mark.parametrize(
    "how", [{"changes": [angle(1.5)]}, {"scale": lambda step: 7.0 if step > 4 else 3.0}], ids=["prompt", "guidance"]
)
def test_nothing_is_interpolated_where_another_thing_is_asked_from_then_on(monkeypatch, how):
    """What is asked changes between the full steps 3 and 6."""
    monkeypatch.setattr(correction, "FOLLOW_RATIO", 1.0)  # then extrapolated predictions stay as they are
    wrong = run(sampler(0), {4, 5}, False)
    assert torch.allclose(run(sampler(0), {4, 5}, True, **how), wrong, rtol=1e-6)
    assert not torch.allclose(run(sampler(0), {4, 5}, True), wrong, rtol=1e-3)


def test_predictions_that_do_not_follow_the_latent_are_brought_to():
    """As where a model predicts the image itself: what it returns does not move with the latent."""
    outs = [run(sampler(0), {4, 5}, True, follows=follows) for follows in (0.0, 0.5, 1.0)]
    assert not torch.allclose(outs[0], outs[1], rtol=1e-4) and not torch.allclose(outs[1], outs[2], rtol=1e-4)


def evaluated(evaluations):
    """What a run gives for each (level, is_skipped, size)."""
    skipped = {index for index, (_, is_skipped, _) in enumerate(evaluations) if is_skipped}
    facts = measured(SCHEDULE, False, sampler(0))
    run = DeepCacheRun(StepsSettings(skipped), facts, lambda model: None, (math.inf, 0.0), (1.0,) * len(SCHEDULE))
    got = []
    for level, is_skipped, size in evaluations:
        run.begin(level)
        run.count(is_skipped)
        prediction = torch.full((1, 4, size, size), level)
        got.append(run.end(2 * prediction, level, prediction))
    return got


def test_predictions_stay_as_they_are_once_the_run_leaves_the_response():
    got = evaluated([(14.6, False, 2), (9.0, True, 2), (5.0, False, 2), (4.0, False, 2)])
    assert torch.equal(got[2], torch.full_like(got[2], 5.0)), "of another level"
    assert torch.equal(got[3], torch.full_like(got[3], 4.0)), "and for good"


def test_another_size_ends_it():
    got = evaluated([(14.6, False, 4), (9.0, True, 4), (6.0, False, 2), (4.0, False, 4)])
    assert torch.equal(got[3], torch.full_like(got[3], 4.0))
