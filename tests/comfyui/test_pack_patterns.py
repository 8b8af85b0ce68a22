"""What other packs do to a model, beside Accelerate Model and DeepCache in either order, and gone again.

Each way in which packs act on a model is a stand-in for those that do it so.
"""

import contextlib
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass

import comfy.model_management
import comfy.ops
import comfy.samplers
import pytest
import torch
from comfy.ldm.modules.attention import BasicTransformerBlock, CrossAttention, FeedForward, SpatialTransformer
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.report.run_record import records
from kit import tiny_models
from kit.code_swaps import attribute, scaled
from kit.compiled import graphs
from kit.deep_cache import last_run
from kit.step_cache import every
from kit.thorough import thorough_except, todays


@dataclass(frozen=True)
class Pattern:
    """One way.

    on: what a node does to a model. installed: the context in which the pack is there, or has left something, from the
    model. eager: codes of the reasons why blocks run uncompiled. skips: whether DeepCache does. changes: the image.
    """

    on: Callable = lambda model: model
    installed: Callable = contextlib.nullcontext
    eager: tuple[str, ...] = ()
    skips: bool = True
    changes: bool = True


def parts(model, cls: type) -> list[tuple[str, torch.nn.Module]]:
    """(path from the model, module) of those of a class. model: may be the network itself."""
    found = (model if isinstance(model, torch.nn.Module) else model.model.diffusion_model).named_modules()
    return [(f"diffusion_model.{path}", part) for path, part in found if isinstance(part, cls)]


def patched(model, cls: type, **make: Callable):
    """A clone with object patches on each part of a class; make: values by name, from the part and what is there."""
    model = model.clone()
    for path, part in parts(model, cls):
        for name, value in make.items():
            model.add_object_patch(f"{path}.{name}", value(part, model.get_model_object(f"{path}.{name}")))
    return model


def all_of(model, cls, name, make):
    """The context in which each part of a class has another attribute."""
    stack = contextlib.ExitStack()
    for _, part in parts(model, cls):
        stack.enter_context(attribute(part, name, make(part, getattr(part, name, None))))
    return stack


def in_calls(swap):
    """A wrapper around the model, in which the swap is made for the length of each call."""

    def on(model):
        def call(executor, *args, **kwargs):
            with swap(executor.class_obj):
                return executor(*args, **kwargs)

        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "a pack", call)
        return model

    return on


# Forwards on instances


def in_chunks(self, x):
    """A feed-forward over parts of the tokens."""
    return torch.cat([self.net(part) for part in x.chunk(self.chunks, dim=1)], 1) * self.strength


class Chunks:
    """Binds a function to a part, which leaves its settings there in each call."""

    def __init__(self, chunks, strength):
        self.chunks, self.strength = chunks, strength

    def __get__(self, part, owner=None):
        def forward(module, *args, **kwargs):
            module.chunks, module.strength = self.chunks, self.strength
            return in_chunks(module, *args, **kwargs)

        return types.MethodType(forward, part)


def around(part, own):
    """A function around the part's own forward."""

    def forward(x):
        return own(torch.cat((x, x[:1])))[:-1] * 0.9

    return forward


def with_the_last(part, own):
    """Something of the last call in each."""
    last = None

    def forward(x):
        nonlocal last
        out, before = own(x), last
        last = out
        return out if before is None else out + 0.1 * before

    return forward


# Classes


class OtherAttention(CrossAttention):
    def forward(self, x, *args, **kwargs):
        return super().forward(x * self.amount, *args, **kwargs) * 0.9


class OtherBlock(BasicTransformerBlock):
    def forward(self, x, *args, **kwargs):
        return super().forward(x, *args, **kwargs) + 0.01 * self.idx


def other_classes(model):
    """The classes of blocks and of their parts changed where they are, with numbers on them."""
    for cls, name in ((BasicTransformerBlock, "idx"), (CrossAttention, "amount")):
        for _, part in parts(model, cls):
            part.__dict__.setdefault(name, None)  # core patches what is there
    model = patched(model, CrossAttention, __class__=lambda part, _: OtherAttention, amount=lambda part, _: 1.1)
    return patched(model, BasicTransformerBlock, __class__=lambda part, _: OtherBlock, idx=lambda part, _: 3)


class Counter:
    calls = 0


def keeping_on_object(function):
    kept = Counter()

    def forward(self, *args, **kwargs):
        out, before = function(self, *args, **kwargs), getattr(kept, "last", None)
        kept.last = out
        return out if before is None or before.shape != out.shape else out + 0.1 * before

    return forward


def of_class(cls, wrap):
    return lambda model: attribute(cls, "forward", wrap(cls.forward))


# Lists of blocks, and the model


