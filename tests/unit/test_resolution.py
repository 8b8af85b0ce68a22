"""Size arithmetic: examples that can be checked by hand, and properties over all sizes."""

import pytest
from comfy_accel.accel.sizing.resolution import Size, change, snap
from hypothesis import given
from hypothesis import strategies as st

sides = st.integers(1, 8192)
multiples = st.sampled_from([1, 8, 16, 24, 32, 64, 128])


@pytest.mark.parametrize(
    ("asked", "multiple", "snapped", "said"),
    [
        ((720, 960), 64, (704, 960), "720×960 → 704×960, 2.2 % narrower"),
        ((720, 960), 32, (736, 960), "720×960 → 736×960, 2.2 % wider"),
        ((720, 960), 8, (720, 960), "720×960, as asked"),
        ((96, 95), 64, (128, 64), "96×95 → 128×64, 33.3 % wider and 32.6 % shorter"),
        ((100, 150), 64, (128, 128), "100×150 → 128×128, 28.0 % wider and 14.7 % shorter"),
        ((1, 1), 64, (64, 64), "1×1 → 64×64, 6300.0 % wider and 6300.0 % taller"),
    ],
)
def test_each_side_is_rounded_by_itself_and_the_change_is_said(asked, multiple, snapped, said):
    assert snap(Size(*asked), multiple) == Size(*snapped)
    assert change(Size(*asked), Size(*snapped)) == said


@given(sides, sides, multiples)
def test_a_side_moves_no_further_than_half_a_multiple_and_stays_where_it_is_right(width, height, multiple):
    size = snap(Size(width, height), multiple)
    assert snap(size, multiple) == size
    for asked, snapped in ((width, size.width), (height, size.height)):
        assert snapped % multiple == 0 and snapped >= multiple
        assert abs(snapped - asked) <= multiple / 2 or asked < snapped == multiple
    assert snap(Size(height, width), multiple) == Size(size.height, size.width)


def test_latent_and_multiple_come_from_the_scale():
    assert Size(704, 960).latent(8) == (120, 88)
    assert Size(704, 960).latent(16) == (60, 44)
