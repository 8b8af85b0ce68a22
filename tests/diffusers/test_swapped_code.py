"""Code that others replace while a pipeline runs, and put back: every image is the plain pipeline's, bit for bit."""

import functools
import types
from contextlib import ExitStack, contextmanager, nullcontext

import diffusers
import pytest
import torch
from comfy_accel.accel import accelerate_pipeline, accelerated, restore
from comfy_accel.accel.cache.graph_cache import GraphCache, shared
from comfy_accel.accel.hosts.diffusers import runs
from diffusers.models import attention_dispatch, embeddings
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers import transformer_flux
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxSingleTransformerBlock,
)
from kit import deep_transformers
from kit import pipeline_zoo as zoo
from kit.code_swaps import all_of, attribute, item, scaling
from kit.compiled import graphs
from torch.nn import functional

FAST = {"ignores": ("vae",), "backend": "eager", "min_repetitions": 3}
"""Leaves two kinds of the UNet's blocks to compile: BasicTransformerBlock and one of ResnetBlock2D."""

STEPS = 3


def thorough(*case):
    """A case that costs graphs of its own and differs little from a quick one."""
    return pytest.param(*case, marks=pytest.mark.thorough)


def image(pipe, steps=STEPS, **given):
    """The latent of one call, the same for the same arguments."""
    size = {"width": 32, "height": 32, "num_inference_steps": steps, "output_type": "latent"}
    return pipe(**size, **zoo.prompt(pipe), generator=torch.Generator().manual_seed(1), **given)[0]


def denoiser(pipe):
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


class Weighed:
    """Attention of somebody's own, with a setting on the object and one among its defaults."""

    def __init__(self):
        self.weight = 1.0

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, share=1.0, **_):
        return share * self.weight * AttnProcessor2_0()(attn, hidden_states, encoder_hidden_states, attention_mask)


def unet(seed=0):
    torch.manual_seed(seed)
    layout = {"block_out_channels": (8,), "attention_head_dim": 4, **zoo.UNET, "layers_per_block": 2}
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    made = diffusers.UNet2DConditionModel(**layout, **blocks).eval()
    for name, part in made.named_modules():
        if name.endswith("attn2"):
            part.set_processor(Weighed())
    return made


def pipeline(kind, seed=0):
    """Of few kinds of blocks. kind: "unet", or "dit" for Flux with single-stream blocks alone."""
    if kind == "unet":
        return zoo.pipeline("StableDiffusionPipeline", unet=unet(seed))
    layout = {"num_layers": 0, "num_single_layers": 3, "attention_head_dim": 16, "axes_dims_rope": (4, 4, 8)}
    transformer = deep_transformers.transformer("Flux", seed, **layout, guidance_embeds=False)
    return zoo.pipeline("FluxPipeline", transformer=transformer)


@pytest.fixture(scope="module")
def pipes():
    return {kind: pipeline(kind) for kind in ("unet", "dit")}


@pytest.fixture
def empty_cache(monkeypatch):
    cache = GraphCache()
    monkeypatch.setattr(runs, "shared", cache)
    return cache


# What is swapped: contexts that are given the model. Whatever else code may read is in test_current_code.py.


def on_all(holders, name, make):
    return all_of(*(functools.partial(attribute, holder, name, make(holder)) for holder in holders))()


def parts(model, *classes):
    return [part for part in model.modules() if isinstance(part, classes)]


attend = functional.scaled_dot_product_attention


def halved_native_attention(query, key, value, attn_mask=None, **_):
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return attend(query, key, value, attn_mask).transpose(1, 2) / 2


def no_rotary_embedding(x, freqs_cis, use_real=True, use_real_unbind_dim=-1, sequence_dim=2):
    return x


class NoAttention:
    def __call__(self, attn, hidden_states, *args, **kwargs):
        return hidden_states / 2


def no_layer(self, hidden_states, *args, **kwargs):
    return hidden_states / 4


def method_of_group_norm(model):
    return scaling(torch.nn.GroupNorm, "forward", 2)


def method_of_layer_norm(model):
    return scaling(torch.nn.LayerNorm, "forward", 2)


def method_of_feed_forward(model):
    return scaling(FeedForward, "forward", 0.5)


def function_of_its_module(model):
    return scaling(transformer_flux, "apply_rotary_emb", 0.5)


def function_in_a_table(model, name=attention_dispatch.AttentionBackendName.NATIVE):
    """Of diffusers' implementations of attention, by name."""
    return item(attention_dispatch._AttentionBackendRegistry._backends, name, halved_native_attention)


@contextmanager
def backend_of_attention(model):
    """A setting that diffusers reads through the `cls` of a class method."""
    other = attention_dispatch.AttentionBackendName._NATIVE_MATH
    with function_in_a_table(model, other), attention_dispatch.attention_backend(other):
        yield


def processors_of_layers(model):
    return on_all(parts(model, Attention, FluxAttention), "processor", lambda _: NoAttention())


