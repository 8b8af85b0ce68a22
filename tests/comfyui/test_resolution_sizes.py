"""Which size Resolution Snap chooses: trained ones, compiled ones, and the one it was given where that is right."""

import comfy.latent_formats
import pytest
import tiny_models
import torch
from comfy_accel.accel.cache.compiled_sizes import Compiled, compiled_for
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.sizes.model_sizes import LatentLayout, trained_family
from comfy_accel.accel.hosts.comfyui.sizes.snapping import MULTIPLES, Rule, choose
from comfy_accel.accel.sizing.buckets import TRAINED
from comfy_accel.accel.sizing.fit import fit
from comfy_accel.accel.sizing.resolution import Size
from tiny_dits import DITS

import bench.tiny_models


@pytest.fixture(scope="module")
def unet():
    """Two levels, so that its multiple is 16."""
    return tiny_models.unet(
        num_res_blocks=[1, 1], channel_mult=[1, 1], transformer_depth=[0, 0], transformer_depth_output=[0] * 4
    )


def chosen(asked, model=None, cache=None, batch=1, **rule):
    """(width, height), note"""
    choice = choose(Size(*asked), Rule(**rule), model, LatentLayout(), batch, cache or GraphCache())
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


def test_already_compiled_takes_the_nearest_shape_that_the_cache_holds(unet):
    cache = GraphCache()
    fast = accelerate(unet, CompileSettings(backend="eager", any_size=False), cache)

    def compiled(model=fast, batch=1, **rule):
        return chosen((104, 120), model, cache, batch, multiple="already compiled", **rule)

    nothing = ((112, 128), "nothing is compiled yet for a batch of 1, so a multiple of 16")
    assert compiled() == nothing
    for width, height in ((104, 136), (192, 192)):
        tiny_models.sample(fast, width, height, steps=1)
    before = cache.statistics()["compilations"]
    assert compiled() == ((104, 136), "a size that is compiled already")
    tiny_models.sample(fast, 104, 136, steps=1)
    assert cache.statistics()["compilations"] == before
    assert compiled(model=None)[0] == (104, 136)  # of the model that ran last
    assert compiled(max_megapixels=104 * 130 / 2**20)[1].startswith("nothing is compiled yet")
    assert compiled(batch=2)[1].startswith("nothing is compiled yet for a batch of 2")
    cache.clear()
    assert compiled() == nothing


def test_already_compiled_leaves_the_size_alone_where_every_size_is(unet):
    cache = GraphCache()
    fast = accelerate(unet, CompileSettings(backend="eager"), cache)
    tiny_models.sample(fast, 96, 96, steps=1)
    note = "every size is compiled, so a multiple of 16"
    assert chosen((104, 120), fast, cache, multiple="already compiled") == ((112, 128), note)


def test_already_compiled_is_in_the_pixels_and_of_the_frames_of_the_model_that_ran():
    cache, ltxv = GraphCache(), DITS["LTXV"]
    fast = accelerate(ltxv.load(), CompileSettings(backend="eager", any_size=False), cache)
    conds = {"positive": ltxv.conditioning(1), "negative": ltxv.conditioning(2)}
    for frames, side in ((1, 4), (2, 6)):
        bench.tiny_models.sample(fast, torch.zeros(1, 16, frames, side, side), steps=1, **conds)

    def compiled(**others):
        return choose(Size(192, 192), Rule("already compiled"), None, LatentLayout(), 1, cache, **others).size

    assert compiled() == Size(128, 128)  # 4 × 32 pixels; 6 × 32 was for two frames
    assert compiled(frames=2) == Size(192, 192)


def test_what_is_no_picture_is_never_a_compiled_size(unet):
    class Sound(comfy.latent_formats.SD15):
        latent_dimensions = 1

    cache = GraphCache()
    sound = unet.clone()
    sound.add_object_patch("latent_format", Sound())
    fast = accelerate(sound, CompileSettings(backend="eager", any_size=False), cache)
    tiny_models.sample(fast, 64, 64, steps=1)
    assert cache.statistics()["compilations"] and compiled_for(cache) == Compiled()
    tiny_models.sample(accelerate(unet, CompileSettings(backend="eager", any_size=False), cache), 64, 64, steps=1)
    assert compiled_for(cache) == Compiled(((1, 4, 8, 8),))


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_a_size_that_is_right_is_left_alone(multiple, unet):
    assert chosen((512, 768), unet, multiple=multiple)[0] == (512, 768)  # of every list for SD1.5
