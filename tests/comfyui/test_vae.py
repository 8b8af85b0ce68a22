"""VAE Skip Compile on core's own VAE, full size with random weights."""

import comfy.sd
import pytest
import safetensors.torch
import torch
from comfy_accel.accel.block_runner import CompileSettings
from comfy_accel.accel.fallbacks import fallbacks
from comfy_accel.accel.graph_cache import GraphCache
from comfy_accel.accel.hosts.comfyui.vae import compile_decoder, skip_compile
from torch._dynamo.utils import counters

from bench import synthetic

PREFIX = "first_stage_model."


@pytest.fixture(scope="module")
def vae():
    weights = safetensors.torch.load_file(synthetic.checkpoint())
    return comfy.sd.VAE(sd={k.removeprefix(PREFIX): v for k, v in weights.items() if k.startswith(PREFIX)})


@pytest.fixture(autouse=True)
def clean_counters():
    counters.clear()
    fallbacks.clear()


def latent(height=8, width=8, batch=1):
    return torch.randn(batch, 4, height, width, generator=torch.Generator().manual_seed(height * width))


def forwards_in_place(vae):
    return [name for name, part in vae.first_stage_model.named_modules() if "forward" in part.__dict__]


def test_skipped_vae_gives_the_same_bits_and_leaves_the_given_one_alone(vae):
    before = dict(vae.__dict__)
    view = skip_compile(vae)
    assert torch.equal(view.decode(latent()), vae.decode(latent()))
    pixels = torch.rand(1, 64, 64, 3)
    assert torch.equal(view.encode(pixels), vae.encode(pixels))
    assert torch.equal(view.decode_tiled(latent(), tile_x=64), vae.decode_tiled(latent(), tile_x=64))
    assert view is not vae and view.first_stage_model is vae.first_stage_model
    assert vae.__dict__ == before


def test_skipped_vae_is_not_compiled_even_if_somebody_asked_for_it(vae):
    decoder = vae.first_stage_model.decoder
    vae.first_stage_model.decoder = torch.compile(decoder, backend="eager")
    try:
        skip_compile(vae).decode(latent())
        assert counters["stats"]["unique_graphs"] == 0
        vae.decode(latent())
        assert counters["stats"]["unique_graphs"] > 0
    finally:
        vae.first_stage_model.decoder = decoder


@torch.inference_mode()
def test_compiled_decoder_serves_every_size_batch_and_tile_from_the_first(vae):
    cache = GraphCache()
    view = compile_decoder(vae, CompileSettings(backend="eager"), cache)
    assert torch.equal(view.decode(latent()), vae.decode(latent()))
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    for height, width, batch in [(8, 12, 1), (9, 7, 1), (8, 8, 2)]:
        given = latent(height, width, batch)
        assert torch.equal(view.decode(given), vae.decode(given))
    assert torch.equal(
        view.decode_tiled(latent(12, 12), tile_x=8, tile_y=8, overlap=2),
        vae.decode_tiled(latent(12, 12), tile_x=8, tile_y=8, overlap=2),
    )
    assert counters["stats"]["unique_graphs"] == compiled
    assert fallbacks.rows() == []
    assert forwards_in_place(vae) == []


def test_core_falls_back_to_tiles_inside_a_view(vae, monkeypatch):
    cache = GraphCache()
    view = compile_decoder(vae, CompileSettings(backend="eager"), cache)
    expected = vae.decode_tiled_(latent())
    real, failed = vae.first_stage_model.decode, []

    def out_of_memory_once(*args, **kwargs):
        if not failed:
            failed.append(1)
            raise comfy.model_management.OOM_EXCEPTION("simulated")
        return real(*args, **kwargs)

    monkeypatch.setattr(vae.first_stage_model, "decode", out_of_memory_once)
    assert torch.equal(view.decode(latent()), expected.movedim(1, -1))
    assert failed and forwards_in_place(vae) == []


def test_failing_decode_leaves_no_trace(vae):
    view = compile_decoder(vae, CompileSettings(backend="eager"), GraphCache())
    with pytest.raises(RuntimeError):
        view.decode(torch.zeros(1, 3, 8, 8))
    assert forwards_in_place(vae) == []
    assert torch.equal(view.decode(latent()), vae.decode(latent()))
