"""What the VAE bench says of its rows."""

import pytest

from dev.bench.vae import failure, totals


def rows(policy, graphs=(5, 5, 5, 5), rss=(1000.0, 1000.0, 1000.0, 1000.0), difference=0.0, uncompiled=0):
    """Two sizes, two sweeps."""
    return [
        {
            **{"policy": policy, "sweep": 1 + index // 2, "width": 512, "height": 512 + 8 * (index % 2)},
            **{"seconds": 1.0, "graphs": graphs[index], "rss_mb": rss[index], "peak_device_mb": None},
            **{"uncompiled": uncompiled, "relative_diff": difference, "dtype": "fp32"},
        }
        for index in range(4)
    ]


def test_all_well():
    fine = [*rows("plain", (0,) * 4), *rows("skip", (0,) * 4), *rows("auto", (0, 0, 5, 5)), *rows("compiled")]
    assert failure(fine) is None
    assert [row["graphs_sweep_2"] for row in totals(fine)] == [0, 0, 5, 5]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (rows("skip", (0, 0, 1, 1)), "none may be"),
        (rows("compiled", (5, 5, 5, 6)), "1 graphs more"),
        (rows("auto", (0, 0, 5, 6)), "1 graphs more"),
        (rows("compiled", rss=(900.0, 1000.0, 1000.0, 1040.0)), "4.0 %"),
        (rows("skip", (0,) * 4, difference=1e-9), "differs"),
        (rows("compiled", difference=0.1), "512x512"),
        (rows("compiled", difference=float("nan")), "differs"),
    ],
)
def test_first_thing_that_must_not_be_is_named(wrong, words):
    assert words in failure(wrong)
