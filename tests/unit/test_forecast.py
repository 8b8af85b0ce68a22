"""Extrapolation of features from their last points, on polynomials."""

import math

import pytest
import torch
from comfy_accel.accel.step_cache.features import History, weights


@pytest.mark.parametrize("points", [(3.0,), (3.0, 1.0)])
@pytest.mark.parametrize("at", [-2.0, 0.5, 3.0, 4.5])
def test_polynomial_of_the_points_order_is_met_exactly(points, at):
    polynomial = lambda x: sum(0.7 * x**power for power in range(len(points)))  # noqa: E731
    got = weights(points, at)
    assert sum(got) == pytest.approx(1.0)
    assert sum(w * polynomial(x) for w, x in zip(got, points, strict=True)) == pytest.approx(polynomial(at))


def history_of(function, places, keep=2, dtype=torch.float32):
    history = History(keep)
    for step, at in enumerate(places):
        history.record(step, at, torch.full((1, 3, 2, 2), float(function(at)), dtype=dtype))
    return history


def test_line_is_followed():
    history = history_of(lambda at: 2 * at + 1, (1.5, 1.0))
    assert history.value(0.75).mean() == pytest.approx(2.5)
    assert history.value(0.75).shape == (1, 3, 2, 2)


@pytest.mark.parametrize("places", [(1.0,), (1.0, 1.0), (1.0, 1.0 + 1e-9)])
def test_single_point_is_held(places):
    assert torch.equal(history_of(lambda at: at, places).value(0.1), history_of(lambda at: at, places[-1:]).value(9.0))


def test_newest_place_gives_the_newest_feature_exactly():
    history = history_of(math.sin, (1.5, 0.5), dtype=torch.float16)
    assert torch.equal(history.value(0.5), history_of(math.sin, (0.5,), dtype=torch.float16).value(0.5))


def test_second_evaluation_of_a_step_replaces_its_point():
    history = History(2)
    for step, at, value in ((0, 1.5, 1.0), (1, 1.0, 2.0), (1, 0.9, 5.0)):
        history.record(step, at, torch.full((2,), value))
    assert len(history._points) == 2
    assert history.newest == 1
    assert history.value(0.9).tolist() == [5.0, 5.0]


def test_tensors_are_copies_both_ways():
    history = History(2)
    given = torch.ones(3)
    history.record(0, 1.0, given)
    given.zero_()
    history.value(1.0).zero_()
    assert history.value(1.0).tolist() == [1.0] * 3


def test_no_more_points_than_asked_for():
    history = history_of(lambda at: at, (1.5, 1.2, 0.9, 0.6, 0.3), keep=2)
    assert len(history._points) == 2
    assert history.newest == 4


def test_feature_of_another_shape_or_type_replaces_what_is_known():
    for other in (torch.ones(2, 3), torch.ones(2, dtype=torch.float16)):
        history = history_of(lambda at: at, (1.5, 1.2))
        assert not history.fits(other)
        history.record(2, 0.9, other)
        assert torch.equal(history.value(0.3), other)
