"""VAE Skip Compile on core's own VAE: one view beside others, through every call, and when something fails."""

import copy
import inspect

import comfy.model_management
import comfy.model_patcher
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models import streamed as streamed_weights
from comfy_accel.accel.hosts.comfyui.models.vae import vae_view
from comfy_accel.accel.sizing.vae import COMPILE_BOTH, COMPILE_DECODER, VaePolicy
from kit import tiny_vaes
from kit.compiled import forwards_in_place, graphs
from kit.thorough import thorough_except

CACHE = GraphCache()
"""Shared by the tests that do not count graphs, so that each kind is captured once."""

POLICIES = (None, COMPILE_DECODER, COMPILE_BOTH)
"""None: skip."""


def view_of(vae, compiled=COMPILE_DECODER, cache=None, **settings):
    """With a backend that captures graphs and runs them as they are: same bits, in seconds."""
    if compiled is None:
        return vae_view(vae, VaePolicy())
    settings = CompileSettings(**{"backend": "eager", **settings})
    return vae_view(vae, VaePolicy(compiled), settings, CACHE if cache is None else cache)


def hits(cache=CACHE):
    """How often a graph of the cache ran."""
    return cache.statistics()["hits"]


def latent(height=6, width=6, batch=1):
    return torch.randn(batch, 4, height, width, generator=torch.Generator().manual_seed(height * width))


@pytest.mark.parametrize("compiled", thorough_except(POLICIES, None, COMPILE_BOTH))
@torch.inference_mode()
def test_view_gives_the_same_bits_and_leaves_the_given_one_alone(vae, compiled):
    before = dict(vae.__dict__)
    view = view_of(vae, compiled)
    assert torch.equal(view.decode(latent()), vae.decode(latent()))
    pixels = torch.rand(1, 64, 64, 3)
    assert torch.equal(view.encode(pixels), vae.encode(pixels))
    assert view is not vae and view.first_stage_model is vae.first_stage_model and view.patcher is vae.patcher
    assert isinstance(view, type(vae)) and type(view).__name__ == "VAE"
    assert vae.__dict__ == before
    assert forwards_in_place(vae.first_stage_model) == []


@pytest.mark.parametrize("compiled", thorough_except(POLICIES, None, COMPILE_BOTH))
@torch.inference_mode()
def test_every_method_through_which_core_runs_a_vae_is_covered(vae, compiled):
    pixels = torch.rand(1, 128, 96, 3)
    channels_first = pixels.movedim(-1, 1)
    calls = {
        "decode": lambda v: v.decode(latent(16, 12)),
        "decode_tiled": lambda v: v.decode_tiled(latent(16, 12), tile_x=8, tile_y=8, overlap=2),
        "decode_tiled_": lambda v: v.decode_tiled_(latent(16, 12), 8, 8, overlap=2),
        "encode": lambda v: v.encode(pixels),
        "encode_tiled": lambda v: v.encode_tiled(pixels, tile_x=64, tile_y=64, overlap=16),
        "encode_tiled_": lambda v: v.encode_tiled_(channels_first, 64, 64, overlap=16),
    }
    view = view_of(vae, compiled)
    for name, call in calls.items():
        expected, before = call(vae), hits()
        assert torch.equal(call(view), expected), name
        is_compiled = compiled == COMPILE_BOTH or (compiled == COMPILE_DECODER and name.startswith("decode"))
        assert (hits() > before) is is_compiled, name
    run = {name for name in dir(type(vae)) if not name.startswith("_") and ("decode" in name or "encode" in name)}
    plain = {"prepare_decode", "vae_encode_crop_pixels", "spacial_compression_decode", "temporal_compression_decode"}
    for name in run - plain - {"spacial_compression_encode"}:
        assert getattr(type(view), name) is not getattr(type(vae), name), name


@torch.inference_mode()
def test_compiled_decoder_serves_every_size_batch_and_tile_from_the_first():
    vae, cache = tiny_vaes.sd15(ch_mult=[1, 1, 2, 2]), GraphCache()
    view = view_of(vae, cache=cache)
    assert torch.equal(view.decode(latent()), vae.decode(latent()))
    compiled = graphs()
    names = {entry.name for entry in cache.entries()}
    # By channels: 64, 64 to 32, 32. Newer cores call the middle ones with fewer arguments.
    assert compiled in (3, 4) and names == {"ResnetBlock"}
    for height, width, batch in [(6, 10, 1), (9, 7, 1), (6, 6, 3)]:
        given = latent(height, width, batch)
        assert torch.equal(view.decode(given), vae.decode(given))
    tiles = {"tile_x": 8, "tile_y": 8, "overlap": 2}
    assert torch.equal(view.decode_tiled(latent(12, 12), **tiles), vae.decode_tiled(latent(12, 12), **tiles))
    assert graphs() == compiled
    assert fallbacks.rows() == []


@torch.inference_mode()
def test_second_vae_and_second_view_of_the_architecture_share_the_graphs(vae):
    cache = GraphCache()
    view_of(vae, cache=cache).decode(latent())
    compiled = graphs()
    other = tiny_vaes.sd15(seed=1)
    assert torch.equal(view_of(other, cache=cache).decode(latent()), other.decode(latent()))
    assert torch.equal(view_of(vae, cache=cache).decode(latent()), vae.decode(latent()))
    assert graphs() == compiled
    assert not torch.equal(other.decode(latent()), vae.decode(latent()))


