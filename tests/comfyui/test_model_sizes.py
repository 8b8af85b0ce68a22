"""What real models of core say about their sizes, and Resolution Snap with one of them connected."""

from types import SimpleNamespace

import pytest
from comfy_accel.accel.hosts.comfyui.sizes.model_sizes import latent_layout, model_multiple
from comfy_accel.accel.sizing.resolution import Size
from kit import tiny_models
from kit.families import DITS


@pytest.mark.parametrize(("levels", "multiple"), [(2, 16), (3, 32), (4, 64)])
def test_a_unet_needs_8_times_2_for_each_downsampling(levels, multiple):
    ones = [1] * levels
    model = tiny_models.unet(
        num_res_blocks=ones, channel_mult=ones, transformer_depth=ones, transformer_depth_output=ones * 2
    )
    assert model_multiple(model) == multiple
    assert latent_layout(model).shape(Size(256, 128), 2) == (2, 4, 16, 32)


@pytest.mark.parametrize(
    ("name", "multiple", "shape"),
    [
        ("Flux", 16, (2, 16, 16, 32)),
        ("SD3", 16, (2, 16, 16, 32)),
        ("Wan", 16, (2, 16, 1, 16, 32)),
        ("LTXV", 32, (2, 128, 1, 4, 8)),
    ],
)
def test_a_transformer_needs_its_patch_times_the_latent_scale(name, multiple, shape):
    model = DITS[name].load()
    assert model_multiple(model) == multiple
    assert latent_layout(model).shape(Size(256, 128), 2) == shape


def test_the_node_asks_the_connected_model(tiny_unet):
    from comfy_accel.nodes.resolution import AccelResolutionSnap

    width, height, latent, *_ = AccelResolutionSnap.execute(728, 960, batch_size=3, model=tiny_unet).result
    assert (width, height) == (736, 960)
    assert latent["samples"].shape == (3, 4, 120, 92)
    assert AccelResolutionSnap.execute(728, 960).result[:2] == (704, 960)


def test_a_linked_size_out_of_range_is_refused_with_the_range():
    from comfy_accel.nodes.resolution import AccelResolutionSnap

    with pytest.raises(ValueError, match="width is 0; it must be from 16 to 16384 pixels"):
        AccelResolutionSnap.execute(0, 960)


class Model:
    """What `model_sizes` asks of a ModelPatcher."""

    def __init__(self, network, latent_format):
        self.objects = {"diffusion_model": network, "latent_format": latent_format}

    def get_model_object(self, name):
        return self.objects[name]


def latent_format(name="SD15", channels=4, dimensions=2, **more):
    return type(name, (), {"latent_channels": channels, "latent_dimensions": dimensions, **more})()


@pytest.mark.parametrize(
    ("network", "form", "multiple", "shape"),
    [
        (SimpleNamespace(patch_size=1), latent_format("Flux2", 128), 16, (1, 128, 32, 16)),
        (SimpleNamespace(patch_size=1), latent_format("New", 8, spacial_downscale_ratio=32), 32, (1, 8, 16, 8)),
        (SimpleNamespace(patch_spatial=2), latent_format("Cosmos1CV8x8x8", 16, 3), 16, (1, 16, 1, 64, 32)),
        (SimpleNamespace(), latent_format("Unheard", 4), 64, (1, 4, 64, 32)),
    ],
)
def test_a_model_tells_its_multiple_and_latent(network, form, multiple, shape):
    model = Model(network, form)
    assert model_multiple(model) == multiple
    assert latent_layout(model).shape(Size(256, 512), 1) == shape


@pytest.mark.parametrize("form", [latent_format("StableAudio1", 64, 1), latent_format("SC_Prior", 16)])
def test_latents_that_are_no_images_are_refused(form):
    with pytest.raises(ValueError, match="no width and height"):
        latent_layout(Model(SimpleNamespace(), form))
