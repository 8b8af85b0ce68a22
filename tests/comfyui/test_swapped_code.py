"""Code that other nodes replace while a model runs, and put back: each image is that of the code that is there."""

import functools
import itertools
from contextlib import ExitStack, contextmanager, nullcontext

import comfy.ops
import pytest
import torch
from comfy.ldm.modules import attention
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.controlnet import accelerate_control
from kit import tiny_models
from kit.captures import EAGER_BLOCKS
from kit.code_swaps import Swapping, all_of, attribute, in_hooks, scaled, scaling
from kit.compiled import graphs
from kit.controls import CONTROLS
from kit.deep_cache import split_chunks
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


@contextmanager
def of_one_prompt(model, swap, when=always):
    """Both prompts are predicted in calls of their own; one has the swap."""

    def call(swapping, executor, x, timesteps, context, y, control, options, **kwargs):
        assert len(options["cond_or_uncond"]) == 1
        with swapping() if options["cond_or_uncond"] == [0] else nullcontext():
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
def between_hooks(start, end, model, swap, when=always):
    network = model.model.diffusion_model
    with in_hooks(network.get_submodule(start), network.get_submodule(end), Swapping(swap, when)):
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


PLACES = wrappers(
    *("OUTER_SAMPLE", "SAMPLER_SAMPLE", "PREDICT_NOISE", "CALC_COND_BATCH", "APPLY_MODEL", "DIFFUSION_MODEL")
) | {
    "a model function": in_model_function,
    "hooks around the network": functools.partial(between_hooks, "", ""),
    "hooks around blocks": functools.partial(between_hooks, *RES_BLOCKS),
    "hooks between blocks": functools.partial(between_hooks, "input_blocks.1.0", "output_blocks.0.1"),
    "patches between blocks": between_patches,
    "the calls for the prompt": of_one_prompt,
    "from a step on": from_a_step_on,
    "until a step": until_a_step,
}

ORDERS = ["accelerated first", "accelerated last"]


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


@pytest.mark.parametrize(("place", "order"), zip(PLACES, itertools.cycle(ORDERS), strict=False))
def test_image_with_code_swapped_anywhere_is_the_plain_one_and_nothing_is_compiled_again(model, place, order):
    assert_images_follow_the_code(model, PLACES[place], norms_swapped, order)


@pytest.mark.parametrize("when", TIMES[1:], ids=lambda when: when.__name__)
@pytest.mark.parametrize("place", ["DIFFUSION_MODEL", "patches between blocks"])
def test_image_with_code_swapped_in_some_steps_is_the_plain_one(model, place, when):
    assert_images_follow_the_code(model, PLACES[place], norms_swapped, "accelerated first", when)


@pytest.mark.parametrize("outer", ["DIFFUSION_MODEL", "a model function"])
def test_image_with_the_swaps_of_two_nodes_within_each_other_has_both(model, outer):
    """Of two functions, or of the same one."""
    inner = norms_swapped if outer == "DIFFUSION_MODEL" else attention_swapped

    @contextmanager
    def both(model, swap, when):
        with PLACES[outer](model, attention_swapped) as (once, _):
            with PLACES["DIFFUSION_MODEL"](once, swap, when) as (twice, _):
                yield twice, {}

    assert_images_follow_the_code(model, both, inner, "accelerated last", every_other)


def test_first_run_with_swapped_code_leaves_the_graphs_of_the_plain_model_as_they_would_be():
    """Whatever is traced first."""
    model, own = tiny_models.res_blocks(model_channels=64), GraphCache()
    place, plain = PLACES["DIFFUSION_MODEL"], image(model)
    swapped = swapped_image(model, place, norms_swapped)
    for _ in range(2):
        assert torch.equal(swapped_image(model, place, norms_swapped, order="accelerated first", cache=own), swapped)
        assert torch.equal(image(fast(model, own)), plain)
    compiled, before = graphs(), hits(own)
    other = tiny_models.res_blocks(model_channels=64, seed=1)
    assert torch.equal(image(fast(other, own)), image(other))
    assert graphs() == compiled and hits(own) > before


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


def of_function(owner, name):
    return lambda: functools.partial(scaling, owner, name, 0.5)


def other_conv(self, x, weight, bias):
    return torch.nn.functional.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups) * 0.9


def inside_of_attention():
    """What the function is that core's decorator of attention has in its cell."""
    wrapper = attention.optimized_attention
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
    return functools.partial(attribute, cell, "cell_contents", scaled(cell.cell_contents, 0.5))


OF_CORE = {
    "what attention is wrapped around": inside_of_attention,
    "the forward of a block's class with options": of_function(attention.BasicTransformerBlock, "forward"),
    "a method of core's layers by one that shadows torch's": lambda: functools.partial(
        attribute, comfy.ops.disable_weight_init.Conv2d, "_conv_forward", other_conv
    ),
    "torch's for activations": of_function(torch.nn.functional, "silu"),
    "torch's within that for norms": of_function(torch, "group_norm"),
}
"""What is another thing in core's blocks than in those of unit/test_current_code.py, where all kinds of swap are."""


@pytest.mark.parametrize("what", OF_CORE)
def test_whatever_is_swapped_in_a_model_of_core_counts_while_it_is_there(model, what):
    how, place = OPERATORS if what.startswith("torch's") else EAGER, PLACES["DIFFUSION_MODEL"]
    assert_images_follow_the_code(model, place, OF_CORE[what](), "accelerated first", every_other, how)


# Captured calls


@pytest.mark.parametrize("begins", ["swapped", "plain"])
def test_captured_call_is_replayed_only_with_the_code_that_it_was_captured_with(model, begins, cache, capturer):
    def run(swap, make=lambda model: accelerate(model, EAGER_BLOCKS, cache, graphs=True)):
        with ExitStack() as stack:
            changed = stack.enter_context(PLACES["DIFFUSION_MODEL"](model, swap))[0] if swap else model
            return image(make(changed), steps=6)

    expected = {swap: run(swap, lambda model: model) for swap in (None, norms_swapped)}
    for swap in [norms_swapped, None, norms_swapped, None][begins == "plain" :]:
        assert torch.equal(run(swap), expected[swap])
    assert capturer.replays


@pytest.mark.parametrize("when", TIMES[1:], ids=lambda when: when.__name__)
def test_captured_calls_of_a_run_follow_the_code_from_step_to_step(model, when, cache):
    def run(make):
        with PLACES["DIFFUSION_MODEL"](model, norms_swapped, when) as (changed, _):
            return image(make(changed), steps=8)

    expected = run(lambda model: model)
    for _ in range(2):
        assert torch.equal(run(lambda model: accelerate(model, EAGER_BLOCKS, cache, graphs=True)), expected)


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


def test_control_with_swapped_code_gives_what_it_gives_uncompiled():
    control = CONTROL.build()
    accelerated = accelerate_control(control, EAGER, cache)

    def run(control, swap):
        return residuals(control, lambda step: norms_swapped() if swap and every_other(step) else ExitStack())

    plain, swapped = run(control, False), run(control, True)
    assert not are_equal(plain, swapped)
    for compiled in (None, graphs):
        before = compiled and compiled()
        assert are_equal(run(accelerated, False), plain) and are_equal(run(accelerated, True), swapped)
        assert compiled is None or graphs() == before
