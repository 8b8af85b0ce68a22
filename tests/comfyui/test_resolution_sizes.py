"""Which size Resolution Snap chooses: trained ones, and the one it was given where that is right."""

import pytest
from comfy_accel.accel.hosts.comfyui.sizes.model_sizes import LatentLayout, trained_family
from comfy_accel.accel.hosts.comfyui.sizes.snapping import MULTIPLES, Rule, choose
from comfy_accel.accel.sizing.buckets import TRAINED
from comfy_accel.accel.sizing.fit import fit
from comfy_accel.accel.sizing.resolution import Size
from kit import tiny_models
from kit.families import DITS


@pytest.fixture(scope="module")
def unet():
    """Two levels, so that its multiple is 16."""
    return tiny_models.unet(
        num_res_blocks=[1, 1], channel_mult=[1, 1], transformer_depth=[0, 0], transformer_depth_output=[0] * 4
    )


def chosen(asked, model=None, **rule):
    """(width, height), note"""
    choice = choose(Size(*asked), Rule(**rule), model, LatentLayout())
    return (choice.size.width, choice.size.height), choice.note


@pytest.mark.parametrize(
    ("trained_for", "asked", "size"),
    [
        ("from model", (512, 512), (1024, 1024)),
        ("SD1.5", (1024, 1536), (512, 768)),
        ("Flux", (1024, 1536), (832, 1248)),
    ],
)
def test_trained_sizes_without_a_model_are_sdxls_or_the_chosen_ones(trained_for, asked, size):
    family = "SDXL" if trained_for == "from model" else trained_for
    note = f"a size that {family} was trained at"
    assert chosen(asked, multiple="trained sizes", trained_for=trained_for) == (size, note)


def test_trained_sizes_are_those_of_the_connected_model(unet):
    families = {name: trained_family(dit.load()) for name, dit in DITS.items()}
    known = {name: family for name, family in families.items() if family}
    assert known == {"Flux": "Flux", "Qwen-Image": "Qwen-Image"}
    note = "a size that SD1.5 was trained at"
    assert chosen((900, 900), unet, multiple="trained sizes") == ((512, 512), note)
    assert chosen((900, 900), unet, multiple="trained sizes", trained_for="SDXL")[0] == (1024, 1024)


def test_where_no_trained_sizes_are_known_the_models_multiple_is_taken():
    note = "no trained sizes are known for WAN21_T2V, so a multiple of 16"
    assert chosen((100, 100), DITS["Wan"].load(), multiple="trained sizes") == ((96, 96), note)


def test_a_padded_picture_is_never_given_a_smaller_size():
    assert chosen((720, 960), multiple="64", mode="down", pads=True)[0] == (768, 960)
    assert fit(Size(720, 960), Size(768, 960), "pad edge").scaled == Size(720, 960)


def test_flux_sizes_are_those_of_cores_kontext_node():
    import comfy_extras.nodes_flux as core

    listed = getattr(core, "PREFERRED_KONTEXT_RESOLUTIONS", None) or core.PREFERED_KONTEXT_RESOLUTIONS
    assert {(size.width, size.height) for size in TRAINED["Flux"]} == set(listed)


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_a_size_that_is_right_is_left_alone(multiple, unet):
    assert chosen((512, 768), unet, multiple=multiple)[0] == (512, 768)  # of every list for SD1.5
