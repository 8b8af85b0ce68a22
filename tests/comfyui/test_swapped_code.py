"""Code that other nodes replace while a model runs, and put back: each image is that of the code that is there."""

import functools
import itertools
import threading
import types
from contextlib import ExitStack, contextmanager, nullcontext

import comfy.ops
import pytest
import torch
from comfy.ldm.modules import attention
from comfy.ldm.modules.diffusionmodules import openaimodel
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.controlnet import accelerate_control
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.modules.blocks import blocks
from comfy_accel.accel.store import location
from comfy_accel.accel.store.graph_store import GraphStore
from comfy_accel.accel.store.key import key_digest
from kit import code_swaps, tiny_models
from kit.captures import EAGER_BLOCKS, capturing_cache
from kit.code_swaps import (
    SWAPS,
    all_of,
    assert_calls_follow_the_code,
    attribute,
    functions_of,
    scaled,
    scaling,
    that_give_tensors,
)
from kit.compiled import graphs
from kit.controls import CONTROLS
from kit.deep_cache import last_run, split_chunks
from kit.step_cache import every
from kit.thorough import thorough_except, tuples_except
from kit.zoo import Noise, Size

STEPS = 3
EAGER = CompileSettings(backend="eager")

_aot_eager = torch._dynamo.lookup_backend("aot_eager")


def operators_alone(graph, inputs):
    """A backend whose graphs call operators, as inductor's do; those of the plainest one call torch's functions by
    their names, and so whatever is there."""
    with torch._functorch.config.patch(enable_autograd_cache=False):
        return _aot_eager(graph, inputs)


torch._dynamo.register_backend(operators_alone, "operators_alone")
OPERATORS = CompileSettings(backend="operators_alone")

cache = GraphCache()
"""One for the file, in which code of each sort is compiled once."""


@pytest.fixture(scope="module")
def model():
    return tiny_models.small_unet()


def image(model, **changes) -> torch.Tensor:
    return tiny_models.sample(model, **({"width": 64, "height": 64, "steps": STEPS} | changes))


def fast(model, cache=cache, how=EAGER):
    return accelerate(model, how, cache)


# Swaps


