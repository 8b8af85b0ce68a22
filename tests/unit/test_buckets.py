"""Trained sizes: the lists as published, and which of them is nearest."""

import pytest
from comfy_accel.accel.sizing.buckets import FAMILIES, TRAINED, nearest_trained
from comfy_accel.accel.sizing.resolution import MODES, PIXELS_PER_MEGAPIXEL, Size, aspect_error
from hypothesis import given
from hypothesis import strategies as st

asked_sizes = st.builds(Size, st.integers(16, 8192), st.integers(16, 8192))
families = st.sampled_from(FAMILIES)


@pytest.mark.parametrize(
    ("family", "asked", "size"),
    [
        ("SDXL", (1920, 1080), (1344, 768)),
        ("SDXL", (512, 512), (1024, 1024)),
        ("SDXL", (720, 960), (896, 1152)),
        ("SDXL", (1344, 704), (1344, 704)),
        ("SDXL", (704, 1344), (704, 1408)),
        ("SD1.5", (1024, 1024), (512, 512)),
        ("SD1.5", (1000, 1500), (512, 768)),
        ("Flux", (1024, 1536), (832, 1248)),
        ("Qwen-Image", (1920, 1080), (1664, 928)),
    ],
)
def test_the_nearest_aspect_is_taken_and_of_equals_the_nearest_area(family, asked, size):
    assert nearest_trained(TRAINED[family], Size(*asked)) == Size(*size)


@given(families, asked_sizes, st.sampled_from(MODES))
def test_nearest_trained_is_in_the_list_and_idempotent(family, asked, mode):
    sizes = TRAINED[family]
    found = nearest_trained(sizes, asked, mode)
    assert found in sizes and nearest_trained(sizes, found, mode) == found
    if mode == "nearest":
        assert all(aspect_error(found, asked) <= aspect_error(size, asked) for size in sizes)
    elif any(size.width >= asked.width and size.height >= asked.height for size in sizes) and mode == "up":
        assert found.width >= asked.width and found.height >= asked.height


@given(families, asked_sizes, st.sampled_from(MODES), st.floats(0.45, 4.0))
def test_the_budget_is_kept_or_refused_with_the_smallest_size(family, asked, mode, megapixels):
    sizes = TRAINED[family]
    least = min(sizes, key=lambda size: size.pixels)
    try:
        found = nearest_trained(sizes, asked, mode, megapixels)
    except ValueError as error:
        assert least.pixels > megapixels * PIXELS_PER_MEGAPIXEL
        assert f"the smallest size is {least}" in str(error)
        enough = float(str(error).split("at least ")[1].split(":")[0])
        assert nearest_trained(sizes, asked, mode, enough).pixels == least.pixels
    else:
        assert found.pixels <= megapixels * PIXELS_PER_MEGAPIXEL
