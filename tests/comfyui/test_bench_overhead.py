"""`dev.py bench overhead` measures every part that it tells of."""

from bench import overhead, overhead_blocks, tiny_models


def test_every_part_is_measured(monkeypatch):
    monkeypatch.setattr(overhead_blocks, "REPETITIONS", 3)
    rows = overhead.measure(tiny_models.FLUX_FAMILY)
    assert {row["part"] for row in rows} >= {*overhead.TARGETS, "  weights", "  check", "PREDICT_NOISE, DeepCache's"}
    assert all(row["us"] > 0 for row in rows if row["part"] in overhead.TARGETS)
