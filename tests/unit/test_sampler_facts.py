"""What is measured of a sampler by running it on impulses."""

import pytest
import torch
from comfy_accel.accel.step_cache.sampler_facts import SamplerFacts, measure
from kit.sampling import SCHEDULE, ancestral, heun, sampler

EULER = [1 - end / now for now, end in zip(SCHEDULE, SCHEDULE[1:], strict=False)]


def test_gain_of_eulers_method_is_the_share_of_noise_that_a_step_replaces():
    facts = measure(SCHEDULE, False, sampler(0))
    assert facts.gains == pytest.approx(EULER, rel=1e-4)
    assert not facts.adds_noise and facts.response is not None and facts.steps == len(SCHEDULE) - 1


def test_gain_in_a_flow_is_that_of_the_same_ratio_of_noise_to_image():
    levels = (0.95, 0.8, 0.6, 0.4, 0.2, 0.1)
    facts = measure(levels, True, sampler(0, levels))
    ratios = [level / (1 - level) for level in levels]
    assert facts.gains == pytest.approx([1 - end / now for now, end in zip(ratios, ratios[1:], strict=False)], rel=1e-3)
    from_noise = measure((1.0, *levels), True, sampler(0, (1.0, *levels)))
    assert max(from_noise.gains) == pytest.approx(1.0)


def test_a_sampler_that_extrapolates_has_larger_gains():
    facts = measure(SCHEDULE, False, sampler(1))
    assert all(gain > euler for gain, euler in zip(facts.gains[1:], EULER[1:], strict=True))


def test_predictions_of_a_step_count_wherever_they_are_asked_for():
    """Half of each of Heun's predictions belongs to the step before."""
    facts = measure(SCHEDULE, False, heun)
    assert len(facts.response.levels) == 2 * facts.steps and not facts.adds_noise
    assert all(0.7 * euler < gain < 2 * euler for gain, euler in zip(facts.gains[1:], EULER[1:], strict=True))


def test_noise_is_seen_and_takes_nothing_from_the_gains():
    facts = measure(SCHEDULE, False, ancestral)
    assert facts.adds_noise and facts.response is not None
    expected = [1 - end / 2 / now for now, end in zip(SCHEDULE, SCHEDULE[1:], strict=False)]
    assert all(gain >= 0.9 * share for gain, share in zip(facts.gains, expected, strict=True))


def endless(predict, noise, latent):
    while True:
        latent = predict(latent, SCHEDULE[0])


@pytest.mark.parametrize(
    "levels, sample",
    [
        (
            SCHEDULE,
            lambda predict, noise, latent: (
                sampler(0)(predict, noise, latent + 0 * noise(latent)) + torch.randn_like(latent)
            ),
        ),
        ((14.6, 4.0, 9.0, 2.0, 0.0), sampler(0, (14.6, 4.0, 9.0, 2.0, 0.0))),
        (SCHEDULE, lambda predict, noise, latent: predict(latent, SCHEDULE[0])),
        (SCHEDULE, endless),
    ],
    ids=["noise of its own", "levels up and down", "not every step", "steps without end"],
)
def test_what_cannot_be_measured_is_taken_to_add_noise_and_to_enlarge_errors(levels, sample):
    facts = measure(levels, False, sample)
    assert facts == SamplerFacts(levels, False, adds_noise=True)
    assert facts.gain(0) == pytest.approx(1.6 * max(1 - levels[1] / levels[0], 0))