def over_larger_groups(self, x):
    return torch.nn.functional.group_norm(x, self.num_groups // 2, self.weight, self.bias, self.eps)


def norms_swapped():
    """Where motion models put a norm over all frames."""
    ours = comfy.ops.disable_weight_init.GroupNorm
    places = (torch.nn.GroupNorm, "forward"), (ours, "forward"), (ours, "forward_comfy_cast_weights")
    return all_of(*(functools.partial(attribute, owner, name, over_larger_groups) for owner, name in places))()


def attention_swapped():
    return scaling(attention, "optimized_attention", 0.5)


# Places: (model, swap, when) → a context with the model that has the swap where `when` says so, by the number of the
# call, and with what its sampler is told.


def always(number: int) -> bool:
    return True


def first_only(number: int) -> bool:
    return number == 0


def last_only(number: int) -> bool:
    return number == STEPS - 1


def every_other(number: int) -> bool:
    return number % 2 == 1


TIMES = [always, first_only, last_only, every_other]


class Swapping:
    """Called once for each call of something: the swap in those that `when` chooses, and nothing in the others."""

    def __init__(self, swap, when):
        self._swap, self._when, self._numbers = swap, when, itertools.count()

    def __call__(self):
        return self._swap() if self._when(next(self._numbers)) else nullcontext()


def wrapping(call, name=WrappersMP.DIFFUSION_MODEL):
    """The place of a wrapper of core's: `call` is given the swapping, the executor and its arguments."""

    @contextmanager
    def place(model, swap, when=always):
        changed = model.clone()
        changed.add_wrapper_with_key(name, "test", functools.partial(call, Swapping(swap, when)))
        yield changed, {}

    return place


def throughout(swapping, executor, *args, **kwargs):
    with swapping():
        return executor(*args, **kwargs)


def by_another_thread(swapping, executor, *args, **kwargs):
    """It begins to swap before each call of the model, and puts back after it."""
    begun, over = threading.Event(), threading.Event()

    def hold():
        with swapping():
            begun.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    try:
        return executor(*args, **kwargs)
    finally:
        over.set()
        thread.join()


def in_one_of_two_calls(swapping, executor, *args, **kwargs):
    plain = executor(*args, **kwargs)
    with swapping():
        return (plain + executor(*args, **kwargs)) / 2


@contextmanager
def of_one_prompt(which, model, swap, when=always):
    """Both prompts are predicted in calls of their own; one has the swap."""

    def call(swapping, executor, x, timesteps, context, y, control, options, **kwargs):
        assert len(options["cond_or_uncond"]) == 1
        with swapping() if options["cond_or_uncond"] == [which] else nullcontext():
            return executor(x, timesteps, context, y, control, options, **kwargs)

    with attribute(model.model, "memory_required", model.model.memory_required):
        with wrapping(call)(model, swap, when) as (changed, told):
            yield split_chunks(changed), told


@contextmanager
def in_model_function(model, swap, when=always):
    changed, swapping = model.clone(), Swapping(swap, when)

    def call(apply_model, args):
        with swapping():
            return apply_model(args["input"], args["timestep"], **args["c"])

    changed.set_model_unet_function_wrapper(call)
    yield changed, {}


@contextmanager
def from_a_step_on(model, swap, when=always):
    """By the sampler's callback after the first step, until the run is over."""
    with ExitStack() as stack:

        def callback(step, *_):
            if step == 0:
                stack.enter_context(swap())

        yield model, {"callback": callback}


@contextmanager
def until_a_step(model, swap, when=always):
    """From before the run until the sampler's callback after the first step."""
    with ExitStack() as stack:
        stack.enter_context(swap())
        yield model, {"callback": lambda step, *_: stack.close()}


@contextmanager
def in_hooks(first, last, swap, when=always):
    """From before the call of a module until after that of another, or of the same."""
    swapping = Swapping(swap, when)
    with ExitStack() as held:

        def begin(*_):
            held.enter_context(swapping())

        handles = first.register_forward_pre_hook(begin), last.register_forward_hook(lambda *_: held.close())
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def between_hooks(start, end, model, swap, when=always):
    network = model.model.diffusion_model
    with in_hooks(network.get_submodule(start), network.get_submodule(end), swap, when):
        yield model, {}


@contextmanager
def between_patches(model, swap, when=always):
    """From an input block until an output block of the same call."""
    changed, swapping = model.clone(), Swapping(swap, when)
    with ExitStack() as held:

        def begin(h, options):
            if options["block"] == ("input", 1):
                held.enter_context(swapping())
            return h

        def end(h, skip, options):
            if options["block"] == ("output", 1):
                held.close()
            return h, skip

        changed.set_model_input_block_patch(begin)
        changed.set_model_output_block_patch(end)
        yield changed, {}


RES_BLOCKS = [f"output_blocks.{number}.0" for number in range(2)]


def wrappers(*names):
    return {name: wrapping(throughout, getattr(WrappersMP, name)) for name in names if hasattr(WrappersMP, name)}


PER_STEP = wrappers("PREDICT_NOISE", "CALC_COND_BATCH", "APPLY_MODEL", "DIFFUSION_MODEL") | {
    "a model function": in_model_function,
    "another thread": wrapping(by_another_thread),
    "hooks around the network": functools.partial(between_hooks, "", ""),
    "hooks around blocks": functools.partial(between_hooks, *RES_BLOCKS),
    "hooks of one block": functools.partial(between_hooks, RES_BLOCKS[1], RES_BLOCKS[1]),
    "hooks between blocks": functools.partial(between_hooks, "input_blocks.1.0", "output_blocks.0.1"),
    "patches between blocks": between_patches,
    "one of two calls of the network": wrapping(in_one_of_two_calls),
    "the calls for the prompt": functools.partial(of_one_prompt, 0),
    "the calls for the negative prompt": functools.partial(of_one_prompt, 1),
}
ONCE = {"from a step on": from_a_step_on, "until a step": until_a_step}
PLACES = wrappers("OUTER_SAMPLE", "SAMPLER_SAMPLE") | PER_STEP | ONCE

ORDERS = ["accelerated first", "accelerated last"]
orders = pytest.mark.parametrize("order", ORDERS)


def swapped_image(model, place, swap, when=always, order=None, cache=cache, how=EAGER, **changes):
    """order: where the accelerating node is; None for none."""
    if order == "accelerated first":
        model = fast(model, cache, how)
    with place(model, swap, when) as (changed, told):
        if order == "accelerated last":
            changed = fast(changed, cache, how)
        return image(changed, **told, **changes)


def hits(cache=cache) -> int:
    return cache.statistics()["hits"]


def assert_images_follow_the_code(model, place, swap, order, when=always, how=EAGER):
    plain, swapped = image(model), swapped_image(model, place, swap, when)
    assert not torch.equal(plain, swapped)
    before = hits()
    assert torch.equal(image(fast(model, cache, how)), plain)
    compiled_calls = hits() - before
    assert compiled_calls
    assert torch.equal(swapped_image(model, place, swap, when, order, cache, how), swapped)
    compiled = graphs()
    assert torch.equal(swapped_image(model, place, swap, when, order, cache, how), swapped)
    before = hits()
    assert torch.equal(image(fast(model, cache, how)), plain)
    assert hits() - before == compiled_calls
    assert graphs() == compiled


# Where


# Quick: each place with the accelerating node on one side of it.
@pytest.mark.parametrize(
    ("place", "order"),
    tuples_except(itertools.product(PLACES, ORDERS), *zip(PLACES, itertools.cycle(ORDERS), strict=False)),
)
def test_image_with_code_swapped_anywhere_is_the_plain_one_and_nothing_is_compiled_again(model, place, order):
    assert_images_follow_the_code(model, PLACES[place], norms_swapped, order)


@pytest.mark.parametrize("order", thorough_except(ORDERS, "accelerated first"))
@pytest.mark.parametrize("when", TIMES[1:], ids=lambda when: when.__name__)
@pytest.mark.parametrize("place", ["CALC_COND_BATCH", "DIFFUSION_MODEL", "a model function", "patches between blocks"])
def test_image_with_code_swapped_in_some_steps_is_the_plain_one(model, place, when, order):
    assert_images_follow_the_code(model, PLACES[place], norms_swapped, order, when)


@orders
@pytest.mark.parametrize("outer", ["DIFFUSION_MODEL", "a model function"])
@pytest.mark.parametrize("when", [always, every_other], ids=lambda when: when.__name__)
def test_image_with_the_swaps_of_two_nodes_within_each_other_has_both(model, when, outer, order):
    """Of two functions, or of the same one."""
    inner = norms_swapped if outer == "DIFFUSION_MODEL" else attention_swapped

    @contextmanager
    def both(model, swap, when):
        with PLACES[outer](model, attention_swapped) as (once, _):
            with PLACES["DIFFUSION_MODEL"](once, swap, when) as (twice, _):
                yield twice, {}

    assert_images_follow_the_code(model, both, inner, order, when)


@pytest.mark.parametrize("order", thorough_except(ORDERS, "accelerated first"))
def test_first_run_with_swapped_code_leaves_the_graphs_of_the_plain_model_as_they_would_be(order):
    """Whatever is traced first."""
    model, own = tiny_models.res_blocks(model_channels=64), GraphCache()
    place, plain = PLACES["DIFFUSION_MODEL"], image(model)
    swapped = swapped_image(model, place, norms_swapped)
    for _ in range(2):
        assert torch.equal(swapped_image(model, place, norms_swapped, order=order, cache=own), swapped)
        assert torch.equal(image(fast(model, own)), plain)
    compiled, before = graphs(), hits(own)
    other = tiny_models.res_blocks(model_channels=64, seed=1)
    assert torch.equal(image(fast(other, own)), image(other))
    assert graphs() == compiled and hits(own) > before


def test_swap_by_one_model_is_not_in_the_image_of_another_that_shares_its_kinds():
    one, other, own = tiny_models.res_blocks(), tiny_models.res_blocks(seed=1), GraphCache()
    plain, place = image(other), PLACES["DIFFUSION_MODEL"]
    for _ in range(2):
        swapped_image(one, place, norms_swapped, order="accelerated last", cache=own)
        assert torch.equal(image(fast(other, own)), plain)


def test_code_that_is_swapped_while_an_error_ends_the_run_is_not_in_the_next_image():
    model, own = tiny_models.res_blocks(), GraphCache()

    def failing(swapping, executor, *args, **kwargs):
        with swapping():
            executor(*args, **kwargs)
            raise ValueError("simulated")

    plain = image(model)
    with pytest.raises(ValueError, match="simulated"):
        swapped_image(model, wrapping(failing), norms_swapped, order="accelerated first", cache=own)
    assert torch.equal(image(fast(model, own)), plain)


# What


class Toy(code_swaps.Network):
    """Called as core calls its own networks, wrappers and all."""

    def forward(self, x, timesteps=None, context=None, control=None, transformer_options=None, **kwargs):
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, transformer_options)
        return WrapperExecutor.new_class_executor(super().forward, self, wrappers).execute(x)


