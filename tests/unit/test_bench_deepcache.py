"""The DeepCache bench's arithmetic: cells, gains, targets, merged rows, PSNR, the networks' data."""

import pytest
import torch

from dev.bench import deepcache, similarity, toy_data


def row(way="Balanced", latent=50.0, fewer=40.0, share=0.6, seed=50, target=40.0, **changes):
    place = {"network": "unet", "sampler": "euler", "steps": 30, "cfg": 4.0, "seed": seed}
    measured = {"flops_share": share, "latent_db": latent, "fewer_steps": 18, "fewer_db": fewer}
    return {**place, "way": way, "target_db": target, **measured, "steps_taken": "FS", **changes}


def test_merged_rows_replace_those_of_the_same_measurement_alone():
    known = [row(latent=1.0), row(latent=2.0, steps=8), row(latent=3.0, network="dit")]
    found = deepcache.merged(known, [row(latent=4.0), row(latent=5.0, seed=51)])
    assert sorted(one["latent_db"] for one in found) == [2.0, 3.0, 4.0, 5.0]


def test_cell_has_the_mean_and_the_worst_of_its_images():
    (cell,) = deepcache.cells([row(latent=60.0, fewer=40.0), row(latent=30.0, fewer=44.0, seed=51)])
    assert (cell["mean"], cell["worst"], cell["gain"], cell["worst_gain"]) == (45.0, 30.0, 3.0, -14.0)


def test_overview_counts_cells_by_their_worst_image_and_leaves_out_those_that_skip_nothing():
    rows = [row(latent=30.0, fewer=45.0), row(latent=60.0, seed=51), row(latent=34.0, fewer=38.0, steps=20)]
    (line,) = deepcache.overview([*rows, row(latent=100.0, fewer=100.0, share=1.0, steps=8)])
    assert (line["cells"], line["skipping"], line["worst below 35"], line["cells below"]) == (3, 2, 2, 1)
    assert line["images over 1 dB below"] == 2 and line["worst image"] == "30.0"


def test_targets_are_kept_within_a_decibel_where_anything_was_skipped():
    rows = [row(latent=latent, seed=seed) for seed, latent in enumerate((38.5, 39.2, 45.0, 55.0))]
    (line,) = deepcache.kept([*rows, row(latent=100.0, share=1.0, seed=9), row(target=None, seed=10)])
    assert line["images"] == 4
    assert (line["kept within 1 dB"], line["more than 10 dB above"]) == ("75%", "25%")


def test_page_has_a_table_for_every_question(tmp_path):
    rows = [row(), row("Fast", 45.0, 39.0, 0.5, target=35.0), row("TeaCache", 30.0, target=None)]
    printed = deepcache.save(tmp_path, rows)
    page = (tmp_path / "deepcache.md").read_text(encoding="utf-8")
    assert "0.60 → 50 (50)" in printed
    for line in ("Balanced | 0.60 → 50 (50)", "TeaCache | 0.60 → 30 (30)", "fewer steps | 0.60 → 40 (40)"):
        assert f"| {line} |" in page


@pytest.mark.parametrize("wanted", [0.25, 0.55, 0.8])
def test_threshold_of_another_cache_is_the_one_by_which_its_work_is_nearest(wanted):
    share = lambda threshold: 1 - round(0.9 * threshold / 3, 1)  # noqa: E731
    made = deepcache.at_work(lambda value: (value, share(value)), wanted, 20, deepcache.THRESHOLDS)
    assert abs(made[1] - wanted) <= 0.05 + 1e-9 and share(made[0]) == made[1]


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


def test_data_has_the_moments_of_latents_and_depends_on_the_seed_alone():
    classes = torch.arange(len(toy_data.CLASSES)).repeat(64)

    def made(seed):
        return toy_data.figures(classes, 16, 15, torch.Generator().manual_seed(seed))

    pictures = made(0)
    assert pictures.mean((0, 2, 3)).abs().max() < 0.15
    assert (pictures.std((0, 2, 3)) - 1).abs().max() < 0.15
    assert torch.equal(pictures, made(0))
    assert not torch.equal(pictures, made(1))
    assert toy_data.view(pictures).shape == (len(classes), 3, 16, 15)
