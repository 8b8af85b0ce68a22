"""Code that others replace while a pipeline runs, and put back: every image is the plain pipeline's, bit for bit."""

import functools
from contextlib import ExitStack, contextmanager, nullcontext

import diffusers
import pytest
import torch
from comfy_accel.accel import accelerate_pipeline, accelerated, restore
from comfy_accel.accel.cache.graph_cache import shared
from diffusers.models import attention_dispatch
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers import transformer_flux
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxSingleTransformerBlock
from kit import deep_transformers
from kit import pipeline_zoo as zoo
from kit.code_swaps import all_of, attribute, in_hooks, item, scaling
from kit.compiled import graphs
from torch.nn import functional

FAST = {"ignores": ("vae",), "backend": "eager", "min_repetitions": 3}
"""Leaves two kinds of the UNet's blocks to compile: BasicTransformerBlock and one of ResnetBlock2D."""

STEPS = 3


def image(pipe, steps=STEPS, **given):
    """The latent of one call, the same for the same arguments."""
    size = {"width": 32, "height": 32, "num_inference_steps": steps, "output_type": "latent"}
    return pipe(**size, **zoo.prompt(pipe), generator=torch.Generator().manual_seed(1), **given)[0]


def denoiser(pipe):
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def unet(seed=0):
    torch.manual_seed(seed)
    layout = {"block_out_channels": (8,), "attention_head_dim": 4, **zoo.UNET, "layers_per_block": 2}
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    return diffusers.UNet2DConditionModel(**layout, **blocks).eval()


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


# What is swapped: contexts that are given the model. All else that code may read is in test_current_code.py.


def on_all(holders, name, make):
    return all_of(*(functools.partial(attribute, holder, name, make(holder)) for holder in holders))()


def parts(model, *classes):
    return [part for part in model.modules() if isinstance(part, classes)]


attend = functional.scaled_dot_product_attention


def halved_native_attention(query, key, value, attn_mask=None, **_):
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return attend(query, key, value, attn_mask).transpose(1, 2) / 2


class NoAttention:
    def __call__(self, attn, hidden_states, *args, **kwargs):
        return hidden_states / 2


def method_of_group_norm(model):
    return scaling(torch.nn.GroupNorm, "forward", 2)


def method_of_feed_forward(model):
    return scaling(FeedForward, "forward", 0.5)


def function_of_its_module(model):
    return scaling(transformer_flux, "apply_rotary_emb", 0.5)


@contextmanager
def backend_of_attention(model):
    """A setting that diffusers reads through the `cls` of a class method."""
    other = attention_dispatch.AttentionBackendName._NATIVE_MATH
    backends = attention_dispatch._AttentionBackendRegistry._backends
    with item(backends, other, halved_native_attention), attention_dispatch.attention_backend(other):
        yield


def processors_of_layers(model):
    return on_all(parts(model, Attention, FluxAttention), "processor", lambda _: NoAttention())


SWAPS = [
    *(("unet", method_of_feed_forward), ("dit", backend_of_attention), ("unet", processors_of_layers)),
    ("dit", function_of_its_module),
]


# When it is swapped: contexts that are given the model and the swap, and hand out arguments for the call.


@contextmanager
def around_the_call(model, swap):
    with swap(model):
        yield {}


@contextmanager
def by_hooks(model, swap):
    with in_hooks(model, model, functools.partial(swap, model)):
        yield {}


@contextmanager
def by_a_wrapper(model, swap):
    own = model.forward

    def forward(*args, **kwargs):
        with swap(model):
            return own(*args, **kwargs)

    with attribute(model, "forward", forward):
        yield {}


@contextmanager
def from_the_second_step_on(model, swap):
    with ExitStack() as stack:

        def change(pipe, step, time, tensors):
            if step == 0:
                stack.enter_context(swap(model))
            return tensors

        yield {"callback_on_step_end": change}


WAYS = around_the_call, by_hooks, by_a_wrapper, from_the_second_step_on


def swapped_image(pipe, way, swap, **arguments):
    with way(denoiser(pipe), swap) as given:
        return image(pipe, **given, **arguments)


def hits_of_plain_image(pipe, plain):
    """How many calls of blocks ran compiled in an image that must be the plain one: all of those with attention."""
    before = shared.statistics()["hits"]
    assert torch.equal(image(pipe), plain)
    hits = shared.statistics()["hits"] - before
    assert hits >= STEPS * len(parts(denoiser(pipe), BasicTransformerBlock, FluxSingleTransformerBlock))
    return hits


# Each place with one swap; what is swapped is a matter of the engine.
@pytest.mark.parametrize(("way", "kind", "swap"), [(way, *swap) for way, swap in zip(WAYS, SWAPS, strict=True)])
def test_swap_between_plain_images_counts_while_it_lasts_and_costs_no_graph_later(pipes, way, kind, swap):
    pipe = pipes[kind]
    plain, swapped = image(pipe), swapped_image(pipe, way, swap)
    assert not torch.equal(plain, swapped)
    with accelerated(pipe, **FAST):
        hits = hits_of_plain_image(pipe, plain)
        assert torch.equal(swapped_image(pipe, way, swap), swapped)
        made = graphs()
        assert hits_of_plain_image(pipe, plain) == hits
        assert torch.equal(swapped_image(pipe, way, swap), swapped)
        assert graphs() == made
    assert torch.equal(image(pipe), plain)


def test_swap_in_one_pipeline_does_not_reach_another_that_shares_its_kinds(pipes):
    way, kind, swap = by_a_wrapper, "unet", method_of_feed_forward
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


def test_model_under_a_swap_outside_of_any_loop_counts_it_in_that_call_alone(pipes):
    """Of which every call is a run by itself."""
    pipe = pipes["unet"]
    model, latent = pipe.vae.decoder, torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))

    def call(way=None):
        with torch.no_grad(), nullcontext() if way is None else way(model, method_of_group_norm):
            return pipe.vae.decode(latent).sample

    plain, swapped = call(), call(by_hooks)
    assert not torch.equal(plain, swapped)
    with accelerated(pipe, backend="eager", ignores=("unet",), min_repetitions=3):
        for way in (by_hooks, None, by_a_wrapper, None, around_the_call, None):
            assert torch.equal(call(way), plain if way is None else swapped)
