"""The session's plan: sizes that keep their parity, and what counts as failed."""

import pytest

from dev.bench import session_plot
from dev.bench.session_plan import STEPS, TOLERANCE, failure, latent_side, with_waiting


def halvings(side: int) -> list[bool]:
    """Whether the side is odd at each of the levels of SD1.5's UNet."""
    odd = []
    for _ in range(3):
        odd.append(side % 2 == 1)
        side = (side + 1) // 2
    return odd


@pytest.mark.parametrize("pixels", sorted({side for step in STEPS for side in (step.width, step.height)}))
def test_scaled_latents_are_odd_where_the_full_ones_are(pixels):
    assert halvings(latent_side(pixels)) == halvings(pixels // 8)
    assert latent_side(pixels, scale=1) == pixels // 8


def test_sizes_that_differ_stay_different():
    sizes = {(step.width, step.height) for step in STEPS}
    assert len({(latent_side(width), latent_side(height)) for width, height in sizes}) == len(sizes)


def row(step=STEPS[1].name, **changes):
    clean = {"compilations": 0, "graph_breaks": 0, "uncompiled": 0, "relative_diff": 0.0, "dtype": "fp16"}
    return {"model": "UNet", "step": step, "contender": "ours", **clean, **changes}


def test_an_image_that_compiled_waited_for_what_it_took_beyond_eagers_of_its_step():
    eager, ours, core = [
        [row(step.name, contender=contender, first_image_s=spent, compilations=compiled) for step in STEPS[:3]]
        for contender, spent, compiled in (("eager", 2.0, 0), ("ours", 32.0, 0), ("core", 42.5, 1))
    ]
    ours[0]["compilations"] = 5
    waits = with_waiting([*eager, *ours, *core])
    assert [row["waiting_s"] for row in waits] == [*[0.0] * 3, 30.0, 0.0, 0.0, *[40.5] * 3]
    assert session_plot.total(waits[3:6]) == "30 s of waiting in 1 image"
    assert session_plot.total(waits[6:]) == "122 s of waiting in 3 images"


def test_compiling_in_the_first_step_alone_is_no_failure():
    assert failure([row(STEPS[0].name, compilations=5), row(), row(contender="core", compilations=1)]) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compilations": 1}, "only the first image may compile"),
        ({"graph_breaks": 1}, "graph breaks"),
        ({"uncompiled": 3}, "ran uncompiled"),
        ({"relative_diff": 1.1 * TOLERANCE["fp16"]}, "differs from uncompiled"),
        ({"relative_diff": float("nan")}, "differs from uncompiled"),
        ({"step": STEPS[0].name}, "nothing was compiled"),
    ],
)
def test_broken_promises_are_named_with_model_and_step(changes, words):
    broken = row(**changes)
    sentence = failure([broken])
    assert words in sentence
    assert sentence.startswith(f"UNet, step {broken['step']}")
