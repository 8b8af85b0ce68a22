"""Attention that is not torch's own, by a flag of the command line or by an override of another node: blocks run
compiled and call what is there, and another function compiles nothing."""

import functools

import comfy.ldm.modules.attention as core
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui import attention
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from kit import tiny_models
from kit.compiled import graphs
from kit.families import FAMILIES
from kit.other_nodes import image_prompt
from kit.thorough import thorough_except

SETTINGS = CompileSettings(backend="eager")


@torch.compiler.disable
def kernel(q, k, v, mask=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def like_sage(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """As core's: a kernel that no compiler can look into."""
    q, k, v = (t if skip_reshape else t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    out = kernel(q, k, v, mask if mask is None or mask.ndim > 3 else mask.view(-1, 1, *mask.shape[-2:]))
    return out if skip_output_reshape else out.transpose(1, 2).flatten(-2)


def halved(function, *args, **kwargs):
    return function(*args, **kwargs) * 0.5


def by_block(function, *args, **kwargs):
    """As a node that keeps its hands off some blocks: it goes by what core says of the block."""
    options = kwargs["transformer_options"]
    index = options["block"][1] if "block" in options else options.get("block_index", 0)
    return function(*args, **kwargs) * (0.9 + 0.1 * index) * float(options["sigmas"][0].clamp(max=2))


class Patched:
    def __call__(self, function, *args, **kwargs):
        return like_sage(*args, **{**kwargs, "tensor_layout": "HND"})


def overridden(model, override):
    model = model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = override
    return model


class Tiny:
    """A model that is sampled plain and accelerated at one of two sizes."""

    def __init__(self, model, sample):
        self.model, self._sample, self.cache = model, sample, GraphCache()

    def assert_same(self, change=lambda model: model, size=0):
        expected = self._sample(change(self.model), size)
        out = self._sample(accelerate(change(self.model), SETTINGS, self.cache), size)
        assert torch.equal(out, expected) and fallbacks.rows() == []
        return expected


def _unet():
    return Tiny(
        tiny_models.small_unet(),
        lambda model, size: tiny_models.sample(model, *((64, 96), (80, 64))[size], batch=1 + size, steps=2),
    )


def _family(case):
    return Tiny(case.load(), lambda model, size: torch.cat([t.flatten() for t in case.sample(model, size, steps=1)]))


# SD1.5's UNet is in the other tests, and what a core lacks is in none.
KINDS = ["SD1.5", "Flux", "Wan", *(name for name in ("MiniMax H3",) if FAMILIES[name].is_known)]


@pytest.fixture(params=thorough_except(KINDS, "Wan", "MiniMax H3"))
def tiny(request):
    return _family(FAMILIES[request.param])


def test_override_is_called_from_compiled_blocks_and_another_compiles_nothing(tiny):
    plain = tiny.assert_same()
    first = graphs()
    images = [tiny.assert_same(functools.partial(overridden, override=halved))]
    compiled = graphs()
    assert first < compiled <= 2 * first
    for override in (by_block, Patched(), halved):
        images.append(tiny.assert_same(functools.partial(overridden, override=override)))
    tiny.assert_same(functools.partial(overridden, override=by_block), size=1)
    assert torch.equal(images[0], images[-1]) and not any(torch.equal(image, plain) for image in images[:2])
    tiny.assert_same()
    assert graphs() == compiled


@pytest.fixture
def flagged(monkeypatch):
    """Has core call another attention function, as started with another flag."""
    places = [(module, name) for module, name, function in attention._places() if function is core.attention_pytorch]

    def change(function):
        for module, name in places:
            monkeypatch.setattr(module, name, core.wrap_attn(function))

    return change


def test_attention_of_a_flag_is_called_from_compiled_blocks_and_another_compiles_nothing(tiny, flagged):
    flagged(like_sage)
    tiny.assert_same()
    compiled = graphs()
    assert compiled > 0
    tiny.assert_same(size=1)
    flagged(functools.wraps(like_sage)(lambda *args, **kwargs: like_sage(*args, **kwargs) * 0.5))
    tiny.assert_same()
    assert graphs() == compiled
    tiny.assert_same(functools.partial(overridden, override=by_block))


class Preferred(torch.nn.Module):
    """As a current core has one in each attention layer; `function` is what the checkpoint asks of the layer."""

    function = None


class Asking(core.CrossAttention):
    """Gives it to the attention function, in containers that may free a tensor early."""

    def forward(self, x, context=None, value=None, mask=None, transformer_options=None):
        context = x if context is None else context
        given = self.to_q(x), self.to_k(context), self.to_v(context if value is None else value)
        asked = {"preferred_attention": self.comfy_attention, "transformer_options": transformer_options}
        return self.to_out(optimized_attention(*map(Container, given), self.heads, mask=mask, **asked))


class Container:
    """As core's."""

    def __init__(self, tensor):
        self.tensor = tensor

    def peek(self):
        return self.tensor

    def take(self):
        return self.tensor


def as_wrapped_by_a_current_core(function):
    def wrapper(q, k, v, *args, preferred_attention=None, **kwargs):
        override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
        preferred = preferred_attention.function if preferred_attention is not None else None
        if override is None and preferred is not None:
            return preferred(q, k, v, *args, **kwargs)
        q, k, v = (t.take() for t in (q, k, v)) if type(q) is Container else (q, k, v)
        return function(q, k, v, *args, **kwargs) if override is None else override(function, q, k, v, *args, **kwargs)

    return wrapper


optimized_attention = as_wrapped_by_a_current_core(like_sage)


def doubled(q, k, v, heads, mask=None, **kwargs):
    return core.attention_pytorch(q.take(), k.take(), v.take(), heads, mask=mask) * 2


def test_layer_that_prefers_a_function_has_it_in_its_graph_and_others_call_that_of_the_flag():
    tiny = _unet()
    layers = [part for part in tiny.model.model.modules() if type(part) is core.CrossAttention]
    for layer in layers:
        layer.__class__, layer.comfy_attention = Asking, Preferred()
    plain = tiny.assert_same()
    compiled = graphs()
    tiny.assert_same(functools.partial(overridden, override=halved))
    for layer in layers[: len(layers) // 2]:
        layer.comfy_attention.function = doubled
    image = tiny.assert_same()
    assert not torch.equal(image, plain) and graphs() > compiled
    tiny.assert_same(functools.partial(overridden, override=halved))


def test_override_that_gives_something_else_than_attention_runs_with_uncompiled_blocks():
    tiny, calls = _unet(), []

    def odd(function, *args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)[:, :1]

    def sampled(change):
        return tiny._sample(accelerate(change(tiny.model), SETTINGS, tiny.cache), 0)

    expected, own = tiny._sample(overridden(tiny.model, odd), 0), len(calls)
    assert torch.equal(sampled(functools.partial(overridden, override=odd)), expected)
    assert "another node replaces its attention" in str(fallbacks.rows())
    assert len(calls) < 3 * own
    fallbacks._calls.clear()
    tiny.assert_same(functools.partial(overridden, override=halved))


PLACES = [("input", 2), ("output", 0), ("output", 1)]
prompted = functools.partial(image_prompt, blocks=PLACES)


def test_image_prompt_is_called_from_compiled_blocks_and_another_compiles_nothing():
    tiny, seen = _unet(), []
    plain = tiny.assert_same()
    first = graphs()
    image = tiny.assert_same(functools.partial(prompted, seen=seen))
    compiled = graphs()
    assert compiled == first + 1 and not torch.equal(image, plain)
    other = tiny.assert_same(functools.partial(prompted, start=1.0))  # in the later steps alone
    assert not torch.equal(other, image)
    tiny.assert_same(prompted, size=1)
    tiny.assert_same()
    assert graphs() == compiled
    assert {block for block, _ in seen} == {*PLACES}


def test_replacement_that_gives_something_else_than_attention_runs_with_uncompiled_blocks():
    tiny = _unet()

    def odd(model):
        model = model.clone()
        model.set_model_attn2_replace(lambda q, k, v, options: q[:, :1], "output", 0)
        return model

    expected = tiny._sample(odd(tiny.model), 0)
    assert torch.equal(tiny._sample(accelerate(odd(tiny.model), SETTINGS, tiny.cache), 0), expected)
    assert "another node replaces its attention" in str(fallbacks.rows())


def test_image_prompt_beside_another_attention(flagged):
    """IP-Adapter and SageAttention, which many have together."""
    tiny = _unet()
    tiny.assert_same(lambda model: overridden(prompted(model), by_block))
    flagged(like_sage)
    tiny.assert_same(prompted)


class Kept:
    """A replacement that keeps what it gave in the first step, or was given, and uses it in the later ones."""

    def __init__(self, what):
        self.what, self.kept, self.calls = what, {}, 0

    def __call__(self, q, k, v, options):
        place, sigma = (options["block"], options["block_index"]), float(options["sigmas"][0])
        first, known = self.kept.get(place, (sigma, None))
        if self.what == "calls":
            self.calls += 1
            return core.attention_pytorch(q, k, v, options["n_heads"]) * (1.5 if self.calls % 2 else 0.5)
        if sigma == first:
            out = core.attention_pytorch(q, k, v, options["n_heads"])
            self.kept[place] = sigma, (out if self.what == "output" else (k, v))
            return out
        if self.what == "output":
            return known
        keys, values = (torch.cat(pair, 1) for pair in zip((k, v), known, strict=True))
        return core.attention_pytorch(q, keys, values, options["n_heads"])


def named_as_cores(kept):
    """A function around it that has taken over the name and the module of core's."""

    @functools.wraps(core.attention_pytorch)
    def function(q, k, v, options):
        return kept(q, k, v, options)

    return function


@pytest.mark.parametrize(
    "what, around, backend",
    [
        ("output", None, "inductor"),
        ("keys", None, "inductor"),
        ("calls", None, "eager"),
        ("keys", named_as_cores, "eager"),
    ],
)
def test_function_that_keeps_tensors_or_count_gives_what_it_gives_uncompiled(what, around, backend):
    """A graph uses its memory again, and comparing it with its block would call the function twice."""
    model, cache = tiny_models.small_unet(), GraphCache()

    def sampled(change=lambda model: model):
        function = Kept(what) if around is None else around(Kept(what))
        replaced = model.clone()
        for place in PLACES:
            replaced.set_model_attn1_replace(function, *place)
        return tiny_models.sample(change(replaced), 64, 96, steps=3)

    compiled = CompileSettings(backend=backend, measured=True)
    out, expected = sampled(lambda model: accelerate(model, compiled, cache)), sampled()
    assert (out - expected).abs().max() < 1e-4 * expected.abs().max()
    assert not any("BasicTransformerBlock" in str(row) for row in fallbacks.rows())