class AllAtOnce(torch.nn.Module):
    """What a pack has in the place of a list of blocks: it calls them, and may leave some out."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x, *args, **kwargs):
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x * 0.9


def list_as_one(part, blocks):
    return torch.nn.ModuleList([AllAtOnce(blocks)])


def model_forward(model):
    """The forward of the whole model bound anew."""
    model, own = model.clone(), model.get_model_object("diffusion_model.forward")
    model.add_object_patch(
        "diffusion_model.forward",
        types.MethodType(lambda self, x, *args, **kwargs: own(x * 0.95, *args, **kwargs), model.model.diffusion_model),
    )
    return model


# Hooks, and what is replaced everywhere


def hooks(cls):
    def on(model):
        stack = contextlib.ExitStack()
        for _, part in parts(model, cls):
            stack.callback(part.register_forward_hook(lambda part, args, out: out * 0.95).remove)
        return stack

    return on


def everywhere(owner, name, make):
    """A function of core's replaced, as by an import."""
    return lambda model: attribute(owner, name, make(getattr(owner, name)))


def weaker(function):
    return functools.wraps(function)(scaled(function, 0.95))


def sampling(function):
    """Both predictions asked for by the pack itself."""

    def call(model, x, timestep, uncond, cond, cond_scale, model_options={}, seed=None):  # noqa: B006
        given = model, [cond, uncond], x, timestep, model_options
        cond, uncond = comfy.samplers.calc_cond_batch(*given)
        return uncond + (cond - uncond) * cond_scale * 0.9

    return call


# What is left behind


def left(name, make):
    return lambda model: all_of(model, CrossAttention, name, make)


PATTERNS = {
    "part bound": Pattern(
        lambda model: patched(model, FeedForward, forward=lambda part, _: Chunks(2, 0.9).__get__(part))
    ),
    "part left": Pattern(installed=lambda model: all_of(model, torch.nn.LayerNorm, "forward", around)),
    "part with the last": Pattern(lambda model: patched(model, FeedForward, forward=with_the_last)),
    "classes": Pattern(other_classes),
    "part's class keeps on an object": Pattern(
        installed=of_class(CrossAttention, keeping_on_object), eager=("keeps_state",)
    ),
    "list in one in the call": Pattern(
        in_calls(lambda net: all_of(net, SpatialTransformer, "transformer_blocks", list_as_one))
    ),
    "model's forward": Pattern(model_forward),
    "hooks of parts": Pattern(installed=hooks(CrossAttention)),
    "sampling function": Pattern(installed=everywhere(comfy.samplers, "sampling_function", sampling)),
    "cast of layers": Pattern(installed=of_class(comfy.ops.disable_weight_init.Linear, weaker)),
    "tensor left": Pattern(installed=left("of_a_pack", lambda part, _: torch.ones(2)), changes=False),
}


cache = GraphCache()
"""One for the file: what a pack leaves alone is compiled once."""


@pytest.fixture(scope="module")
def model():
    model = tiny_models.small_unet()
    tiny_models.sample(fast(model), 64, 96)
    return model


def fast(model):
    return accelerate(model, CompileSettings(backend="eager"), cache)


def image(pattern, base, model, size=0):
    with pattern.installed(base):
        return tiny_models.sample(model, *((64, 96), (80, 64))[size], batch=1 + size, steps=4)


def assert_close(one, other):
    assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def why_eager():
    run = records.last()
    return {why.code for why in run.why_uncompiled()}


QUICK = {*PATTERNS} - {"model's forward", "sampling function", "cast of layers"}
"""With one of the others each day."""


@pytest.mark.parametrize("name", thorough_except(PATTERNS, *QUICK, *todays(sorted({*PATTERNS} - QUICK), 1)))
def test_image_beside_what_packs_do_is_the_uncompiled_one_in_either_order_and_blocks_are_compiled_again_without(
    model, name
):
    pattern = PATTERNS[name]
    plain = tiny_models.sample(model, 64, 96, steps=4)
    made, said = [], set()
    for size in (0, 1):
        expected = image(pattern, model, pattern.on(model), size)
        for accelerated in (fast(pattern.on(model)), pattern.on(fast(model))):
            assert_close(image(pattern, model, accelerated, size), expected)
            made.append(graphs())
            said |= why_eager()
        if size == 0:
            assert torch.equal(expected, plain) != pattern.changes
            full = expected
    assert made[0] == made[-1]
    assert said == set(pattern.eager)
    deep = image(pattern, model, apply_deep_cache(pattern.on(model), every(2)))
    assert (last_run()["skipped_steps"] > 0) == pattern.skips
    for other in (
        pattern.on(apply_deep_cache(model, every(2))),
        fast(apply_deep_cache(pattern.on(model), every(2))),
        pattern.on(apply_deep_cache(fast(model), every(2))),
    ):
        assert_close(image(pattern, model, other), deep)
    assert torch.equal(image(pattern, model, pattern.on(apply_deep_cache(model, every(1)))), full)
    compiled = graphs()
    records.clear()
    assert torch.equal(tiny_models.sample(fast(model), 64, 96, steps=4), plain)
    assert why_eager() == set() and graphs() == compiled
