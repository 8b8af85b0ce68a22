"""A picture fitted to another size and back: exact sizes, and every pixel where padding is all that is done."""

import pytest

torch = pytest.importorskip("torch")

from comfy_accel.accel.sizing.fit import ANCHORS, HOW, fit  # noqa: E402
from comfy_accel.accel.sizing.resize import apply_fit, undo_fit  # noqa: E402
from comfy_accel.accel.sizing.resolution import MODES, Size, snap  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

sides = st.integers(1, 300)
hows = st.sampled_from(HOW)
pads = st.sampled_from([how for how in HOW if how.startswith("pad")])
anchors = st.sampled_from(ANCHORS)
multiples = st.sampled_from([8, 16, 32, 64])


def resample(picture, width, height):
    return torch.nn.functional.interpolate(picture, (height, width), mode="bilinear")


def numbered(size, channels=1):
    """A picture in which no two pixels are equal."""
    return torch.arange(float(channels * size.pixels)).reshape(1, channels, size.height, size.width)


def shape(size):
    return size.height, size.width


@given(sides, sides, multiples, pads, anchors, st.booleans())
def test_restoring_what_was_padded_gives_every_pixel_back(width, height, multiple, how, anchor, keep_aspect):
    asked = Size(width, height)
    plan = fit(asked, snap(width, height, multiple, "up", keep_aspect), how, anchor, multiple=multiple)
    picture = numbered(asked, 2)
    padded = apply_fit(picture, plan, lambda *_: pytest.fail("resized"))
    assert padded.shape[-2:] == shape(plan.snapped)
    assert torch.equal(undo_fit(padded, plan, lambda *_: pytest.fail("resized")), picture)


@settings(max_examples=200)
@given(sides, sides, multiples, st.sampled_from(MODES), hows, anchors, st.sampled_from([0.0, 0.02, 0.05]))
def test_any_fit_ends_at_the_snapped_size_and_comes_back_to_the_asked_one(
    width, height, multiple, mode, how, anchor, megapixels
):
    asked, picture = Size(width, height), numbered(Size(width, height))
    plan = fit(asked, snap(width, height, multiple, mode, False, megapixels), how, anchor, multiple=multiple)
    there = apply_fit(picture, plan, resample)
    assert there.shape[-2:] == shape(plan.snapped)
    assert undo_fit(there, plan, resample).shape[-2:] == (height, width)
    twice = torch.nn.functional.interpolate(there, scale_factor=2)
    assert undo_fit(twice, plan, resample).shape[-2:] == (height, width)
    if plan.is_identity:
        assert there is picture


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([8, 16]), multiples, hows, anchors)
def test_over_a_unit_everything_is_a_multiple_of_it(columns, rows, unit, multiple, how, anchor):
    asked = Size(columns * unit, rows * unit)
    plan = fit(asked, snap(asked.width, asked.height, max(unit, multiple)), how, anchor, unit, multiple)
    numbers = (plan.left, plan.top, plan.scaled.width, plan.scaled.height)
    assert all(number % unit == 0 for number in numbers)
    latents = apply_fit(numbered(Size(columns, rows)), plan.over(unit), resample)
    assert latents.shape[-2:] == plan.snapped.latent(unit)


def test_the_border_is_the_edge_its_mirror_image_or_one_value():
    row = torch.tensor([[[1.0, 2.0, 3.0]]])
    rows = {
        how: apply_fit(row, fit(Size(3, 1), Size(8, 1), how, "left"), resample, fill=9.0).flatten().tolist()
        for how in HOW
        if how.startswith("pad")
    }
    assert rows == {
        "pad edge": [1, 2, 3, 3, 3, 3, 3, 3],
        "pad reflect": [1, 2, 3, 2, 1, 2, 3, 2],
        "pad constant": [1, 2, 3, 9, 9, 9, 9, 9],
    }
    one = apply_fit(torch.tensor([[[7.0]]]), fit(Size(1, 1), Size(4, 1), "pad reflect"), resample)
    assert one.flatten().tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize(
    ("anchor", "kept"), [("left", [0, 1, 2]), ("center", [1, 2, 3]), ("right", [2, 3, 4]), ("bottom right", [2, 3, 4])]
)
def test_a_crop_keeps_the_anchored_part(anchor, kept):
    plan = fit(Size(5, 1), Size(3, 1), "crop", anchor, multiple=8)
    assert apply_fit(torch.arange(5.0).reshape(1, 1, 5), plan, resample).flatten().tolist() == kept


def test_a_crop_resizes_only_what_would_lose_a_multiple_or_is_too_short():
    assert fit(Size(720, 960), Size(704, 960), "crop", multiple=64).scaled == Size(720, 960)
    assert fit(Size(3000, 2000), Size(1216, 832), "crop", multiple=64).scaled == Size(1248, 832)
    assert fit(Size(720, 960), Size(768, 960), "crop", multiple=64).scaled == Size(768, 1024)


def test_padding_never_enlarges_and_shrinks_only_what_is_too_large():
    assert fit(Size(720, 960), Size(768, 1024), "pad edge").scaled == Size(720, 960)
    assert fit(Size(3000, 2000), Size(1216, 832), "pad edge").scaled == Size(1216, 811)


@pytest.mark.parametrize(
    ("asked", "snapped", "how", "said"),
    [
        ((720, 960), (704, 960), "resize", "720×960 → 704×960, 2.2 % narrower"),
        ((720, 960), (768, 1024), "resize", "720×960 → 768×1024, 6.7 % wider and 6.7 % taller"),
        ((720, 960), (720, 960), "crop", "720×960, as asked"),
        ((720, 960), (704, 960), "crop", "720×960 → 704×960, 16 px cut from the width"),
        ((720, 960), (768, 960), "pad edge", "720×960 → 768×960, 48 px added to the width"),
        (
            (3000, 2000),
            (1216, 832),
            "pad edge",
            "3000×2000 → 1216×832, resized to 1216×811 and 21 px added to the height",
        ),
    ],
)
def test_the_summary_says_what_happens(asked, snapped, how, said):
    assert fit(Size(*asked), Size(*snapped), how, multiple=64).summary() == said


def test_an_unknown_way_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="how is 'pad'; it must be one of: resize, pad edge"):
        fit(Size(8, 8), Size(16, 16), "pad")
    with pytest.raises(ValueError, match="anchor is 'middle'; it must be one of: center"):
        fit(Size(8, 8), Size(16, 16), "crop", "middle")
