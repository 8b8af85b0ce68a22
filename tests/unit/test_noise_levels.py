"""Which step a noise level belongs to, for falling and rising schedules and samplers that look between the levels."""

import math

import pytest
from comfy_accel.accel.step_cache.noise_levels import angle, is_in_order, is_in_window, step_of

SCHEDULE = (14.6, 8.0, 4.0, 2.0, 1.0, 0.5, 0.0)


@pytest.mark.parametrize("step", range(6))
def test_level_of_a_step_belongs_to_it(step):
    sigma = SCHEDULE[step]
    assert step_of(sigma, SCHEDULE) == step
    assert step_of(sigma * (1 + 1e-6), SCHEDULE) == step
    assert step_of(sigma * (1 - 1e-6), SCHEDULE) == step


@pytest.mark.parametrize("step", range(5))
def test_midpoint_belongs_to_the_step_that_it_refines(step):
    assert step_of((SCHEDULE[step] * SCHEDULE[step + 1]) ** 0.5, SCHEDULE) == step


@pytest.mark.parametrize("sigma, step", [(0.0, 5), (1e-3, 5), (100.0, 0)])
def test_level_outside_the_schedule_belongs_to_its_nearest_end(sigma, step):
    assert step_of(sigma, SCHEDULE) == step


@pytest.mark.parametrize("sigma, step", [(0.0, 0), (0.3, 0), (0.5, 1), (7.9, 4), (8.0, 5), (14.6, 5)])
def test_rising_schedule_is_read_upwards(sigma, step):
    assert step_of(sigma, SCHEDULE[::-1]) == step


def test_neighbours_of_a_thousand_step_schedule_stay_apart():
    schedule = [14.6 * (0.03 / 14.6) ** (i / 999) for i in range(1000)] + [0.0]
    assert [step_of(sigma, schedule) for sigma in schedule[:-1]] == list(range(1000))


@pytest.mark.parametrize(
    "level, inside", [(8.0, True), (8.0001, True), (8.1, False), (1.0, True), (0.99999, True), (0.9, False)]
)
def test_both_ends_of_a_window_are_inside(level, inside):
    assert is_in_window(level, (8.0, 1.0)) is inside


@pytest.mark.parametrize(
    "sigma, is_flow, expected",
    [
        (0.0, False, 0.0),
        (1.0, False, math.pi / 4),
        (1e9, False, math.pi / 2),
        (0.0, True, 0.0),
        (0.5, True, math.pi / 4),
        (1.0, True, math.pi / 2),
    ],
)
def test_angle_goes_from_image_to_noise(sigma, is_flow, expected):
    assert angle(sigma, is_flow) == pytest.approx(expected)


@pytest.mark.parametrize(
    "levels, expected", [((3, 2, 2, 0), True), ((0, 1, 5), True), ((), True), ((14.6, 7, 3, 7, 3, 0), False)]
)
def test_levels_are_in_order_when_they_only_fall_or_only_rise(levels, expected):
    assert is_in_order(levels) == expected