def setting_of_processors(model):
    processors = [part.processor for part in parts(model, Attention) if isinstance(part.processor, Weighed)]
    return on_all(processors, "weight", lambda _: 0.5)


def forward_of_layers(model):
    layers = parts(model, FeedForward, FluxAttention)
    return on_all(layers, "forward", lambda layer: types.MethodType(no_layer, layer))


def forward_of_blocks(model):
    """Replaces what stands there, which may be a stand-in of the pack's."""
    blocks = parts(model, BasicTransformerBlock, ResnetBlock2D, FluxSingleTransformerBlock)
    return on_all(blocks, "forward", lambda block: functools.partial(twice, type(block).forward, block))


def twice(forward, *args, **kwargs):
    out = forward(*args, **kwargs)
    return tuple(2 * part for part in out) if isinstance(out, tuple) else 2 * out


def code_of_a_function(model):
    return attribute(embeddings.apply_rotary_emb, "__code__", no_rotary_embedding.__code__)


SWAPS = {
    "unet": [
        method_of_feed_forward,
        method_of_group_norm,
        processors_of_layers,
        setting_of_processors,
        forward_of_layers,
        forward_of_blocks,
    ],
    "dit": [
        method_of_layer_norm,
        function_of_its_module,
        function_in_a_table,
        backend_of_attention,
        code_of_a_function,
    ],
}


# When it is swapped: contexts that are given the model and the swap, and hand out arguments for the call.


@contextmanager
def around_the_call(model, swap):
    with swap(model):
        yield {}


@contextmanager
def by_hooks(model, swap):
    stack = ExitStack()

    def begin(*_):
        stack.enter_context(swap(model))

    def end(*_):
        stack.close()

    handles = model.register_forward_pre_hook(begin), model.register_forward_hook(end, always_call=True)
    try:
        yield {}
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def by_a_wrapper(model, swap):
    own = model.forward

    def forward(*args, **kwargs):
        with swap(model):
            return own(*args, **kwargs)

    with attribute(model, "forward", forward):
        yield {}


@contextmanager
def from_the_second_step_on(model, swap, until=99):
    with ExitStack() as stack:

        def change(pipe, step, time, tensors):
            if step == 0:
                stack.enter_context(swap(model))
            elif step == until:
                stack.close()
            return tensors

        yield {"callback_on_step_end": change}


def in_the_second_step(model, swap):
    return from_the_second_step_on(model, swap, until=1)


WAYS = around_the_call, by_hooks, in_the_second_step
REST = by_a_wrapper, from_the_second_step_on
"""Tested quickly with the first swap of each model."""

LIKE_OTHERS = [
    *(method_of_group_norm, processors_of_layers, setting_of_processors, forward_of_layers),
    *(function_of_its_module, function_in_a_table, code_of_a_function),
]
"""Swaps that cost graphs of their own; each is found as one of the others is, and read in test_current_code.py."""


def _cases():
    """(model, swap, way, what the first accelerated image is, steps)."""
    for kind, swaps in SWAPS.items():
        for swap in swaps:
            for way in (*WAYS, *REST):
                is_quick = swap is swaps[0] or way in WAYS and swap not in LIKE_OTHERS
                name = f"{kind}-{swap.__name__}-{way.__name__}"
                yield pytest.param(
                    kind, swap, way, "plain", STEPS, id=name, marks=() if is_quick else pytest.mark.thorough
                )
    yield pytest.param("unet", method_of_feed_forward, by_hooks, "swapped", STEPS, id="unet-swapped first")
    yield pytest.param("dit", function_of_its_module, by_hooks, "plain", 12, id="dit-in many steps")
    for kind, swap, way in (
        ("unet", setting_of_processors, by_a_wrapper),
        ("dit", function_of_its_module, by_a_wrapper),
        ("dit", method_of_layer_norm, by_hooks),
    ):
        yield thorough(kind, swap, way, "swapped", STEPS)
    yield thorough("unet", method_of_feed_forward, by_hooks, "plain", 12)


def swapped_image(pipe, way, swap, **arguments):
    with way(denoiser(pipe), swap) as given:
        return image(pipe, **given, **arguments)


def hits_of_plain_image(pipe, plain, steps=STEPS, cache=shared):
    """How many calls of blocks ran compiled in an image that must be the plain one: all of those with attention."""
    before = cache.statistics()["hits"]
    assert torch.equal(image(pipe, steps), plain)
    hits = cache.statistics()["hits"] - before
    assert hits >= steps * len(parts(denoiser(pipe), BasicTransformerBlock, FluxSingleTransformerBlock))
    return hits


