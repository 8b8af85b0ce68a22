"""When a VAE is compiled: repeats, memory, and what is given back. Numbers alone."""

import pytest
from comfy_accel.accel.sizing.vae import (
    AUTO,
    COMPILE_BOTH,
    COMPILE_DECODER,
    POLICIES,
    SKIP,
    Repeats,
    VaePolicy,
    gives_back,
    one_tile,
)

SMALL, LARGE = (1, 4, 8, 8), (1, 4, 16, 16)


@pytest.mark.parametrize(
    ("compiled", "calls"),
    [
        (SKIP, []),
        (AUTO, ["decode", "decode_tiled"]),
        (COMPILE_DECODER, ["decode", "decode_tiled"]),
        (COMPILE_BOTH, ["decode", "decode_tiled", "encode", "encode_tiled"]),
    ],
)
def test_policy_compiles_its_calls_alone(compiled, calls):
    policy = VaePolicy(compiled)
    assert [name for name in ("decode", "decode_tiled", "encode", "encode_tiled") if policy.compiles(name)] == calls


def test_wrong_settings_are_refused_with_what_is_valid():
    with pytest.raises(ValueError, match=", ".join(POLICIES)):
        VaePolicy("perhaps")
    with pytest.raises(ValueError, match="1 or more"):
        VaePolicy(AUTO, after=0)


def test_shape_is_often_enough_after_as_many_equal_ones():
    repeats = Repeats(after=2)
    assert [repeats.count(SMALL) for _ in range(4)] == [False, False, True, True]


def test_shape_not_seen_for_long_is_forgotten():
    repeats = Repeats(after=1)
    repeats.count(SMALL)
    for side in range(1000, 1300):
        repeats.count((1, 4, side, side))
    assert not repeats.count(SMALL)


def test_size_at_which_memory_was_short_and_larger_ones_stay_as_they_are():
    repeats = Repeats(after=1)
    for shape in (SMALL, LARGE):
        repeats.count(shape)
    repeats.was_short(LARGE)
    assert not repeats.count(LARGE)
    assert not repeats.count(LARGE)
    assert repeats.count(SMALL)
    repeats.was_short((1, 4, 32, 32))
    assert not repeats.count(LARGE)


@pytest.mark.parametrize(
    ("before", "now", "reserved", "allocated", "needed", "expected"),
    [
        (LARGE, SMALL, 1000, 100, 899, True),
        (LARGE, SMALL, 1000, 100, 900, False),  # what is kept is what is needed
        (SMALL, LARGE, 1000, 1000, 0.5, False),  # nothing is kept beside what is used
        (SMALL, SMALL, 1000, 0, 1, False),
        (None, SMALL, 1000, 0, 1, False),
        (LARGE, SMALL, 1000, 0, None, False),
    ],
)
def test_kept_memory_is_given_back_at_a_new_size_that_needs_less(before, now, reserved, allocated, needed, expected):
    assert gives_back(before, now, reserved, allocated, needed) is expected


@pytest.mark.parametrize(
    ("shape", "tiles", "expected"),
    [
        ((1, 4, 100, 200), {}, (1, 4, 100, 200)),
        ((1, 4, 100, 200), {"tile_x": 64, "tile_y": 48}, (1, 4, 48, 64)),
        ((1, 4, 100, 200), {"tile_x": 300, "tile_t": 2}, (1, 4, 100, 200)),
        ((1, 16, 9, 100, 200), {"tile_x": 64, "tile_y": 64, "tile_t": 4}, (1, 16, 4, 64, 64)),
        ((1, 64, 5000), {"tile_x": 128, "tile_y": 128}, (1, 64, 128)),
    ],
)
def test_tile_bounds_what_is_worked_on_at_a_time(shape, tiles, expected):
    assert one_tile(shape, **tiles) == expected
