"""Plain VAE on core's own VAE: whatever compiles it, its calls run uncompiled and give the same bits."""

import copy

import comfy.sd
import pytest
import torch
from comfy_accel.accel.hosts.comfyui.views import make_uncompiled_vae
from kit import tiny_vaes
from kit.compiled import forwards_in_place, graphs


def latent(height=6, width=6):
    return torch.randn(1, 4, height, width, generator=torch.Generator().manual_seed(height * width))


PIXELS = torch.rand(1, 128, 96, 3, generator=torch.Generator().manual_seed(0))
CALLS = {
    "decode": lambda v: v.decode(latent(16, 12)),
    "decode_tiled": lambda v: v.decode_tiled(latent(16, 12), tile_x=8, tile_y=8, overlap=2),
    "decode_tiled_": lambda v: v.decode_tiled_(latent(16, 12), 8, 8, overlap=2),
    "encode": lambda v: v.encode(PIXELS),
    "encode_tiled": lambda v: v.encode_tiled(PIXELS, tile_x=64, tile_y=64, overlap=16),
    "encode_tiled_": lambda v: v.encode_tiled_(PIXELS.movedim(-1, 1), 64, 64, overlap=16),
}


@pytest.fixture
def compiled(vae):
    """A VAE whose parts somebody else has compiled."""
    torch._dynamo.reset()  # else it would know the parts from the test before
    model = vae.first_stage_model
    plain = model.encoder, model.decoder
    model.encoder, model.decoder = (torch.compile(part, backend="eager") for part in plain)
    yield vae
    model.encoder, model.decoder = plain


@pytest.mark.parametrize("name", CALLS)
@torch.inference_mode()
def test_a_skipped_vae_is_compiled_in_no_call_even_if_somebody_asked_for_it(name, compiled):
    made = CALLS[name](make_uncompiled_vae(compiled))
    assert graphs() == 0
    assert torch.equal(made, CALLS[name](compiled)) and graphs() > 0


def test_every_method_through_which_core_runs_a_vae_is_covered(vae):
    view = make_uncompiled_vae(vae)
    run = {name for name in dir(type(vae)) if not name.startswith("_") and ("decode" in name or "encode" in name)}
    plain = {"prepare_decode", "vae_encode_crop_pixels", "spacial_compression_decode", "temporal_compression_decode"}
    assert run >= CALLS.keys()
    for name in run - plain - {"spacial_compression_encode"}:
        assert getattr(type(view), name) is not getattr(type(vae), name), name


@torch.inference_mode()
def test_the_vae_given_is_left_alone_and_shares_its_weights(vae):
    before = dict(vae.__dict__)
    view = make_uncompiled_vae(make_uncompiled_vae(vae))  # of two nodes in a row
    assert torch.equal(view.decode(latent()), vae.decode(latent()))
    assert view is not vae and view.first_stage_model is vae.first_stage_model and view.patcher is vae.patcher
    assert isinstance(view, type(vae)) and type(view).__name__ == "VAE"
    assert vae.__dict__ == before and forwards_in_place(vae.first_stage_model) == []


@torch.inference_mode()
def test_a_failing_decode_has_cores_error_and_the_next_one_runs(vae):
    view = make_uncompiled_vae(vae)
    with pytest.raises(RuntimeError) as expected:
        vae.decode(torch.zeros(1, 3, 8, 8))
    with pytest.raises(RuntimeError) as found:
        view.decode(torch.zeros(1, 3, 8, 8))
    assert str(found.value) == str(expected.value)
    assert torch.equal(view.decode(latent()), vae.decode(latent()))
    with pytest.raises(RuntimeError, match="VAE is invalid"):
        make_uncompiled_vae(comfy.sd.VAE(sd={})).decode(latent())


@torch.inference_mode()
def test_copies_of_a_view_decode_with_the_model_that_they_have(vae):
    """As core's Select VAE Device node makes one."""
    other = tiny_vaes.sd15(seed=1)
    swapped = copy.copy(make_uncompiled_vae(vae))
    swapped.patcher, swapped.first_stage_model = other.patcher, other.first_stage_model
    assert torch.equal(swapped.decode(latent()), other.decode(latent()))
    deep = copy.deepcopy(make_uncompiled_vae(vae))
    assert deep.first_stage_model is not vae.first_stage_model
    assert torch.equal(deep.decode(latent()), vae.decode(latent()))


@torch.inference_mode()
def test_a_call_that_an_extension_put_on_a_vae_stays(vae):
    changed = copy.copy(vae)
    changed.decode = lambda samples, **options: "theirs"
    assert make_uncompiled_vae(changed).decode(latent()) == "theirs"


@torch.inference_mode()
def test_a_view_can_be_called_from_code_that_is_compiled(vae):
    view, expected = make_uncompiled_vae(vae), vae.decode(latent()) * 2
    assert torch.equal(torch.compile(lambda given: view.decode(given) * 2, backend="eager")(latent()), expected)
