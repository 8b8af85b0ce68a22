"""An image costs its graphs and nothing else: one at a time, with CFG 1 or prompts of unequal length, as people use
Flux and Qwen-Image. Counted, not timed: after the first image no block is traced, no model surveyed, none compiled, and
no call of a block described that was like an earlier one."""

import gc
import types
import weakref
from collections import Counter

import comfy.model_management
import comfy.sd
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile import benchmark, block_compiler
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.dispatch import block_runner, compiled_layers
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.step_cache.config import QUALITIES
from kit import tiny_models
from kit.captures import capturing_cache
from kit.compiled import graphs
from kit.families import FAMILIES
from kit.other_nodes import lora

_SMALL = tiny_models.Family("SD1.5", "SD15", tiny_models.unet_config(**tiny_models.TWO_LEVELS), 768)
MODELS = {
    "SD1.5": (_SMALL, (4, 16, 16)),
    **{name: (FAMILIES[name].family, FAMILIES[name].sizes[0][0]) for name in ("Flux", "Wan", "HunyuanVideo")},
}
PROMPTS = 24, 31
"""Tokens of the prompt and of the negative one, so that core makes two calls of one row each."""


@pytest.fixture
def work(monkeypatch):
    """How often what one image is to pay for, and no other, was done since it was cleared."""
    done = Counter()

    def count(owner, name):
        own = getattr(owner, name)

        def counted(*args, **kwargs):
            done[name] += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(block_compiler, "_compile")
    count(compiled_layers, "survey")
    count(block_runner.BlockRunner, "_call_unmatched")
    return done


class Session:
    """Images of one model, with the graphs of a cache."""

    def __init__(self, name, cache, seed=0):
        self.family, self.shape = MODELS[name]
        self.plain = self.family.load(torch.float32, seed)
        self.model = self.fast(self.plain, cache)

    @staticmethod
    def fast(model, cache):
        return accelerate(model, CompileSettings(backend="eager"), cache)

    def image(self, cfg, sampler="euler", seed=0, model=None, steps=2, longer=0, wider=0):
        """longer: the prompts, in tokens. wider: the latent."""
        with torch.inference_mode():  # as core runs nodes
            latent = torch.zeros(1, *self.shape[:-1], self.shape[-1] + wider)
            prompts = [self.family.conditioning(tokens + longer, seed) for seed, tokens in enumerate(PROMPTS, 1)]
            settings = dict(steps=steps, cfg=cfg, sampler=sampler, scheduler="simple", seed=seed)
            return tiny_models.sample_latent(model or self.model, latent, *prompts, **settings)


# Wan's blocks are called as Flux's are, which is tested below.
@pytest.mark.parametrize("name", ["SD1.5", "HunyuanVideo"])
def test_after_the_first_image_nothing_is_traced_or_surveyed_or_compiled(name, work):
    session = Session(name, GraphCache())
    session.image(cfg=1.0)
    assert work["survey"] == 1 and work["_compile"]
    for cfg in (1.0, 5.0):
        session.image(cfg)  # the negative prompt's length is new
        work.clear()
        before = graphs()
        for seed, sampler in enumerate(("euler", "dpmpp_2m"), 1):
            session.image(cfg, sampler, seed)
        assert (dict(work), graphs() - before) == ({}, 0)


@pytest.mark.parametrize("what", ["longer", "wider"])
def test_new_length_or_size_is_looked_up_once_a_kind_and_twelve_in_turns_never_again(what, work):
    session = Session("Flux", GraphCache())
    for _ in range(2):
        session.image(1.0)
    before = graphs()
    for more in range(4, 52, 4):
        work.clear()
        session.image(1.0, **{what: more})
        assert dict(work) == {"_call_unmatched": work["_call_unmatched"]}
        assert work["_call_unmatched"] <= 2 * before
    work.clear()
    for more in range(4, 52, 4):
        session.image(1.0, **{what: more})
    assert (dict(work), graphs() - before) == ({}, 0)