def toy():
    model = tiny_models.res_blocks()
    model.model.diffusion_model = Toy()
    return model


QUICK = [
    *("a function of a module", "the code of a function", "an item of a function's keyword defaults"),
    *("the content of a cell", "the state of an object", "a class without instances", "a property", "a weight"),
    *("a layer by one of another class", "a function that torch's layers call"),
]
"""One of each place in which code finds something; all are quick in tests/unit."""


@pytest.mark.parametrize("order", thorough_except(ORDERS, "accelerated last"))
@pytest.mark.parametrize("what", thorough_except(SWAPS, *QUICK))
def test_whatever_is_swapped_counts_while_it_is_there(what, order):
    model, own = toy(), GraphCache()

    def call(swap, is_compiled):
        made = order if is_compiled else None
        return swapped_image(model, PLACES["DIFFUSION_MODEL"], swap, always, made, own, width=16, height=16)

    assert_calls_follow_the_code(what, model.model.diffusion_model, call, "swapped")
    assert hits(own)


def first_res_block(model):
    return model.model.diffusion_model.get_submodule(RES_BLOCKS[0])


def on_instance(module, function):
    """A forward of its own that scales what a function gives."""
    return functools.partial(attribute, module, "forward", scaled(function, 2))


def of_function(owner, name):
    return lambda model: functools.partial(scaling, owner, name, 0.5)