@torch.inference_mode()
def test_of_two_nodes_in_a_row_the_last_counts(vae):
    compiled_last = view_of(vae_view(vae, VaePolicy()), COMPILE_DECODER)
    skipped_last = vae_view(view_of(vae, COMPILE_DECODER), VaePolicy())
    expected, before = vae.decode(latent()), hits()
    assert torch.equal(skipped_last.decode(latent()), expected) and hits() == before
    assert torch.equal(compiled_last.decode(latent()), expected) and hits() > before


def node_class(name):
    import nodes

    return nodes.NODE_CLASS_MAPPINGS[name]()


@torch.inference_mode()
def test_nodes_of_core_run_a_view_as_they_run_the_vae(vae):
    pixels = torch.rand(1, 128, 96, 3)
    calls = {
        "VAEDecode": lambda node, v: node.decode(v, {"samples": latent(16, 12)})[0],
        "VAEDecodeTiled": lambda node, v: node.decode(v, {"samples": latent(16, 12)}, 64, 16)[0],
        "VAEEncode": lambda node, v: node.encode(v, pixels)[0]["samples"],
        "VAEEncodeTiled": lambda node, v: node.encode(v, pixels, 64, 16)[0]["samples"],
    }
    view, before = view_of(vae, COMPILE_BOTH), hits()
    for name, call in calls.items():
        node = node_class(name)
        assert torch.equal(call(node, view), call(node, vae)), name
        assert hits() > before, name
        before = hits()


@pytest.mark.parametrize("compiled", POLICIES)
@torch.inference_mode()
def test_failing_decode_leaves_no_trace_and_the_error_is_core_s(vae, compiled):
    view = view_of(vae, compiled)
    with pytest.raises(RuntimeError) as expected:
        vae.decode(torch.zeros(1, 3, 8, 8))
    with pytest.raises(RuntimeError) as found:
        view.decode(torch.zeros(1, 3, 8, 8))
    assert str(found.value) == str(expected.value)
    assert forwards_in_place(vae.first_stage_model) == []
    assert torch.equal(view.decode(latent()), vae.decode(latent()))


def test_vae_without_weights_is_refused_by_core_as_ever():
    import comfy.sd

    empty = comfy.sd.VAE(sd={})
    for compiled in POLICIES:
        with pytest.raises(RuntimeError, match="VAE is invalid"):
            view_of(empty, compiled).decode(latent())


@torch.inference_mode()
def test_blocks_are_looked_at_once_their_weights_are_loaded(monkeypatch):
    """The weights come to their device and type inside the first decode: what was there before must not count."""
    vae = tiny_vaes.sd15()
    expected = vae.decode(latent())
    load = comfy.model_management.load_models_gpu

    def load_and_move(*args, **kwargs):
        vae.first_stage_model.float()
        return load(*args, **kwargs)

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", load_and_move)
    vae.first_stage_model.double()
    view = view_of(vae, cache=GraphCache())
    assert torch.equal(view.decode(latent()), expected)
    compiled = graphs()
    assert compiled > 0
    view.decode(latent(7, 5))
    assert graphs() == compiled


@pytest.mark.skipif(
    "disable_dynamic" not in inspect.signature(comfy.model_patcher.ModelPatcher.clone).parameters,
    reason="this core streams no weights",
)
@torch.inference_mode()
def test_vae_whose_weights_can_only_be_taken_one_by_one_gets_a_loaded_model_of_its_own(vae, monkeypatch):
    streamed = tiny_vaes.sd15()
    monkeypatch.setattr(streamed_weights, "takes_streamed_weights", lambda: False)
    monkeypatch.setattr(streamed.patcher, "is_dynamic", lambda: True, raising=False)
    assert view_of(streamed).first_stage_model is streamed.first_stage_model  # nobody knows how to load it again
    for no_help in (lambda: None, lambda disable_dynamic: open("/nowhere")):
        streamed.patcher.cached_patcher_init = (no_help, ())
        assert view_of(streamed).first_stage_model is streamed.first_stage_model
    streamed.patcher.cached_patcher_init = (lambda disable_dynamic: tiny_vaes.sd15().patcher, ())
    view, before = view_of(streamed), hits()
    assert view.first_stage_model is view.patcher.model is not streamed.first_stage_model
    assert torch.equal(view.decode(latent()), vae.decode(latent()))
    assert hits() > before
    assert vae_view(streamed, VaePolicy()).first_stage_model is streamed.first_stage_model


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_types_of_weights(dtype):
    vae = tiny_vaes.sd15(dtype)
    assert vae.vae_dtype == dtype
    expected = vae.decode(latent())
    for compiled in POLICIES:
        assert torch.equal(view_of(vae, compiled).decode(latent()), expected)
    assert fallbacks.rows() == []


@torch.inference_mode()
def test_options_of_a_decode_reach_the_decoder():
    vae = tiny_vaes.hunyuan_3d()
    given = torch.randn(1, 8, 12, generator=torch.Generator().manual_seed(0))
    coarse, fine = ({"octree_resolution": side, "num_chunks": 50, "enable_pbar": False} for side in (3, 5))
    for compiled in POLICIES:
        view = view_of(vae, compiled)
        assert torch.equal(view.decode(given, vae_options=coarse), vae.decode(given, vae_options=coarse))
        assert torch.equal(view.decode(given, fine), vae.decode(given, fine))
        assert view.decode(given, fine).shape != view.decode(given, coarse).shape
    assert graphs() > 0


# Beside others: what extensions and core's nodes copy, replace or compile of a VAE


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
