"""The tables of `bench kernels`."""

import pytest

from dev.bench import kernels

BLOCKS = [
    {**dict.fromkeys(kernels.COLUMNS, 0), "model": "Wan", "block": "B", "variant": variant, "elements": 10}
    | {"instructions_per_element": instructions}
    for variant, instructions in (("ours", 6.0), ("static", 4.0))
]


def whole(**instructions):
    return [
        {**BLOCKS[0], "block": kernels._label(layers), "variant": variant, "instructions_per_element": float(count)}
        for variant, counts in instructions.items()
        for layers, count in zip(kernels.LAYERS, counts, strict=True)
    ]


def test_core_is_compared_by_what_a_layer_more_adds():
    (row,) = kernels.totals(BLOCKS + whole(ours=(10, 30), core=(25, 75)))
    assert row["core / ours"] == 2.5
    assert row["ours / static"] == 1.5 and row["graphs"] == 1  # by the blocks alone


@pytest.mark.parametrize("failed", [0, 3])
def test_failure_is_no_ratio(failed):
    rows = whole(ours=(10, 30), core=(25, 75))
    rows[failed] |= {"elements": None, "instructions_per_element": None, "cpu_seconds": None, "mark": "RuntimeError"}
    (row,) = kernels.totals(BLOCKS + rows)
    assert row["core / ours"] == "failed"