OPS = comfy.ops.disable_weight_init


def other_geglu(self, x):
    x, gate = self.proj(x).chunk(2, dim=-1)
    return x * torch.nn.functional.silu(gate)


def other_conv(self, x, weight, bias):
    return torch.nn.functional.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups) * 0.9


def inside_of_attention(model):
    """What the function is that core's decorator of attention has in its cell."""
    wrapper = attention.optimized_attention
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
    return functools.partial(attribute, cell, "cell_contents", scaled(cell.cell_contents, 0.5))


SLOW = [
    *("a function of core's blocks", "a method of a block", "a method of a part", "a method of core's layers"),
    *("the code of a method", "a number of a layer", "torch's for convolutions"),
]
"""With graphs of their own, and each like another of these in a function's place."""

IN_UNETS = {
    "the norm's methods": lambda model: norms_swapped,
    "attention": lambda model: attention_swapped,
    "what attention is wrapped around": inside_of_attention,
    "a function of core's blocks": of_function(openaimodel, "checkpoint"),
    "the forward of a block's class": of_function(openaimodel.ResBlock, "forward"),
    "the forward of a block's class with options": of_function(attention.BasicTransformerBlock, "forward"),
    "a method of a block": of_function(openaimodel.ResBlock, "_forward"),
    "a method of a part": of_function(attention.CrossAttention, "forward"),
    "a method of core's layers": of_function(OPS.Linear, "forward"),
    "a method of core's layers by one that shadows torch's": lambda model: functools.partial(
        attribute, OPS.Conv2d, "_conv_forward", other_conv
    ),
    "the code of a method": lambda model: functools.partial(
        attribute, attention.GEGLU.forward, "__code__", other_geglu.__code__
    ),
    "a layer's forward": lambda model: on_instance(
        first_res_block(model).in_layers[0], first_res_block(model).in_layers[0].forward
    ),
    "a block's forward": lambda model: on_instance(first_res_block(model), first_res_block(model)._forward),
    "a layer": lambda model: functools.partial(attribute, first_res_block(model).in_layers, "1", torch.nn.Tanh()),
    "a number of a layer": lambda model: functools.partial(attribute, first_res_block(model).in_layers[0], "eps", 10.0),
    "torch's for norms": of_function(torch.nn.functional, "group_norm"),
    "torch's for activations": of_function(torch.nn.functional, "silu"),
    "torch's for convolutions": of_function(torch.nn.functional, "conv2d"),
    "torch's within that for norms": of_function(torch, "group_norm"),
    "torch's within that for norms of layers": of_function(torch, "layer_norm"),
}


@pytest.mark.parametrize("order", thorough_except(ORDERS, "accelerated first"))
@pytest.mark.parametrize("what", thorough_except(IN_UNETS, *IN_UNETS.keys() - SLOW))
def test_whatever_is_swapped_in_a_model_of_core_counts_while_it_is_there(model, what, order):
    how = OPERATORS if what.startswith("torch's") else EAGER
    assert_images_follow_the_code(model, PLACES["DIFFUSION_MODEL"], IN_UNETS[what](model), order, every_other, how)


