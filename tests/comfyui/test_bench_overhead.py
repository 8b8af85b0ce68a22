"""`dev.py bench overhead` measures what it tells of."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from kit import tiny_models

from dev.bench import overhead_images, overhead_parts


@pytest.mark.thorough  # traces two kinds of blocks for a bench alone
def test_every_block_is_measured_and_the_comparison_of_code(monkeypatch):
    monkeypatch.setattr(overhead_parts, "REPETITIONS", 3)
    family = tiny_models.FLUX_FAMILY
    latent, prompts = torch.zeros(1, 16, 8, 8), (family.conditioning(7, seed=1), family.conditioning(7, seed=2))

    def image(model):
        return tiny_models.sample_latent(model, latent, *prompts, steps=1)

    with torch.inference_mode():
        each, comparing = overhead_parts.of_blocks(family.load(torch.float32), image, GraphCache())
    assert len(each) > 1 and min(*each, comparing) > 0


@pytest.mark.thorough  # compiles a model twice for a bench alone
def test_images_of_all_contenders_are_told_part_by_part(monkeypatch):
    monkeypatch.setattr(overhead_images, "LATER", 1)
    monkeypatch.setitem(overhead_images.DEPTH, "Wan", {"num_layers": 2})
    contenders, cases = ["ours", "blocks"], overhead_images.CASES[:2]
    rows = list(overhead_images.measure("Wan", contenders, cases))
    assert [(row["contender"], row["case"], row["image"]) for row in rows] == [
        (contender, case.name, image) for contender in contenders for case in cases for image in (1, 2, 3)
    ]
    assert rows[0]["compiled"] and all({*overhead_images.PARTS} < {*row} for row in rows)
    assert not any(row["compiled"] for row in rows if row["contender"] == "ours" and row["image"] > 1)
