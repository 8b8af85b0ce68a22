"""VAE Skip Compile's auto: eager until a size has come often, compiled then, and back where that does not pay."""

import time

import comfy.model_management
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.vae import vae_view
from comfy_accel.accel.sizing.vae import AUTO, VaePolicy
from kit.compiled import graphs


def auto(vae, after=2, cache=None, **settings):
    settings = CompileSettings(**{"backend": "eager", **settings})
    return vae_view(vae, VaePolicy(AUTO, after), settings, GraphCache() if cache is None else cache)


def latent(side=6):
    return torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(side))


@torch.inference_mode()
def test_compiled_once_the_same_size_has_come_often_enough(vae):
    view = auto(vae)
    counted = []
    for side in (6, 7, 6, 8, 6, 6, 7, 7):
        assert torch.equal(view.decode(latent(side)), vae.decode(latent(side)))
        counted.append(graphs())
    kinds = counted[-1]
    assert kinds > 0 and counted == [0, 0, 0, 0, *[kinds] * 4]  # the third of side 6; the third of side 7 needs no more


@torch.inference_mode()
def test_sizes_that_never_repeat_compile_nothing_and_neither_does_encoding(vae):
    view = auto(vae, after=1)
    for side in range(4, 12):
        view.decode(latent(side))
    for _ in range(3):
        view.encode(torch.rand(1, 32, 32, 3))
    assert graphs() == 0


@torch.inference_mode()
def test_eager_where_memory_is_short(vae, monkeypatch):
    view = auto(vae, after=1)
    view.decode(latent())
    needed = vae.memory_used_decode(latent().shape, vae.vae_dtype)
    with monkeypatch.context() as patch:
        patch.setattr(comfy.model_management, "get_free_memory", lambda *args, **kwargs: 1.9 * needed)
        assert torch.equal(view.decode(latent()), vae.decode(latent()))
        assert graphs() == 0
    view.decode(latent())
    assert graphs() > 0


@torch.inference_mode()
def test_size_that_ran_out_of_memory_stays_eager_and_smaller_ones_do_not(vae, out_of_memory_once):
    cache = GraphCache()
    view = auto(vae, after=1, cache=cache)
    view.decode(latent(8))
    with out_of_memory_once(vae.first_stage_model.decoder.conv_out):
        view.decode(latent(8))
    assert graphs() > 0
    hits = cache.statistics()["hits"]
    for side in (8, 9, 9):
        assert torch.equal(view.decode(latent(side)), vae.decode(latent(side)))
    assert cache.statistics()["hits"] == hits
    view.decode(latent(7))
    view.decode(latent(7))
    assert cache.statistics()["hits"] > hits


@torch.inference_mode()
def test_size_at_which_the_graphs_alone_ran_out_of_memory_stays_eager(vae):
    cache, full, tried = GraphCache(), [], []

    def hungry(graph, examples):
        def run(*tensors):
            tried.append(1)
            if full:
                raise torch.OutOfMemoryError("simulated")
            return graph(*tensors)

        return run

    view = auto(vae, after=1, cache=cache, backend=hungry)
    view.decode(latent(8))
    view.decode(latent(8))
    assert tried
    full.append(1)
    assert torch.equal(view.decode(latent(8)), vae.decode(latent(8)))
    before = len(tried)
    for side in (8, 9, 9):
        assert torch.equal(view.decode(latent(side)), vae.decode(latent(side)))
    assert len(tried) == before


def slow(graph, examples):
    def run(*tensors):
        time.sleep(0.03)
        return graph(*tensors)

    return run


@torch.inference_mode()
def test_compiled_that_is_slower_is_given_up(vae):
    cache = GraphCache()
    view = auto(vae, after=1, cache=cache, backend=slow, measured=True)
    for _ in range(12):  # each compared until the verdict is in
        assert torch.equal(view.decode(latent()), vae.decode(latent()))
    reasons = {row["reason"] for row in fallbacks.rows()}
    assert len(reasons) == 1 and "kept normal" in reasons.pop()
    hits = cache.statistics()["hits"]
    started = time.perf_counter()
    view.decode(latent())
    assert cache.statistics()["hits"] == hits
    assert time.perf_counter() - started < 10 * 0.03  # the decoder's ten blocks at the graph's pace