# Beside other nodes of ours


@pytest.mark.parametrize("cached", ["before both", "between", "after both"])
@pytest.mark.parametrize("order", thorough_except(ORDERS, "accelerated last"))
def test_cached_features_with_swapped_code_are_those_of_deep_cache_alone(model, order, cached):
    deep, place = every(2), PLACES["DIFFUSION_MODEL"]

    def run(accelerated, swap):
        nodes = [functools.partial(fast) if accelerated else lambda model: model]
        with ExitStack() as stack:

            def put(model):
                return stack.enter_context(place(model, swap))[0] if swap else model

            nodes = [*nodes, put] if order == "accelerated first" else [put, *nodes]
            at = {"before both": 0, "between": 1, "after both": 2}[cached]
            nodes.insert(at, lambda model: apply_deep_cache(model, deep))
            changed = model
            for node in nodes:
                changed = node(changed)
            return image(changed, steps=5)

    plain, swapped = run(False, None), run(False, norms_swapped)
    steps = last_run()
    assert steps["skipped_steps"] and not torch.equal(plain, swapped)
    assert torch.equal(run(True, None), plain)
    assert torch.equal(run(True, norms_swapped), swapped) and last_run() == steps
    compiled = graphs()
    assert torch.equal(run(True, norms_swapped), swapped)
    assert torch.equal(run(True, None), plain)
    assert graphs() == compiled


@pytest.fixture
def capturing(capturer):
    """A cache in which calls are captured."""
    return capturing_cache(capturer)[0]


@pytest.mark.parametrize(
    "place, begins, compiled",
    [
        ("DIFFUSION_MODEL", "swapped", False),
        ("DIFFUSION_MODEL", "plain", False),
        pytest.param("DIFFUSION_MODEL", "swapped", True, marks=pytest.mark.thorough),
        pytest.param("APPLY_MODEL", "swapped", False, marks=pytest.mark.thorough),
        pytest.param("a model function", "plain", True, marks=pytest.mark.thorough),
    ],
)
def test_captured_call_is_replayed_only_with_the_code_that_it_was_captured_with(
    model, place, begins, compiled, capturing, capturer
):
    place, chosen = PLACES[place], EAGER if compiled else EAGER_BLOCKS

    def run(swap):
        with ExitStack() as stack:
            changed = stack.enter_context(place(model, swap))[0] if swap else model
            return image(accelerate(changed, chosen, capturing, graphs=True), steps=6)

    expected = {}
    for swap in (None, norms_swapped):
        with ExitStack() as stack:
            expected[swap] = image(stack.enter_context(place(model, swap))[0] if swap else model, steps=6)
    for swap in [norms_swapped, None, norms_swapped, None][begins == "plain" :]:
        assert torch.equal(run(swap), expected[swap])
    assert capturer.replays


@pytest.mark.parametrize("when", TIMES[1:], ids=lambda when: when.__name__)
def test_captured_calls_of_a_run_follow_the_code_from_step_to_step(model, when, capturing):
    def run(make):
        with PLACES["DIFFUSION_MODEL"](model, norms_swapped, when) as (changed, _):
            return image(make(changed), steps=8)

    expected = run(lambda model: model)
    for _ in range(2):
        assert torch.equal(run(lambda model: accelerate(model, EAGER_BLOCKS, capturing, graphs=True)), expected)


# Other networks


CONTROL = CONTROLS["ControlNet"]


@torch.inference_mode()
def residuals(control, around) -> list[torch.Tensor]:
    """What a control gives in three steps of a run. around: → the context of the step with this number."""
    hinted = CONTROL.hinted(control, torch.rand(1, 3, 96, 96, generator=torch.Generator().manual_seed(4)))
    sampling, given = CONTROL.model().model, []
    hinted.pre_run(sampling, sampling.model_sampling.percent_to_sigma)
    try:
        for step in range(STEPS):
            latent, cond = CONTROL.inputs(Size(height=12, width=12, batch=2), Noise(step))
            sigma = torch.full((len(latent),), float(sampling.model_sampling.percent_to_sigma(0.1 + 0.2 * step)))
            with around(step):
                out = hinted.get_control(latent, sigma, cond, 2, {})
            given += [tensor.clone() for place in out.values() for tensor in place if tensor is not None]
    finally:
        hinted.cleanup()
    return given


