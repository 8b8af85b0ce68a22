"""The line through the last two full predictions, and how far a prediction is from one."""

import math

import pytest
import torch
from comfy_accel.accel.step_cache.forecast import Evaluation, distance, forecast


def at(place, value, latent):
    return Evaluation(0, place, math.tan(place), torch.full((1, 3), latent), torch.full((1, 3), value))


def foretold(points, place, latent, follows=None):
    return forecast(points, place, math.tan(place), torch.full((1, 3), latent), follows)


@pytest.mark.parametrize("follows", [0.0, 1.0, None])
def test_forecast_lies_on_the_line(follows):
    # Predictions that are the latent follow it all the way.
    assert torch.allclose(foretold([at(0.6, 0.6, 0.6), at(1.0, 1.0, 1.0)], 0.4, 0.4, follows), torch.tensor(0.4))


def test_forecast_from_one_point_is_that_prediction():
    assert (foretold([at(0.6, 2.0, 5.0)], 0.4, 9.0, follows=0.0) == 2.0).all()


@pytest.mark.parametrize("place, share", [(1.2, 0.5), (math.pi / 4, 0.5), (1e-3, 1.0)])
def test_forecast_follows_a_moved_latent_by_half_where_there_is_much_noise_and_all_the_way_where_there_is_little(
    place, share
):
    points = [at(place + 0.1, 1.0, 3.0), at(place + 0.2, 1.0, 3.0)]
    moved = foretold(points, place, 4.0) - foretold(points, place, 3.0)
    assert torch.allclose(moved, torch.tensor(share), atol=1e-3)


def test_distance_is_a_share_of_the_other_s_range_for_each_sample():
    one, other = torch.tensor([[1.0, 3.0], [0.0, 8.0]]), torch.tensor([[0.0, 2.0], [0.0, 8.0]])
    assert distance(one, other).tolist() == [0.5, 0.0]
    assert distance(one.half(), other.half()).dtype == torch.float32