@pytest.mark.parametrize(("kind", "swap", "way", "first", "steps"), [*_cases()])
def test_swap_between_plain_images_counts_while_it_lasts_and_costs_no_graph_later(
    pipes, kind, swap, way, first, steps, request
):
    pipe, cache, settings = pipes[kind], shared, FAST
    if first == "swapped":
        cache = request.getfixturevalue("empty_cache")
        settings = FAST | {"min_repetitions": 3 if kind == "dit" else 5}
    plain, swapped = image(pipe, steps), swapped_image(pipe, way, swap, steps=steps)
    assert not torch.equal(plain, swapped)
    with accelerated(pipe, **settings):
        if first == "swapped":
            assert torch.equal(swapped_image(pipe, way, swap, steps=steps), swapped)
        assert torch.equal(image(pipe, steps), plain)
        hits = hits_of_plain_image(pipe, plain, steps, cache)
        assert torch.equal(swapped_image(pipe, way, swap, steps=steps), swapped)
        made = graphs()
        assert hits_of_plain_image(pipe, plain, steps, cache) == hits
        assert torch.equal(swapped_image(pipe, way, swap, steps=steps), swapped)
        assert graphs() == made
    assert torch.equal(image(pipe, steps), plain)


@pytest.mark.parametrize(("kind", "swap"), [("unet", method_of_feed_forward), ("dit", function_of_its_module)])
def test_wrapper_from_before_acceleration_swaps_in_those_calls_alone_in_which_it_is_on(pipes, kind, swap):
    pipe = pipes[kind]
    model, active = denoiser(pipe), [False]
    with by_a_wrapper(model, lambda model: swap(model) if active[0] else nullcontext()):

        def made(is_swapped):
            active[0] = is_swapped
            return image(pipe)

        plain, swapped = made(False), made(True)
        assert not torch.equal(plain, swapped)
        with accelerated(pipe, **FAST):
            for is_swapped in (False, True):
                assert torch.equal(made(is_swapped), (plain, swapped)[is_swapped])
            before = graphs()
            for is_swapped in (False, True, True, False):
                assert torch.equal(made(is_swapped), (plain, swapped)[is_swapped])
            assert graphs() == before


@pytest.mark.parametrize("kind", ["unet", thorough("dit")])
def test_swaps_one_after_the_other_and_one_inside_the_other_each_count(pipes, kind):
    pipe = pipes[kind]
    one, other = SWAPS[kind][:2]

    def both(model):
        stack = ExitStack()
        stack.enter_context(one(model))
        stack.enter_context(other(model))
        return stack

    swaps = one, other, both, one, both, other
    expected = [swapped_image(pipe, by_hooks, swap) for swap in swaps]
    plain = image(pipe)
    with accelerated(pipe, **FAST):
        assert torch.equal(image(pipe), plain)
        for swap, out in zip(swaps, expected, strict=True):
            assert torch.equal(swapped_image(pipe, by_hooks, swap), out)
        assert torch.equal(image(pipe), plain)


@pytest.mark.parametrize("way", [by_hooks, by_a_wrapper])
@pytest.mark.parametrize("kind", ["unet", "dit"])
def test_swap_in_one_pipeline_does_not_reach_another_that_shares_its_kinds(pipes, kind, way):
    swap = SWAPS[kind][0]
    both = pipes[kind], pipeline(kind, seed=1)
    plain = [image(pipe) for pipe in both]
    swapped = swapped_image(both[1], way, swap)
    for pipe in both:
        accelerate_pipeline(pipe, **FAST)
    try:
        assert torch.equal(image(both[0]), plain[0])
        for _ in range(2):
            assert torch.equal(swapped_image(both[1], way, swap), swapped)
            made = graphs()
            assert [torch.equal(image(pipe), out) for pipe, out in zip(both, plain, strict=True)] == [True, True]
            assert graphs() == made
    finally:
        for pipe in both:
            restore(pipe)


@pytest.mark.parametrize("first", [thorough("plain"), "swapped"])
@pytest.mark.parametrize("part", ["vae.decoder", thorough("text_encoder")])
def test_model_under_a_swap_outside_of_any_loop_counts_it_in_that_call_alone(pipes, empty_cache, part, first):
    """Of which every call is a run by itself."""
    if part == "vae.decoder":
        pipe, ignores, swap = pipes["unet"], ("unet",), method_of_group_norm
        model, latent = pipe.vae.decoder, torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    else:
        model = zoo.text_encoder(99)
        pipe, ignores = zoo.pipeline("StableDiffusionPipeline", text_encoder=model), ("unet", "vae")
        ids, swap = torch.randint(99, (1, 77), generator=torch.Generator().manual_seed(1)), method_of_layer_norm

    def call(way=None):
        with torch.no_grad(), nullcontext() if way is None else way(model, swap):
            return pipe.vae.decode(latent).sample if part == "vae.decoder" else model(ids)[0]

    plain, swapped = call(), call(by_hooks)
    assert not torch.equal(plain, swapped)
    with accelerated(pipe, backend="eager", ignores=ignores, min_repetitions=3 if part == "vae.decoder" else 1):
        for way in (None, by_hooks) if first == "plain" else (by_hooks, None):
            assert torch.equal(call(way), plain if way is None else swapped)
        made = graphs()
        for way in (by_a_wrapper, around_the_call, by_hooks):
            assert torch.equal(call(way), swapped)
            before = empty_cache.statistics()["hits"]
            assert torch.equal(call(), plain)
            assert empty_cache.statistics()["hits"] > before
        assert graphs() == made