def are_equal(one, other) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# Which steps is a matter of the swap, as in images above.
@pytest.mark.parametrize("when", thorough_except(TIMES, always, every_other), ids=lambda when: when.__name__)
@pytest.mark.parametrize("place", ["around its calls", "in hooks of its network"])
def test_control_with_swapped_code_gives_what_it_gives_uncompiled(place, when):
    control = CONTROL.build()
    accelerated = accelerate_control(control, EAGER, cache)

    def nothing(step):
        return ExitStack()

    def run(control):
        if place == "around its calls":
            return residuals(control, lambda step: norms_swapped() if when(step) else ExitStack())
        with in_hooks(control.control_model, control.control_model, norms_swapped, when):
            return residuals(control, nothing)

    plain, swapped = residuals(control, nothing), run(control)
    assert not are_equal(plain, swapped)
    assert are_equal(residuals(accelerated, nothing), plain)
    assert are_equal(run(accelerated), swapped)
    compiled = graphs()
    assert are_equal(run(accelerated), swapped)
    assert are_equal(residuals(accelerated, nothing), plain)
    assert graphs() == compiled


# Saved graphs


class Names:
    """A store that has nothing, and keeps under which names it is asked and given."""

    def __init__(self):
        self.asked, self.saved = set(), set()

    def candidates(self, key, name, devices, values, *_):
        self.asked.add((name, key_digest(key, values)))
        return []

    def save(self, key, name, devices, graph, interrupts):
        self.saved.add((name, key_digest(key, graph.facts.values)))


@pytest.mark.parametrize("order", thorough_except(ORDERS, "accelerated first"))
def test_graph_of_swapped_code_is_saved_under_a_name_that_nobody_else_asks_for(order):
    model = tiny_models.res_blocks()

    def names(swap):
        own = GraphCache()
        own.store = Names()
        if swap is None:
            image(fast(model, own), steps=1)
        else:
            swapped_image(model, PLACES["DIFFUSION_MODEL"], swap, always, order, own, steps=1)
        return own.store

    def of(block, found):
        return {name for kind, name in found if kind == block}

    plain, swapped = names(None), names(norms_swapped)
    assert of("ResBlock", plain.saved) and not of("ResBlock", swapped.saved) & of("ResBlock", plain.asked)
    assert not of("ResBlock", plain.saved) & of("ResBlock", swapped.saved)
    again = names(norms_swapped)
    assert again.saved == swapped.saved and swapped.saved <= again.asked
    assert names(None).saved == plain.saved


@pytest.mark.thorough  # compiles three graphs with inductor
@pytest.mark.parametrize("begins", ["swapped", "plain"])
def test_saved_graph_runs_only_with_the_code_that_it_was_compiled_from(begins, tmp_path):
    model, place = tiny_models.res_blocks(), PLACES["DIFFUSION_MODEL"]

    def run(swap):
        """As in a new process; how many graphs were loaded."""
        own = GraphCache()
        own.store = GraphStore(location.folder(tmp_path))
        with ExitStack() as stack:
            changed = stack.enter_context(place(model, swap))[0] if swap else model
            expected = image(changed)
            actual = image(accelerate(changed, CompileSettings(), own))
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
        return own.statistics()["loaded"]

    first, second = (norms_swapped, None) if begins == "swapped" else (None, norms_swapped)
    assert run(first) == 0
    assert run(second) == 0
    assert run(first)
    assert run(second)


# Any function of a model


def test_functions_of_a_model_are_found_by_its_classes():
    names = {name for _, name in swappable()}
    assert {"forward", "_forward", "optimized_attention", "group_norm", "silu", "layer_norm", "conv2d"} <= names


@functools.cache
def swappable() -> list:
    """The places of all functions that give tensors in the blocks of a UNet."""
    one = tiny_models.small_unet()
    found = [block for _, block in blocks(one.model.diffusion_model)]
    modules = attention, openaimodel, torch.nn.functional
    return that_give_tensors(functions_of(found, *modules), lambda: image(one, steps=1))


@pytest.mark.thorough  # minutes: a graph for each function
def test_image_with_any_function_of_its_model_swapped_is_the_plain_one(model):
    for number, (owner, name) in enumerate(swappable()):
        of_torch = isinstance(owner, types.ModuleType) and owner.__name__.startswith("torch")
        place, order = [*PER_STEP.values()][number % len(PER_STEP)], ORDERS[number % 2]
        swap = functools.partial(scaling, owner, name, 1.001)
        assert_images_follow_the_code(model, place, swap, order, always, OPERATORS if of_torch else EAGER)