def test_nor_where_two_models_take_turns(work):
    cache = GraphCache()
    sessions = Session("Flux", cache), Session("Flux", cache, seed=1)
    for session in sessions:
        session.image(1.0)
    work.clear()
    before = graphs()
    images = [session.image(1.0).clone() for session in sessions * 2]
    assert (dict(work), graphs() - before) == ({}, 0)
    assert torch.equal(images[0], images[2]) and not torch.equal(images[0], images[1])


def test_nor_where_a_block_runs_uncompiled_until_it_need_not(work):
    session = Session("Flux", GraphCache())
    block = session.plain.model.diffusion_model.double_blocks[1]
    own = block.forward
    block.forward = lambda *args, **kwargs: own(*args, **kwargs)  # a wrapper that cannot be put around another forward
    expected = session.image(1.0).clone()
    assert work["survey"] == 1
    work.clear()
    assert torch.equal(session.image(1.0), expected) and work == {}
    del block.forward
    torch.testing.assert_close(session.image(1.0), expected)
    assert work["survey"] == 1


def package_of(value):
    """The package of an object's class, or of a method's function."""
    owner = value.__func__ if type(value) is types.MethodType else type(value)
    return str(owner.__module__).partition(".")[0]


@pytest.mark.thorough  # 300 images
def test_nothing_grows_over_300_images_of_two_models_and_what_is_kept_goes_with_its_model():
    cache = GraphCache()
    sessions = [Session("Flux", cache, seed) for seed in range(2)]

    def objects_after(images: int) -> Counter[str]:
        for _ in range(images):
            for session in sessions:
                session.image(1.0)
        gc.collect()
        return Counter(map(package_of, gc.get_objects()))

    before = objects_after(10)
    grown = objects_after(140) - before
    assert sum(grown.values()) - grown["weakref"] - grown["comfy"] < 50  # core keeps a record of each load
    kept, gone = len(cache.listeners), weakref.ref(sessions[1].plain.model)
    del sessions[1]
    comfy.model_management.unload_all_models()
    gc.collect()
    assert gone() is None and len(cache.listeners) == kept / 2


class Halved(torch.nn.Linear):
    """Another pack's layer."""

    def forward(self, x):
        return super().forward(x) * 0.5


def other_layer(model, cls=Halved):
    layer = model.model.diffusion_model.double_blocks[1].img_mlp[0]
    made = cls(layer.in_features, layer.out_features)
    made.load_state_dict(layer.state_dict())
    patched = model.clone()
    patched.add_object_patch("diffusion_model.double_blocks.1.img_mlp.0", made.requires_grad_(False))
    return patched


@pytest.mark.parametrize(("change", "surveys"), [(lora, 0), (other_layer, 1)])
def test_what_a_node_changes_in_between_is_in_the_image_and_surveyed_where_it_changes_code(change, surveys, work):
    """A clone of the patcher, over the same model; and back."""
    cache = GraphCache()
    session = Session("Flux", cache)
    own, changed = session.plain, change(session.plain)
    expected = [session.image(1.0, model=model).clone() for model in (own, changed)]
    assert not torch.allclose(*expected, atol=1e-2)
    for model, image, times in ((own, 0, 1), (changed, 1, surveys), (own, 0, surveys), (own, 0, 0)):
        work.clear()
        torch.testing.assert_close(session.image(1.0, model=Session.fast(model, cache)), expected[image])
        assert work["survey"] == times


@pytest.mark.parametrize("measured", [False, True])
def test_images_after_a_short_first_one_are_captured_with_deep_cache_too(measured, monkeypatch):
    """In that one no call was to be captured, and what its blocks' calls found is not for those that will be."""
    monkeypatch.setattr(benchmark, "SLOWER", 1e9)
    cache, before = capturing_cache()[0], fallbacks.counts()
    session = Session("Wan", cache)
    plain = apply_deep_cache(session.plain, QUALITIES["Fast"])
    compiled = accelerate(session.plain, CompileSettings(backend="eager", measured=measured), cache, graphs=True)
    model = apply_deep_cache(compiled, QUALITIES["Fast"])
    for steps in (3, 16, 16):
        image = session.image(1.0, model=model, steps=steps)
    replays = records.last().totals.replays
    torch.testing.assert_close(image, session.image(1.0, model=plain, steps=16), rtol=1e-4, atol=1e-4)
    assert fallbacks.subtract(before) == {} and replays > 0
