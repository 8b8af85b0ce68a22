"""VAE Skip Compile beside others: what extensions and core's nodes copy, replace or compile of a VAE."""

import copy

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.vae import vae_view
from comfy_accel.accel.sizing.vae import COMPILE_BOTH, COMPILE_DECODER, VaePolicy
from kit import tiny_vaes
from torch._dynamo.utils import counters

CACHE = GraphCache()

POLICIES = (None, COMPILE_DECODER, COMPILE_BOTH)
"""None: skip."""


def view_of(vae, compiled=COMPILE_DECODER):
    if compiled is None:
        return vae_view(vae, VaePolicy())
    return vae_view(vae, VaePolicy(compiled), CompileSettings(backend="eager"), CACHE)


def hits():
    return CACHE.statistics()["hits"]


def latent():
    return torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("compiled", POLICIES)
@torch.inference_mode()
def test_copy_of_a_view_with_another_model_decodes_with_that_one(vae, compiled):
    """As core's Select VAE Device node makes one."""
    other = tiny_vaes.sd15(seed=1)
    swapped = copy.copy(view_of(vae, compiled))
    swapped.patcher, swapped.first_stage_model = other.patcher, other.first_stage_model
    assert torch.equal(swapped.decode(latent()), other.decode(latent()))


@pytest.mark.parametrize("compiled", POLICIES)
@torch.inference_mode()
def test_deep_copy_of_a_view_is_a_view_over_weights_of_its_own(vae, compiled):
    view = view_of(vae, compiled)
    copied, before = copy.deepcopy(view), hits()
    assert copied.first_stage_model is not view.first_stage_model
    assert torch.equal(copied.decode(latent()), vae.decode(latent()))
    assert (hits() > before) is (compiled is not None)


@torch.inference_mode()
def test_call_that_an_extension_put_on_a_vae_stays(vae):
    changed = copy.copy(vae)
    changed.decode = lambda samples, **options: "theirs"
    assert vae_view(changed, VaePolicy()).decode(latent()) == "theirs"


def test_skipped_vae_is_not_compiled_even_if_somebody_asked_for_it(vae):
    decoder = vae.first_stage_model.decoder
    vae.first_stage_model.decoder = torch.compile(decoder, backend="eager")
    try:
        vae_view(vae, VaePolicy()).decode(latent())
        assert graphs() == 0
        vae.decode(latent())
        assert graphs() > 0
    finally:
        vae.first_stage_model.decoder = decoder


@torch.inference_mode()
def test_decoder_that_somebody_has_compiled_is_left_to_them(vae):
    """As the compile nodes of other extensions leave it; torch would trace our stand-ins inside, and fail."""
    expected, decoder = vae.decode(latent()), vae.first_stage_model.decoder
    vae.first_stage_model.decoder = torch.compile(decoder, backend="eager")
    try:
        view, before = view_of(vae), hits()
        assert torch.equal(view.decode(latent()), expected) and hits() == before
    finally:
        vae.first_stage_model.decoder = decoder
    assert [row["reason"] for row in fallbacks.rows()] == ["all or part of it is already compiled as a whole"]


@pytest.mark.parametrize("compiled", POLICIES)
@torch.inference_mode()
def test_view_can_be_called_from_code_that_is_compiled(vae, compiled):
    view, expected = view_of(vae, compiled), vae.decode(latent()) * 2
    assert torch.equal(torch.compile(lambda given: view.decode(given) * 2, backend="eager")(latent()), expected)
