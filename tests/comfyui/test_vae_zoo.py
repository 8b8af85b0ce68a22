"""VAE Skip Compile on the VAE classes of core: whatever is compiled of one, its results are the plain VAE's."""

import inspect

import comfy.ldm.wan.vae
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.vae import _shape, vae_view
from comfy_accel.accel.sizing.vae import COMPILE_BOTH, VaePolicy
from kit import tiny_vaes
from kit.thorough import thorough_except

ZOO = {**tiny_vaes.IMAGE, **tiny_vaes.VIDEO}

KEEPS_FRAMES = "feat_map = None" not in inspect.getsource(comfy.ldm.wan.vae.WanVAE.decode)
"""Whether this core gives the blocks of Wan's VAE a list, to which they write their last frames, for an image too."""

IN_FULL = ("sd15", "wan")
"""Tested in every way at each change; of the others, that they decode."""

LIKE_OTHERS = {"svd", "cosmos", "hunyuan_video_15", "ltx"}
"""Their blocks have classes of their own, and are called as those of SD1.5's, Wan's and HunyuanVideo's are."""

every_vae = pytest.mark.parametrize("name", thorough_except(ZOO, *ZOO.keys() - LIKE_OTHERS), indirect=True)


@pytest.fixture(scope="module", params=thorough_except(ZOO, *IN_FULL))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def vae(name):
    return ZOO[name]()


@pytest.fixture(scope="module")
def cache():
    return GraphCache()


@pytest.fixture(scope="module")
def views(vae, cache):
    return vae_view(vae, VaePolicy()), vae_view(vae, VaePolicy(COMPILE_BOTH), CompileSettings(backend="eager"), cache)


def side(vae, pixels):
    return pixels * vae.spacial_compression_encode()


def same(views, vae, call):
    skipped, compiled = views
    expected = call(vae)
    assert expected.isfinite().all()
    assert torch.equal(call(skipped), expected)
    # A graph gets dense inputs, and core's kernels round otherwise where a block is given a slice of something.
    assert (call(compiled) - expected).abs().max() <= 1e-5 * expected.abs().max()


@every_vae
@torch.inference_mode()
def test_decode_of_one_size(vae, views):
    given = tiny_vaes.latent(vae, 4, 5)
    same(views, vae, lambda v: v.decode(given))


@torch.inference_mode()
def test_decode_of_sizes_batches_and_frames(name, vae, views, cache):
    if vae.latent_dim == 3:
        asked = [(5, 4, 1, 1), (4, 5, 1, 3), *[(4, 4, 2, 2)] * (name != "ltx")]
    else:
        asked = [(6, 5, 1, 1), (5, 8, 1, 1), (4, 4, 3, 1)]
    for height, width, batch, frames in asked:
        given = tiny_vaes.latent(vae, height, width, batch, frames)
        same(views, vae, lambda v, given=given: v.decode(given))
    assert all("forward" not in part.__dict__ for part in vae.first_stage_model.modules())


@torch.inference_mode()
def test_encode_of_images_and_frames(vae, views):
    for height, width, images in [(2, 3, 1), (4, 2, 9 if vae.latent_dim == 3 else 2)]:
        pixels = torch.rand(images, side(vae, height), side(vae, width), 3)
        same(views, vae, lambda v, pixels=pixels: v.encode(pixels))


@torch.inference_mode()
def test_tiles(vae, views):
    tile = {"tile_x": 6, "tile_y": 6, "overlap": 2}
    if vae.latent_dim == 3:
        tile |= {"tile_t": 2, "overlap_t": 1}
    given = tiny_vaes.latent(vae, 9, 7, frames=3)
    same(views, vae, lambda v: v.decode_tiled(given, **tile))
    if vae.latent_dim == 2:
        pixels = torch.rand(1, side(vae, 9), side(vae, 7), 3)
        tile = {"tile_x": side(vae, 8), "tile_y": side(vae, 8), "overlap": side(vae, 1)}
        same(views, vae, lambda v: v.encode_tiled(pixels, **tile))


@torch.inference_mode()
def test_tiles_after_running_out_of_memory(vae, views, out_of_memory_once):
    convolution = next(part for part in _decoder(vae).modules() if isinstance(part, (torch.nn.Conv2d, torch.nn.Conv3d)))
    given = tiny_vaes.latent(vae, 4, 5, frames=2)

    def tiled(view):
        with out_of_memory_once(convolution):
            return view.decode(given)

    same(views, vae, tiled)


@torch.inference_mode()
def test_shape_that_is_estimated_is_the_one_that_core_estimates(vae, monkeypatch):
    asked, view = [], vae_view(vae, VaePolicy())
    for call in ("memory_used_decode", "memory_used_encode"):
        estimate = getattr(view, call)

        def recording(shape, dtype, estimate=estimate):
            asked.append(tuple(shape))
            return estimate(shape, dtype)

        monkeypatch.setattr(view, call, recording)
    given = tiny_vaes.latent(vae, 4, 5, frames=1)
    pixels = torch.rand(1, side(vae, 2), side(vae, 3), 3)
    view.decode(given)
    view.encode(pixels)
    assert asked == [_shape(view, "decode", (given,), {}), _shape(view, "encode", (pixels,), {})]


def _decoder(vae):
    model = vae.first_stage_model
    return model.taesd_decoder if hasattr(model, "taesd_decoder") else model.decoder


@torch.inference_mode()
def test_what_is_compiled_is_what_can_be(name, vae, cache):
    view = vae_view(vae, VaePolicy(COMPILE_BOTH), CompileSettings(backend="eager"), cache)
    before = cache.statistics()["hits"]
    view.decode(tiny_vaes.latent(vae, 4, 4))
    ran = cache.statistics()["hits"] > before
    reasons = [row["reason"] for row in fallbacks.rows()]
    if name == "wan" and KEEPS_FRAMES:
        assert not ran and reasons and all("change a list" in reason or "Unsupported" in reason for reason in reasons)
    elif ran:
        assert reasons == []
        made = cache.statistics()["compilations"]
        view.decode(tiny_vaes.latent(vae, 6, 5))
        assert cache.statistics()["compilations"] == made
    else:  # a block that asks which thread it runs on: torch cannot trace that
        assert name == "ltx" and all("Unsupported" in reason for reason in reasons) and reasons
