"""How far features have moved, on features of one number."""

import pytest
import torch
from comfy_accel.accel.step_cache.policies.drift import Drift, relative_change


def drift_after(*measured):
    """measured: (key, value, step, renew)."""
    drift = Drift()
    for key, value, step, renew in measured:
        drift.measure(key, torch.tensor([float(value)]), step, renew)
    return drift


def test_change_is_relative_to_what_was():
    assert relative_change(torch.tensor([1.0, -5.0]), torch.tensor([2.0, -2.0])).item() == 1.0
    half = torch.full((3,), 60000.0, dtype=torch.float16)
    assert relative_change(half / 2, half).item() == pytest.approx(0.5, rel=1e-3)


def test_nothing_is_expected_before_two_steps_were_seen():
    assert Drift().predicted(1) is None
    assert drift_after(("a", 10, 0, True)).predicted(1) is None


def test_change_since_the_refresh_goes_on_at_its_pace():
    drift = drift_after(("a", 10, 0, True), ("a", 9, 1, False))
    assert drift.predicted(2) == pytest.approx(0.2)
    drift.measure("a", torch.tensor([8.5]), 2, False)
    assert drift.predicted(3) == pytest.approx(0.15 * 3 / 2)


def test_after_a_refresh_the_pace_of_the_segment_before_goes_on():
    drift = drift_after(("a", 10, 0, True), ("a", 7, 3, True))
    assert drift.predicted(4) == pytest.approx(0.1)
    assert drift.predicted(5) == pytest.approx(0.2)


def test_largest_change_of_a_branch_counts():
    drift = drift_after(("a", 10, 0, True), ("b", 10, 0, True), ("a", 9, 1, False), ("b", 6, 1, False))
    assert drift.predicted(2) == pytest.approx(0.8)


def test_second_evaluation_of_a_refresh_keeps_the_measure_and_moves_the_reference():
    drift = drift_after(("a", 10, 0, True), ("a", 9, 1, True), ("a", 8, 1, True))
    assert drift.predicted(2) == pytest.approx(0.1)
    drift.measure("a", torch.tensor([4.0]), 2, False)
    assert drift.predicted(3) == pytest.approx(1.0)


def test_what_is_forgotten_is_not_measured_against():
    drift = drift_after(("a", 10, 0, True), ("b", 10, 3, True))
    drift.forget(before=1)
    for key in "ab":
        drift.measure(key, torch.tensor([5.0]), 4, False)
    assert drift.predicted(5) == pytest.approx(1.0)
    drift.forget()
    assert drift.predicted(5) is None


def test_features_are_copied():
    drift, feature = Drift(), torch.tensor([10.0])
    drift.measure("a", feature, 0, True)
    feature.zero_()
    drift.measure("a", torch.tensor([9.0]), 1, False)
    assert drift.predicted(2) == pytest.approx(0.2)


def test_feature_of_another_shape_has_no_measure_and_becomes_the_reference():
    drift = drift_after(("a", 10, 0, True))
    drift.measure("a", torch.tensor([10.0, 10.0]), 1, False)
    assert drift.predicted(2) is None
    drift.measure("a", torch.tensor([9.0, 9.0]), 2, False)
    assert drift.predicted(3) == pytest.approx(0.2)


def test_change_towards_an_earlier_step_counts_like_any():
    drift = drift_after(("a", 10, 4, True), ("a", 9, 5, False))
    assert drift.predicted(3) == pytest.approx(0.1)
