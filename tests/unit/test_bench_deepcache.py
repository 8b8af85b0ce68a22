"""The DeepCache bench's arithmetic: curves, gains, targets, merged rows, similarity, the plot, the networks' data."""

import pytest
import torch
from PIL import Image

from bench import deepcache_page, line_plot, similarity, toy_data
from bench.deepcache_plan import (
    FEWER_STEPS,
    TARGET,
    at,
    gains,
    merged,
    more_was_possible,
    share_at,
    summary,
    verdict,
    verdicts,
)

HOLD, FORECAST = "uniform, hold", "adaptive, forecast"


def row(curve=HOLD, share=0.5, psnr=30.0, **changes):
    schedule, between = curve.split(", ") if ", " in curve else (None, None)
    place = {"network": "unet", "sampler": "euler", "steps": 30, "width": 16, "height": 16, "batch": 1, "samples": 1}
    setting = {"interval": 3, "threshold": share, "depth": None, "target_db": None, "fewer_steps": None}
    measured = {"flops_share": share, "psnr_db": psnr, "ssim": 0.9, "latent_db": psnr}
    method = "DeepCache" if schedule else curve
    own = {"method": method, "schedule": schedule, "between": between, "on_curve": True}
    return {**place, **own, **setting, **measured, **changes}


def asked(target, share, psnr, reached=1, above=0, **changes):
    return row(TARGET, share, psnr, target_db=target, reached_db=psnr, reached=reached, above=above, **changes)


def test_summary_weighs_cases_by_their_samples_and_adds_up_what_reached():
    cases = {"samples": 1, "batch": 1}, {"samples": 3, "batch": 3}
    (mean,) = summary([asked(40.0, 0.5, 20.0, 0, **cases[0]), asked(40.0, 0.5, 32.0, 2, 1, **cases[1])])
    assert mean["psnr_db"] == mean["reached_db"] == 29.0
    assert (mean["samples"], mean["reached"], mean["above"]) == (4, 2, 1)


def test_merged_rows_replace_those_of_the_same_measurement_alone():
    known = [row(psnr=1.0), row(psnr=2.0, steps=8), row(psnr=3.0, network="dit")]
    found = merged(known, [row(psnr=4.0), row(psnr=5.0, batch=4)])
    assert sorted(one["psnr_db"] for one in found) == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(("psnr", "expected"), [(25.0, 0.45), (40.0, 0.6), (15.0, 0.4), (41.0, None)])
def test_share_at_a_quality_is_the_least(psnr, expected):
    assert share_at([(0.4, 20.0), (0.6, 40.0)], psnr) == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (row(share=0.4, psnr=41.0), True),
        (row(share=0.4, psnr=39.0), False),
        (row(share=0.5, psnr=60.0), False),
        (row(share=0.4, psnr=41.0, sampler="heun"), False),
    ],
)
def test_more_was_possible_where_another_way_kept_the_target_for_less(other, expected):
    assert more_was_possible(asked(40.0, 0.5, 50.0), [other]) is expected


def test_verdicts_count_what_reached_its_target_and_what_was_too_far_above():
    rows = [asked(40.0, 0.5, 50.0, above=1), row(share=0.4, psnr=41.0), asked(32.0, 0.3, 20.0, reached=0)]
    kept, *_ = verdicts(rows)
    assert "1 of 2 samples (50%)" in kept and "of 1 where more could have been skipped, 1 (100%)" in kept


def test_targets_are_judged_against_the_default_and_every_other_way():
    rows = [asked(target, share, psnr) for target, share, psnr in ((40.0, 0.5, 40.0), (30.0, 0.3, 30.0))]
    rows += [row(FORECAST, 0.4, 32.0, on_curve=False), *(row(FEWER_STEPS, share, 20.0) for share in (0.3, 0.5))]
    kept, over_default, over_fewer = verdicts(rows)
    assert "+3.0 dB" in over_default and "at least 2 dB: reached." in over_default
    assert FEWER_STEPS in over_fewer and "+15.0 dB" in over_fewer


def test_page_begins_with_a_table_and_the_plots(tmp_path):
    rows = [asked(target, share, target + 1) for target, share in ((40.0, 0.5), (32.0, 0.3))]
    rows += [row(FORECAST, 0.4, 32.0, on_curve=False), row(HOLD, 0.4, 30.0), row(HOLD, 0.6, 35.0)]
    deepcache_page.save(tmp_path, rows)
    page = (tmp_path / "deepcache.md").read_text(encoding="utf-8")
    assert "| unet | 30 | 0.40 → 32.0 dB | 0.50 → 41.0 dB, 100% kept | 0.30 → 33.0 dB, 100% kept |" in page
    assert page.index("| unet") < page.index("deepcache.png") < page.index("What it shows")
    assert (tmp_path / "deepcache.png").is_file() and (tmp_path / "deepcache_unet_targets.png").is_file()


@pytest.mark.parametrize(("share", "expected"), [(0.4, 20.0), (0.45, 25.0), (0.6, 40.0), (0.39, None), (0.61, None)])
def test_value_between_points_lies_on_the_line(share, expected):
    assert at([(0.4, 20.0), (0.6, 40.0)], share) == (expected if expected is None else pytest.approx(expected))


def test_gains_are_taken_where_both_curves_reach():
    found = gains([(0.2, 20.0), (0.6, 40.0)], [(0.4, 25.0), (0.8, 45.0)])
    assert found == [(0.4, pytest.approx(5.0)), (0.6, pytest.approx(5.0))]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"euler": 3.0, "heun": 4.0}, "+3.5 dB, +3.0 dB (euler) to +4.0 dB (heun); goal at least 3 dB: reached."),
        ({"euler": 1.0, "heun": 4.0}, "goal at least 3 dB: missed."),
        ({"euler": 3.0}, "+3.0 dB (euler); goal at least 3 dB: reached."),
    ],
)
def test_gain_is_judged_by_its_mean_over_samplers(found, words):
    assert words in verdict(found, goal=3.0)


def test_psnr_of_a_known_error():
    black = torch.zeros(2, 3, 16, 16)
    grey = black.clone()
    grey[1] += 0.1
    assert similarity.psnr(grey, black).tolist() == [similarity.IDENTICAL, pytest.approx(20.0)]


def test_psnr_of_latents_is_to_their_own_range():
    expected = torch.tensor([0.0, 4.0]).repeat(2, 8).reshape(2, 1, 4, 4)
    actual = expected.clone()
    actual[1] += 0.4
    assert similarity.latent_psnr(actual, expected).tolist() == [similarity.IDENTICAL, pytest.approx(20.0)]


def test_ssim_is_1_for_the_same_and_falls_with_noise():
    generator = torch.Generator().manual_seed(0)
    picture = torch.rand(1, 3, 9, 16, generator=generator)
    noise = torch.randn(picture.shape, generator=generator)
    values = [similarity.ssim(picture + amount * noise, picture).item() for amount in (0.0, 0.05, 0.3)]
    assert values[0] == pytest.approx(1.0)
    assert values == sorted(values, reverse=True)


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
