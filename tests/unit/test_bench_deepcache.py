"""The DeepCache bench's arithmetic: curves, gains, similarity, the plot, and the test network's data."""

import pytest
import torch
from PIL import Image

from bench import line_plot, similarity, toy_data
from bench.deepcache_plan import EASY_CACHE, FORECAST, HOLD, at, contenders, curves, gains, summary, verdict, verdicts


def row(curve=HOLD, share=0.5, psnr=30.0, **changes):
    schedule, between = (None, None) if curve == EASY_CACHE else curve.split(", ")
    method = EASY_CACHE if curve == EASY_CACHE else "DeepCache"
    clean = {"interval": 3, "threshold": share, "depth": None, "on_curve": True, "sampler": "euler", "samples": 1}
    measured = {"flops_share": share, "psnr_db": psnr, "ssim": 0.9}
    return {"method": method, "schedule": schedule, "between": between, **clean, **measured, **changes}


def test_all_kinds_are_compared_at_intervals_2_3_and_5():
    found = contenders([0.1], [0.2], default_threshold=0.1)
    kinds = {(one.schedule, one.between, one.interval) for one in found if one.interval in (2, 3, 5)}
    assert len(kinds) == 2 * 2 * 3
    assert {one.curve for one in found} == {HOLD, FORECAST, "uniform, forecast", "adaptive, hold", EASY_CACHE}


def test_summary_weighs_cases_by_their_samples():
    (mean,) = summary([row(psnr=20.0, threshold=1, samples=1), row(psnr=32.0, threshold=1, samples=3)])
    assert mean["psnr_db"] == 29.0
    assert mean["samples"] == 4


def test_curves_are_sorted_and_leave_out_what_is_off_them():
    rows = [row(share=0.6), row(share=0.4, psnr=20.0), row(share=0.5, on_curve=False), row(EASY_CACHE, 0.3, 9.0)]
    assert curves(rows) == {HOLD: [(0.4, 20.0), (0.6, 30.0)], EASY_CACHE: [(0.3, 9.0)]}


@pytest.mark.parametrize(("share", "expected"), [(0.4, 20.0), (0.45, 25.0), (0.6, 40.0), (0.39, None), (0.61, None)])
def test_value_between_points_lies_on_the_line(share, expected):
    assert at([(0.4, 20.0), (0.6, 40.0)], share) == (expected if expected is None else pytest.approx(expected))


def test_gains_are_taken_where_both_curves_reach():
    found = gains([(0.2, 20.0), (0.6, 40.0)], [(0.4, 25.0), (0.8, 45.0)])
    assert found == [(0.4, pytest.approx(5.0)), (0.6, pytest.approx(5.0))]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], "no share in common"),
        ([(0.4, 3.0), (0.5, 4.0)], "everywhere: reached."),
        ([(0.4, 1.0), (0.5, 4.0)], "reached at 1 of 2 shares, so missed."),
        ([(0.4, 1.0), (0.5, 2.0)], "everywhere: missed."),
    ],
)
def test_goal_counts_as_reached_only_where_it_is_everywhere(found, words):
    assert words in verdict(found, goal=3.0)


def test_equal_quality_does_not_beat():
    assert "missed" in verdict([(0.4, 0.0)], goal=0.0)


def test_every_sampler_is_judged_against_both():
    rows = [row(curve, share, psnr) for curve, psnr in ((HOLD, 20.0), (FORECAST, 25.0)) for share in (0.3, 0.5)]
    against_hold, against_easy = verdicts(rows)
    assert "+5.0 dB" in against_hold and "everywhere: reached." in against_hold
    assert EASY_CACHE in against_easy and "no share in common" in against_easy


def test_psnr_of_a_known_error():
    black = torch.zeros(2, 3, 16, 16)
    grey = black.clone()
    grey[1] += 0.1
    assert similarity.psnr(grey, black).tolist() == [similarity.IDENTICAL, pytest.approx(20.0)]


def test_ssim_is_1_for_the_same_and_falls_with_noise():
    generator = torch.Generator().manual_seed(0)
    picture = torch.rand(1, 3, 9, 16, generator=generator)
    noise = torch.randn(picture.shape, generator=generator)
    values = [similarity.ssim(picture + amount * noise, picture).item() for amount in (0.0, 0.05, 0.3)]
    assert values[0] == pytest.approx(1.0)
    assert values == sorted(values, reverse=True)


def test_ssim_of_flat_pictures_is_the_papers_luminance_term():
    a, b = torch.full((1, 1, 12, 12), 0.2), torch.full((1, 1, 12, 12), 0.6)
    expected = (2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4)
    assert similarity.ssim(a, b).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("low", "high"), [(0.21, 0.83), (13.2, 61.7), (5.0, 5.0)])
def test_ticks_are_round_and_enclose(low, high):
    found = line_plot.ticks(low, high)
    assert found[0] <= low and found[-1] >= high
    assert 2 <= len(found) <= 12


def test_plot_is_drawn_without_what_is_not_finite(tmp_path):
    path = tmp_path / "docs" / "plot.png"
    line_plot.save(path, "title", "x", "y", {"a": [(0.2, 10.0), (0.5, 20.0)], "b": [(0.3, float("inf"))]})
    with Image.open(path) as image:
        assert image.size == (line_plot.WIDTH, line_plot.HEIGHT)


def test_data_has_the_moments_of_latents_and_depends_on_the_seed_alone():
    classes = torch.arange(len(toy_data.CLASSES)).repeat(64)

    def made(seed):
        return toy_data.pictures(classes, 16, 15, torch.Generator().manual_seed(seed))

    pictures = made(0)
    assert pictures.mean((0, 2, 3)).abs().max() < 0.15
    assert (pictures.std((0, 2, 3)) - 1).abs().max() < 0.15
    assert torch.equal(pictures, made(0))
    assert not torch.equal(pictures, made(1))
    assert toy_data.view(pictures).shape == (len(classes), 3, 16, 15)
