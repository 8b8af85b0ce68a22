"""Size arithmetic: examples that can be checked by hand, and properties over all sizes."""

import pytest
from comfy_accel.accel.sizing.resolution import (
    MODES,
    PIXELS_PER_MEGAPIXEL,
    Size,
    aspect_error,
    budget_pixels,
    safe_multiple,
    snap,
)
from hypothesis import assume, example, given
from hypothesis import strategies as st

sides = st.integers(1, 8192)
multiples = st.sampled_from([1, 8, 16, 24, 32, 64, 128])
modes = st.sampled_from(MODES)
budgets = st.one_of(st.just(0.0), st.floats(0.016, 70.0))  # 0.016 holds 128 × 128


@pytest.mark.parametrize(
    ("asked", "multiple", "mode", "snapped"),
    [
        ((720, 960), 64, "nearest", (704, 960)),
        ((720, 960), 64, "up", (768, 960)),
        ((720, 960), 64, "down", (704, 960)),
        ((720, 960), 8, "nearest", (720, 960)),
        ((160, 240), 32, "nearest", (160, 256)),
        ((96, 95), 64, "nearest", (128, 64)),
        ((16, 1000), 64, "down", (64, 960)),
        ((1, 1), 64, "nearest", (64, 64)),
    ],
)
def test_each_side_rounds_by_itself(asked, multiple, mode, snapped):
    assert snap(*asked, multiple, mode) == Size(*snapped)


@pytest.mark.parametrize(
    ("asked", "mode", "snapped"),
    [
        ((720, 960), "nearest", (768, 1024)),
        ((720, 960), "up", (768, 1024)),
        ((720, 960), "down", (704, 960)),
        ((1000, 1000), "nearest", (1024, 1024)),
        ((960, 540), "nearest", (1024, 576)),
    ],
)
def test_keep_aspect_takes_the_pair_of_nearest_aspect(asked, mode, snapped):
    assert snap(*asked, 64, mode, keep_aspect=True) == Size(*snapped)


@pytest.mark.parametrize(
    ("asked", "megapixels", "snapped"),
    [
        ((4000, 4000), 1.0, (1024, 1024)),
        ((1024, 1024), 1.0, (1024, 1024)),
        ((2048, 1024), 0.5, (1024, 512)),
        ((1000, 1000), 0.95, (960, 1024)),
        ((8192, 16), 0.016, (256, 64)),
    ],
)
def test_a_budget_shrinks_with_the_aspect_kept(asked, megapixels, snapped):
    assert snap(*asked, 64, max_megapixels=megapixels) == Size(*snapped)
    assert snap(*asked, 64, "up", max_megapixels=megapixels).pixels <= megapixels * PIXELS_PER_MEGAPIXEL


@given(sides, sides, multiples, modes, st.booleans(), budgets)
@example(10, 1000, 64, "up", False, 0.016)
@example(8192, 1, 128, "nearest", True, 0.016)
def test_snapping_is_idempotent_and_keeps_its_limits(width, height, multiple, mode, keep_aspect, megapixels):
    size = snap(width, height, multiple, mode, keep_aspect, megapixels)
    assert snap(size.width, size.height, multiple, mode, keep_aspect, megapixels) == size
    assert size.width % multiple == 0 and size.height % multiple == 0
    assert size.width >= multiple and size.height >= multiple
    limit = budget_pixels(megapixels)
    assert limit is None or size.pixels <= limit


@given(sides, sides, multiples, modes)
def test_without_budget_or_aspect_a_side_moves_less_than_one_multiple(width, height, multiple, mode):
    size = snap(width, height, multiple, mode)
    for asked, snapped in ((width, size.width), (height, size.height)):
        assert abs(snapped - asked) < multiple
        if mode == "nearest" and asked >= multiple:
            assert abs(snapped - asked) <= multiple / 2
        if mode == "up":
            assert snapped >= asked
        if mode == "down" and asked >= multiple:
            assert snapped <= asked


@given(st.integers(1, 64), st.integers(1, 64), multiples, modes, st.booleans())
def test_an_exact_size_is_untouched(columns, rows, multiple, mode, keep_aspect):
    width, height = columns * multiple, rows * multiple
    assert snap(width, height, multiple, mode, keep_aspect) == Size(width, height)
    exactly = width * height / PIXELS_PER_MEGAPIXEL
    assume(budget_pixels(exactly) >= multiple * multiple)
    assert snap(width, height, multiple, mode, keep_aspect, exactly).pixels == width * height


@given(sides, sides, multiples, modes)
def test_keep_aspect_is_never_further_from_the_aspect_than_rounding_each_side(width, height, multiple, mode):
    def error(size):
        a, b = size.width * height, size.height * width
        return max(a, b) / min(a, b)

    kept = snap(width, height, multiple, mode, keep_aspect=True)
    assert error(kept) <= error(snap(width, height, multiple, mode))
    for asked, snapped in ((width, kept.width), (height, kept.height)):
        assert abs(snapped - asked) < 2 * multiple


@given(st.integers(64, 8192), st.integers(64, 8192), st.sampled_from([8, 16, 32, 64]))
def test_the_aspect_errs_by_half_a_multiple_of_each_side_at_most(width, height, multiple):
    size = snap(width, height, multiple)
    error = aspect_error(size, Size(width, height))
    half = multiple / 2
    assume(min(width, height) > half)
    bounds = ((width + half) / (height - half), width / height), ((height + half) / (width - half), height / width)
    assert error <= max(worst / asked for worst, asked in bounds) + 1e-9


@given(st.integers(64, 8192), st.integers(64, 8192), st.sampled_from([8, 16, 32, 64]))
def test_keep_aspect_errs_by_half_a_multiple_of_the_shorter_side_at_most(width, height, multiple):
    kept = snap(width, height, multiple, keep_aspect=True)
    error = max(kept.width * height, kept.height * width) / min(kept.width * height, kept.height * width)
    shorter = min(width, height)
    # Within half a multiple of the short side that the long side's multiple calls for, itself up to half one short.
    assume(shorter > 1.5 * multiple)
    assert error <= (shorter - multiple / 2) / (shorter - multiple) + 1e-9


@given(sides, sides, multiples, modes, st.booleans(), budgets)
def test_changing_places_of_width_and_height_changes_the_answer_alike(
    width, height, multiple, mode, keep_aspect, megapixels
):
    one = snap(width, height, multiple, mode, keep_aspect, megapixels)
    other = snap(height, width, multiple, mode, keep_aspect, megapixels)
    if width != height:
        assert (one.width, one.height) == (other.height, other.width)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 64, 8), "width is 0; it must be 1 or more"),
        ((64, -8, 8), "height is -8; it must be 1 or more"),
        ((64, 64, 0), "multiple is 0; it must be 1 or more"),
        ((64, 64, 8, "sideways"), "nearest, up, down"),
        ((64, 64, 8, "up", False, -1.0), "max_megapixels is -1.0; it must be 0"),
        ((64, 64, 64, "up", False, 0.001), "at least 0.004: the smallest size is 64×64"),
    ],
)
def test_wrong_arguments_are_refused_with_the_valid_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        snap(*arguments)


def test_latent_and_multiple_come_from_the_scale():
    assert Size(704, 960).latent(8) == (120, 88)
    assert Size(704, 960).latent(16) == (60, 44)
    assert safe_multiple(8, downsamplings=3) == 64
    assert safe_multiple(8, patch=2) == 16
