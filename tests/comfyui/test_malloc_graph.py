"""Beside Comfy Compiler (core 0.34 and later), which records what a model allocates: nothing of ours that lasts is
recorded, and nothing recorded is kept or freed by us. On a stand-in for comfy-aimdo's recorder (`kit.malloc_graph`).

Scopes are where newer models have them: one for the whole call, outside of the model's wrappers or within them, and in
it one around each block. As theirs do, the blocks work in place and hand back what they were given.
"""

import functools
import gc
import sys
import threading
import types

import pytest
import torch
from comfy.ldm.flux.model import Flux
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui import recording
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.modules.substitution import substitute
from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode
from kit.captures import capturing_cache
from kit.deep_cache import cached
from kit.families import IMAGE, TinyDiT
from kit.malloc_graph import installed, recorded
from kit.tiny_models import Family
from kit.zoo import FLUX
from torch.utils._pytree import tree_map_only

SINGLE = TinyDiT(Family("Flux", "Flux", {**FLUX, "depth": 0, "depth_single_blocks": 5}, 48, 32), 5, IMAGE)
"""One kind of block, compiled in a moment."""


@pytest.fixture
def fake(monkeypatch):
    return installed(monkeypatch)


@pytest.fixture(scope="module")
def cache():
    return GraphCache()


@pytest.fixture
def within(fake, monkeypatch):
    """The scope of the call is within the model's wrappers, in its own code."""
    plain = Flux.forward_orig

    def forward_orig(self, *args, **kwargs):
        return whole(fake, functools.partial(plain, self), *args, **kwargs)

    monkeypatch.setattr(Flux, "forward_orig", forward_orig)


def whole(fake, inner, *args, **kwargs):
    with fake.malloc_graph_scope(torch.device("cpu")):
        out = inner(*args, **kwargs)
        with fake.pause_malloc_graph():
            kept = out.clone()
        del out
    return kept


def scoped(model, fake, is_within=False, has_prefix=False):
    """The model with the scopes of a newer one. is_within: that of the call is there already (`within`).
    has_prefix: each block is called for a prefix first, with recording paused, as Qwen-Image 2.1 does."""
    network = model.model.diffusion_model
    lists = [part for part in network.children() if isinstance(part, torch.nn.ModuleList) and len(part) > 1]

    def one(is_last, inner, *args, **kwargs):
        fake.prefetch_queue_pop(None, None, network, malloc_scope="block")
        if has_prefix:
            with fake.pause_malloc_graph():
                prefix = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
                inner(*prefix[0], **prefix[1])
                del prefix
        out = inner(*args, **kwargs)
        if is_last:  # elsewhere the scope ends where the next block begins, when the model has taken what this gave
            fake.prefetch_queue_pop(None, None, None, malloc_scope="block")
        return out

    def sampling(executor, *args, **kwargs):
        layers = {block: functools.partial(one, block is blocks[-1]) for blocks in lists for block in blocks}
        if not is_within:
            layers[network] = functools.partial(whole, fake)
        try:
            with substitute(layers, 2):
                return executor(*args, **kwargs)
        finally:
            fake.cleanup_prefetch_queues()

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "core", sampling)
    return model


def fast(model, cache, **how):
    return accelerate(model, CompileSettings(backend="eager"), cache, **how)


NODES = {
    "Accelerate Model": lambda model, cache: fast(model, cache),
    "both": lambda model, cache: cached(fast(model, cache)),
}


def assert_rules_kept(record):
    assert record.violations == [] and record.rogues == 0 and record.recorded > 0


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_images_are_right_and_the_recorders_rules_are_kept(fake, cache, nodes):
    """The first of them compiles within the scopes."""
    expected = SINGLE.sample(nodes(SINGLE.load(), GraphCache()))
    with recorded() as record:
        out = SINGLE.sample(nodes(scoped(SINGLE.load(), fake), cache))
    assert torch.equal(out, expected)
    assert_rules_kept(record)
    assert record.pauses > 5 * 2 and fallbacks.rows() == []


@pytest.mark.parametrize("is_within", [False, True])
def test_blocks_that_core_calls_with_recording_paused_leave_it_paused(fake, cache, is_within, request):
    if is_within:
        request.getfixturevalue("within")
    expected = SINGLE.sample(SINGLE.load())
    with recorded() as record:
        out = SINGLE.sample(fast(scoped(SINGLE.load(), fake, is_within, has_prefix=True), cache))
    assert torch.allclose(out, expected, atol=1e-5) and fallbacks.rows() == []
    assert_rules_kept(record)
    assert record.pauses > 5 * 2 * 2


def test_core_s_pause_is_found_by_where_its_callers_stand(fake):
    def stands():
        return recording._is_paused_by_core()

    assert not stands()
    with fake.pause_malloc_graph():
        assert stands() and functools.partial(stands)()
        for _ in range(2):
            assert stands()
    assert not stands()
    with pytest.raises(ZeroDivisionError), fake.pause_malloc_graph():
        raise ZeroDivisionError
    assert not stands()


def test_what_is_recorded_is_the_same_while_blocks_are_compiled_compared_and_warm(fake):
    compiled, counted = GraphCache(), []
    for _ in range(3):
        with recorded() as record:
            SINGLE.sample(fast(scoped(SINGLE.load(), fake), compiled))
        counted.append(record.recorded)
    assert len(set(counted)) == 1


@pytest.mark.parametrize("other", [EasyCacheNode, LazyCacheNode])
def test_caches_of_whole_steps_beside_our_nodes_in_either_order(fake, within, cache, other):
    def sample(model):
        with recorded() as record:
            out = SINGLE.sample(model, steps=8)
        assert_rules_kept(record)
        return out

    def leaving_out(model):
        return other.execute(model, 3.0, 0.1, 0.95, False).args[0]

    both = NODES["both"]
    plain = SINGLE.sample(both(SINGLE.load(), cache), steps=8)
    for made in (lambda model: leaving_out(both(model, cache)), lambda model: both(leaving_out(model), cache)):
        expected = SINGLE.sample(made(SINGLE.load()), steps=8)
        assert not torch.equal(expected, plain)  # some steps are left out
        assert torch.equal(sample(made(scoped(SINGLE.load(), fake, is_within=True))), expected)


def test_graphs_serve_every_batch_though_the_model_begins_records_when_it_runs_without_values(fake, within):
    compiled = GraphCache()
    model = fast(scoped(SINGLE.load(), fake, is_within=True), compiled)
    for batch in (1, 2):
        SINGLE.sample(model, batch=batch)
    assert compiled.statistics()["compilations"] == 1


def test_calls_are_not_captured_beside_a_recorder(fake, cache):
    captures, _ = capturing_cache()
    model = accelerate(SINGLE.load(), CompileSettings(backend="eager", min_repetitions=100), captures, graphs=True)
    plain = SINGLE.sample(SINGLE.load(), steps=6)
    assert torch.equal(SINGLE.sample(scoped(model, fake), steps=6), plain)
    assert captures.statistics()["captures"] == 0
    (row,) = fallbacks.rows()
    assert (
        row["reason"]
        == "not captured as a CUDA graph: Comfy Compiler plans the memory of its calls, and moves it from call to call"
    )
    assert SINGLE.sample(model, steps=6).equal(plain) and captures.statistics()["captures"]


def test_blocks_stand_aside_while_core_captures_around_them(fake, cache, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model = scoped(SINGLE.load(), fake)
    plain = SINGLE.sample(model)
    assert torch.equal(SINGLE.sample(fast(model, cache)), plain)
    assert [row["reason"] for row in fallbacks.rows()] == ["another CUDA graph or stream is around it"]


def test_no_garbage_is_collected_during_a_pause(fake):
    context = recording.make_unrecorded_context()
    with context():
        assert gc.isenabled()  # nothing is recorded
    with fake.malloc_graph_scope(torch.device("cpu")):
        with pytest.raises(ZeroDivisionError), context():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled()


def test_first_cores_with_a_recorder_have_no_pause_of_their_own(monkeypatch):
    said = []
    graph = types.SimpleNamespace(pause=lambda: said.append("pause"), resume=lambda: said.append("resume"))
    first = types.ModuleType("comfy.model_prefetch")
    first.ACTIVE_MALLOC_GRAPHS = {threading.get_ident(): graph}
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", first)
    with recording.make_unrecorded_context()():
        assert said == ["pause"]
    assert said == ["pause", "resume"]
    first.ACTIVE_MALLOC_GRAPHS.clear()
    with recording.make_unrecorded_context()():
        assert len(said) == 2
