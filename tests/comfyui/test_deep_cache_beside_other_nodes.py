"""DeepCache beside other nodes: whatever else acts on a model, a run is as if every layer had run at every step.

Most of it is one table, `BESIDE`; what has an assertion of its own follows, by what acts.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import comfy.sd
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.report.text import text
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras.nodes_freelunch import FreeU_V2
from kit import tiny_models
from kit.deep_cache import (
    SMALL,
    assert_as_reference,
    assert_close,
    assert_no_trace,
    assert_skipped_is_full,
    cached,
    counts,
    full_and_skipped,
    held,
    reference,
    residuals,
    said_of_fallbacks,
    split_chunks,
    still_answers,
)
from kit.families import DITS
from kit.other_nodes import (
    BLOCKS,
    SD15,
    adapter,
    both_attentions,
    by_uuid_reference,
    control_net,
    controlled,
    deep_shrink,
    easy_cache,
    every_patch,
    free_u,
    guided,
    hooked,
    hyper_tile,
    image_prompt,
    in_areas,
    in_masks,
    in_place,
    injected,
    lazy_cache,
    lora,
    masked_sample,
    more_context,
    noticing,
    perpendicular,
    perpendicular_guider,
    perturbed_attention,
    picture,
    ramp,
    reference_with_held_attention,
    refiner,
    rolled_dice,
    sdxl,
    self_attention,
    svd,
    tiled,
    tiled_evenly,
    token_merging,
    two_prompts,
    windowed,
    within,
)
from kit.thorough import thorough_except
from kit.tiny_models import Family, with_control
from kit.tiny_models import lora as lora_file
from torch._dynamo.utils import counters

SIZE = {"width": 72, "height": 88}
EVEN = {"width": 64, "height": 96}
# 24 wide: one, two or three tiles of 8, of which HyperTile throws a die.
WIDE = {"width": 192, "height": 64}


@pytest.fixture
def small_unet():
    return tiny_models.unet(**SMALL)


def plain():
    return tiny_models.unet(), SIZE


def small():
    return tiny_models.unet(**SMALL), SIZE


@dataclass(frozen=True)
class Beside:
    """How DeepCache is tried beside something.

    make: the plain model, and what its run is given. patch: what the other node does; None where the layout is all.
    depths: of the skipped steps. before: done to the model first where time is stopped, so that it answers alike.
    slow: the reference.
    """

    make: Callable
    patch: Callable | None = None
    depths: tuple[int, ...] = (2,)
    before: Callable = lambda model: model
    slow: Callable = reference


def attention(patch, make=plain):
    return Beside(make, patch, (1, 4), before=rolled_dice)


def guidance(patch, slow=reference):
    return Beside(small, patch, before=split_chunks, slow=slow)


BESIDE = {
    "image prompt": attention(image_prompt),
    "more context": attention(more_context),
    "every patch": attention(every_patch),
    "in place": attention(in_place),
    "FreeU": attention(free_u),
    "HyperTile": attention(hyper_tile, lambda: (tiny_models.unet(), WIDE)),
    "ToMe": attention(token_merging),
    "PAG": guidance(perturbed_attention),
    "SAG": guidance(self_attention, reference_with_held_attention),
    "PAG and SAG": guidance(both_attentions, reference_with_held_attention),
    "PerpNeg": guidance(perpendicular),
    "SDXL": Beside(sdxl, depths=(1, 3, 5)),
    "SDXL refiner": Beside(refiner, depths=(5,)),
    "SVD": Beside(svd, depths=(1, 3)),
}


@pytest.mark.parametrize("name, depth", [(name, depth) for name in BESIDE for depth in BESIDE[name].depths])
def test_skipped_step_equals_the_full_one(name, depth):
    beside = BESIDE[name]
    model, run = beside.make()
    model = beside.before(model)
    if beside.patch is None:
        assert_skipped_is_full(model, depth, **SIZE | run)
    else:
        assert_skipped_is_full(beside.patch(model), depth, **run, unlike={"model": model})


@pytest.mark.parametrize("name", BESIDE)
def test_run_is_as_if_every_layer_ran_in_either_order_of_the_nodes(name):
    beside = BESIDE[name]
    model, run = beside.make()
    if beside.patch is None:
        assert_as_reference(model, **SIZE | run)
    else:
        # At depth 2 no dice are thrown in the deep part, so that chance takes the same course with and without it.
        other_order = lambda depth: beside.patch(held(model, depth=depth))  # noqa: E731
        assert_as_reference(beside.patch(model), **run, slow=beside.slow, other_order=other_order)


# Attention


SHALLOW = {1: [BLOCKS[-1]], 2: [BLOCKS[0], *BLOCKS[-2:]], 4: [*BLOCKS[:2], *BLOCKS[3:]]}
"""By depth, those of `BLOCKS` that run on a skipped step, in this order."""


@pytest.mark.parametrize("depth", SHALLOW)
def test_attention_patch_is_asked_by_shallow_blocks_alone_under_their_usual_names(tiny_unet, depth):
    seen = []
    tiny_models.sample(held(image_prompt(tiny_unet, seen=seen), depth=depth), **SIZE, steps=2)
    full, skipped = seen[: len(BLOCKS)], seen[len(BLOCKS) :]
    assert full == [(block, index) for index, block in enumerate(BLOCKS)]
    assert skipped == [(block, BLOCKS.index(block)) for block in SHALLOW[depth]]


def test_image_prompt_that_begins_on_a_skipped_step_acts_in_shallow_blocks_at_once(tiny_unet):
    sampling = tiny_unet.get_model_object("model_sampling")
    patched = image_prompt(tiny_unet, start=sampling.percent_to_sigma(0.3))
    assert_as_reference(patched, **SIZE)


def test_tiles_that_differ_from_step_to_step_need_no_other_feature(tiny_unet):
    picked = []

    def watch(n, options):
        picked.append((options["block"], n.shape[0]))
        return n

    model = tiny_unet.clone()
    model.set_model_attn1_output_patch(watch)
    # A square of 24 has three ways to be cut in each direction.
    out = tiny_models.sample(held(hyper_tile(model), 4, 2), 192, 192, steps=4)
    assert counts() == (1, 3) and out.isfinite().all()
    tiles = [count for block, count in picked if block == ("output", 5)]
    assert len(tiles) == 4 and len(set(tiles)) > 1


@pytest.mark.parametrize("after_skip", [True, False])
@pytest.mark.parametrize("depth, end", [(2, 0.6), (4, 0.8)])
def test_deep_shrink_acts_as_if_every_layer_ran(tiny_unet, after_skip, depth, end):
    # At depth 4 the shrunk block is shallow: it ends on a full step, since a skipped one would be computed anew.
    assert_as_reference(deep_shrink(tiny_unet, after_skip, end), depth=depth, **SIZE)


@pytest.mark.parametrize("interval", [2, 3, 5])
@pytest.mark.parametrize("points", [1, 2])
def test_deep_shrink_of_a_shallow_block_that_ends_in_mid_run_fails_nothing(tiny_unet, caplog, interval, points):
    model = cached(deep_shrink(tiny_unet, True, end=0.5), interval, 5, points=points)
    assert tiny_models.sample(model, **SIZE, steps=8).isfinite().all()
    assert counts()[1] >= 2
    assert said_of_fallbacks(caplog) == []


@pytest.mark.parametrize("end", [0.15, 0.3])
def test_deep_shrink_may_end_where_a_second_prompt_begins(tiny_unet, caplog, end):
    late = tiny_models.conditioning(seed=5, start_percent=end)
    model = held(deep_shrink(tiny_unet, True, end), 4, 5)
    out = tiny_models.sample(model, **SIZE, steps=4, positive=tiny_models.conditioning(seed=1) + late)
    assert out.isfinite().all()
    assert said_of_fallbacks(caplog) == []


# Guidance


GUIDERS = {
    "two prompts": lambda model: two_prompts(model, False),
    "two prompts, nested": lambda model: two_prompts(model, True),
    "PerpNeg": perpendicular_guider,
}


def test_forecasts_keep_the_answers_apart_too(small_unet):
    model = both_attentions(split_chunks(small_unet))
    (plain,) = still_answers(model, steps=1, **SIZE)
    answers = still_answers(cached(model, 2, 2, points=2), steps=7, **SIZE)
    assert counts()[1] >= 2
    for answer in answers:
        assert_close(answer, plain)


def test_guidance_of_two_ranges_never_gets_the_others_feature(small_unet):
    model = within(small_unet, ("middle", 0), low=5.0, high=99.0)
    model = within(model, ("output", 0), low=0.0, high=99.0)
    # Half of the steps are left when the first range ends, on a skipped step.
    plain = still_answers(model, steps=8, **SIZE)
    answers = still_answers(held(model, 8), steps=8, **SIZE)
    assert counts() == (1, 7)
    assert not torch.equal(plain[0], plain[-1])
    assert [torch.equal(one, other) for one, other in zip(answers, plain, strict=True)] == [True] * 8


@pytest.mark.parametrize("make", GUIDERS.values(), ids=GUIDERS)
def test_guiders_of_three_prompts_are_as_if_every_layer_ran(small_unet, make):
    assert_as_reference(small_unet, **SIZE, sample=guided(make))


# ControlNets and T2I-Adapters


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_skipped_step_with_a_control_net_equals_the_full_one(tiny_unet, depth):
    positive = with_control(tiny_models.conditioning(), control_net())
    assert_skipped_is_full(tiny_unet, depth, **SIZE, positive=positive, unlike={"positive": None})


@pytest.mark.parametrize("depth, split", [(1, False), (3, True), (5, False)])
def test_control_net_acts_as_if_every_layer_ran(tiny_unet, depth, split):
    model = split_chunks(tiny_unet) if split else tiny_unet
    assert_as_reference(model, depth=depth, **SIZE, positive=controlled(control_net()))


def test_control_net_for_the_positive_prompt_alone_leaves_the_other_stream_alone(tiny_unet):
    assert_as_reference(tiny_unet, interval=2, **SIZE, positive=controlled(control_net(), both=False))


def test_control_net_itself_runs_on_every_step(tiny_unet, sample):
    control = control_net()
    sample(held(tiny_unet), **SIZE, steps=4, positive=controlled(control))
    assert counts() == (2, 2)
    assert len(control.calls) == 4


@pytest.mark.parametrize("depth", [1, 4])
def test_chained_control_nets_of_which_one_ends_halfway(tiny_unet, depth):
    first, second = control_net(), control_net()
    tiny_models.randomize(second.control_model, seed=8)
    positive = controlled(first, second, ends=(1.0, 0.5))
    assert_as_reference(tiny_unet, depth=depth, **SIZE, positive=positive)
    # Four runs of four steps; the second acts on the first two, the latter of which is skipped as the third is.
    assert (len(first.calls), len(second.calls)) == (4 * 4, 4 * 2)


@pytest.mark.parametrize("depth", [2, 3, 8])
def test_skipped_step_with_a_t2i_adapter_equals_the_full_one(depth):
    # Of its four residuals one is shallow at depths 3 to 5, two at 6 to 8, and none at 2.
    positive = controlled(adapter())
    assert_skipped_is_full(tiny_models.unet(**SD15), depth, **EVEN, positive=positive, unlike={"positive": None})


def test_t2i_adapter_acts_as_if_every_layer_ran():
    assert_as_reference(tiny_models.unet(**SD15), depth=3, **EVEN, positive=controlled(adapter()))


def test_t2i_adapter_chained_to_a_control_net():
    positive = controlled(adapter(), control_net(**SD15))
    assert_as_reference(tiny_models.unet(**SD15), depth=3, **EVEN, positive=positive)


# Layouts


def test_video_of_one_frame():
    model, run = svd()
    assert_skipped_is_full(model, 2, 72, 88, **run | {"batch": 1})


# Masks, areas, times and windows


def test_inpainting_with_a_noise_mask_is_as_if_every_layer_ran(small_unet):
    mask = (ramp() > 0.4).float()
    run = {"noise_mask": mask, "latent": picture()}
    out = assert_as_reference(small_unet, sample=masked_sample, denoise=0.6, **run)
    kept = mask[..., ::8, ::8].expand_as(out) == 0
    assert torch.allclose(out[kept], picture()[kept], atol=1e-5)
    assert_skipped_is_full(small_unet, **run, unlike={"noise_mask": None})


def test_differential_diffusion_moves_its_mask_on_skipped_steps_too(small_unet):
    from comfy_extras.nodes_differential_diffusion import DifferentialDiffusion

    patch = lambda model: DifferentialDiffusion.execute(model, 0.8).args[0]  # noqa: E731
    run = {"noise_mask": ramp(), "latent": picture()}
    other_order = lambda depth: patch(held(small_unet, depth=depth))  # noqa: E731
    out = assert_as_reference(patch(small_unet), sample=masked_sample, **run, other_order=other_order)
    assert not torch.equal(out, masked_sample(held(small_unet), 4, **run))


def test_inpainting_model_of_nine_channels_gets_mask_and_picture_on_skipped_steps_too():
    model = tiny_models.unet(in_channels=9, **SMALL)
    mask = (ramp() > 0.4).float()
    # What core's InpaintModelConditioning puts there.
    extra = {"concat_latent_image": picture(seed=8), "concat_mask": mask}
    prompts = {name: tiny_models.conditioning(seed=i, **extra) for i, name in ((1, "positive"), (2, "negative"))}
    run = {"noise_mask": mask, "latent": picture(), **prompts}
    assert_as_reference(model, sample=masked_sample, **run)
    for depth in (1, 3):
        assert_skipped_is_full(model, depth, **run, unlike={"positive": None})


@pytest.mark.parametrize("prompts, split", [(in_areas, False), (in_masks, True)])
def test_prompts_for_parts_of_the_image_are_streams_of_their_own(small_unet, prompts, split):
    model = split_chunks(small_unet) if split else small_unet
    assert_skipped_is_full(model, **SIZE, positive=prompts(), unlike={"positive": None})
    assert_as_reference(model, **SIZE, positive=prompts())


@pytest.mark.parametrize("split, expected", [(False, (3, 1)), (True, (2, 2))], ids=["joined", "split"])
def test_prompt_that_begins_on_a_skipped_step_is_computed_and_the_others_are_not(small_unet, split, expected):
    model = split_chunks(small_unet) if split else small_unet
    # The second of four steps.
    late = tiny_models.conditioning(seed=5, start_percent=0.15)
    early = tiny_models.conditioning(seed=1)
    run = {"positive": early + late, "slow": by_uuid_reference, "expected": expected}
    assert_as_reference(model, **SIZE, **run)


def test_windows_that_stay_are_as_if_every_layer_ran(small_unet):
    # As many noise levels as frames: core 0.3.75 compares the two element by element.
    run = {"batch": 5, "steps": 4, "slow": by_uuid_reference}
    assert_as_reference(windowed(small_unet, "standard_static"), **SIZE, **run)


@pytest.mark.parametrize("schedule", ["standard_uniform", "looped_uniform"])
def test_windows_that_move_are_computed_where_they_are_new(small_unet, schedule):
    seen = []
    model = windowed(small_unet, schedule)
    out = tiny_models.sample(held(noticing(model, seen), 4, 2), **SIZE, batch=5, steps=4)
    expected = tiny_models.sample(by_uuid_reference(model, 4, 2), **SIZE, batch=5, steps=4)
    assert torch.equal(out, expected)
    # A step is a skipped one when one of its windows was there before.
    steps = [{frames for step, frames in seen if step == i} for i in range(4)]
    assert len(set.union(*steps)) > len(steps[0])
    before = set()
    skipped = 0
    for windows in steps:
        skipped += bool(windows & before)
        before |= windows
    assert counts() == (4 - skipped, skipped)


# LoRAs, hooks and injections


def test_lora_is_as_if_every_layer_ran_in_either_order_of_the_nodes(small_unet):
    assert_as_reference(lora(small_unet), **SIZE, other_order=lambda depth: lora(held(small_unet, depth=depth)))


def test_lora_that_comes_changes_and_goes_leaves_no_feature_of_its_own(small_unet, sample):
    def image(model):
        return sample(held(model), **SIZE, steps=4)

    without, first, second = image(small_unet), image(lora(small_unet)), image(lora(small_unet, 2, 0.3))
    assert torch.equal(image(lora(small_unet)), first) and not torch.equal(first, second)
    assert torch.equal(image(small_unet), without) and not torch.equal(first, without)


@pytest.mark.parametrize("depth", [1, 3])
def test_skipped_step_with_a_hooked_lora_equals_the_full_one(small_unet, depth):
    model, positive = hooked(small_unet)
    assert_skipped_is_full(model, depth, **SIZE, positive=positive, unlike={"positive": None})


def test_lora_whose_strength_changes_on_a_skipped_step_acts_in_shallow_layers_at_once(small_unet):
    # Percents of the third step of four, and of the last, which is full.
    model, positive = hooked(small_unet, keyframes=((0.0, 1.0), (0.5, 0.1), (0.8, 0.6)))
    assert_as_reference(model, depth=3, **SIZE, positive=positive)


def test_loras_of_two_masked_prompts_keep_their_features_apart(small_unet):
    left, right = torch.zeros(2, 1, 11, 9)
    left[..., :5], right[..., 4:] = 1, 1
    model, first = hooked(small_unet, mask=left)
    model, second = hooked(model, ((0.0, 0.2), (0.3, 1.0)), seed=2, mask=right)
    assert_as_reference(model, **SIZE, positive=first + second)
    assert_skipped_is_full(model, **SIZE, positive=first, negative=hooked(small_unet, seed=2)[1])


@pytest.mark.parametrize("depth", [1, 2])
def test_layer_injected_for_the_run_is_the_boundary_where_it_ends_the_deep_part(small_unet, depth):
    model = injected(small_unet, [1, 2, 3])
    assert_skipped_is_full(model, depth, **SIZE, batch=3, unlike={"model": small_unet})
    assert_as_reference(model, depth=depth, **SIZE, batch=3)


def test_injected_layers_come_and_go_between_runs_of_one_model(small_unet, sample):
    run = {**SIZE, "batch": 3, "steps": 4}
    without = sample(held(small_unet), **run)
    moving = sample(held(injected(small_unet, [1])), **run)
    assert torch.equal(sample(held(small_unet), **run), without)
    assert torch.equal(sample(held(injected(small_unet, [1])), **run), moving)
    assert counts() == (2, 2)
    assert not torch.equal(moving, without)


# Caches of whole steps, and compiled blocks


def swapped_in_calls(model, name, own):
    """An attribute of the network is `own` for the length of each call, as step caches of other packs do."""
    model, net = model.clone(), model.get_model_object("diffusion_model")

    def wrapper(apply_model, args):
        with mock.patch.object(net, name, own(net)):
            return apply_model(args["input"], args["timestep"], **args["c"])

    model.set_model_unet_function_wrapper(wrapper)
    return model


def own_blocks(model):
    return swapped_in_calls(model, "output_blocks", lambda net: torch.nn.ModuleList([*net.output_blocks]))


def own_forward_in_calls(model):
    """Core's wrappers of the forward do not run then."""
    return swapped_in_calls(model, "forward", lambda net: functools.partial(type(net)._forward, net))


def repeating(model):
    """Repeats the model's last answer in every second call, as TeaCache and FBCache may."""
    model, kept = model.clone(), []

    def wrapper(apply_model, args):
        if args["timestep"][0] == args["c"]["transformer_options"]["sample_sigmas"][0]:
            kept.clear()
        kept.append(kept[-1] if len(kept) % 2 else apply_model(args["input"], args["timestep"], **args["c"]))
        return kept[-1]

    model.set_model_unet_function_wrapper(wrapper)
    return model


def own_forward(model):
    """Its own forward on the model's instance."""
    net = model.get_model_object("diffusion_model")
    model = model.clone()
    model.add_object_patch("diffusion_model.forward", lambda *args, **kwargs: type(net).forward(net, *args, **kwargs))
    return model


MAKES_CALLS = "makes the model's calls, and may skip some itself (use one of the two)"
CACHES = {
    "EasyCache": (easy_cache, "EasyCache or LazyCache skips steps of its own (use one of the two)"),
    "LazyCache": (lazy_cache, "EasyCache or LazyCache skips steps of its own (use one of the two)"),
    "repeating": (repeating, MAKES_CALLS),
    "own blocks": (own_blocks, MAKES_CALLS),
    "own forward in calls": (own_forward_in_calls, MAKES_CALLS),
    "own forward": (own_forward, "another node has replaced the model's forward"),
    "tiles": (tiled, MAKES_CALLS),
    "even tiles": (tiled_evenly, MAKES_CALLS),
}


@pytest.mark.parametrize("name", thorough_except(CACHES, "EasyCache", "own blocks", "own forward", "tiles"))
def test_image_beside_a_node_that_may_skip_steps_itself_is_that_nodes_alone(small_unet, sample, caplog, name):
    other, why = CACHES[name]
    run = {**SIZE, "steps": 10}
    expected, plain = sample(other(small_unet), **run), sample(small_unet, **run)
    assert torch.equal(expected, plain) == name.startswith("own")
    for both in (other(held(small_unet)), held(other(small_unet))):
        caplog.clear()
        with caplog.at_level("INFO"):
            assert torch.equal(sample(both, **run), expected)
        assert counts()[1] == 0 and why in records.deep_cache().why_full
        said = [record.getMessage() for record in caplog.records if "DeepCache" in record.getMessage()]
        assert said and all(why in line and " 0 " not in line for line in said)
        assert "0 of 0" not in text(records.last(), GraphCache().statistics(), None, [])
    assert torch.equal(sample(small_unet, **run), plain)
    sample(held(small_unet), **run)
    assert counts()[1] and records.deep_cache().why_full is None, "once the other node is gone"


@pytest.mark.parametrize("module", ["/ComfyUI/custom_nodes/a-pack.nodes", "custom_nodes.a-pack.nodes"])
def test_node_that_makes_the_models_calls_is_named_by_its_packs_folder(small_unet, sample, module):
    model = held(small_unet)
    wrapper = functools.partial(lambda apply_model, args: apply_model(args["input"], args["timestep"], **args["c"]))
    wrapper.__module__ = module
    model.set_model_unet_function_wrapper(wrapper)
    sample(model, **SIZE, steps=4)
    assert records.deep_cache().why_full == f"another node (a-pack) {MAKES_CALLS}"


def test_own_inner_forward_of_a_transformer_is_another_nodes_too():
    dit = DITS["Flux"]
    model = dit.load()
    net = model.get_model_object("diffusion_model")
    model.add_object_patch("diffusion_model.forward_orig", functools.partial(type(net).forward_orig, net))
    expected = dit.sample(model)
    assert torch.equal(dit.sample(held(model)), expected)
    assert counts()[1] == 0 and records.deep_cache().why_full == "another node has replaced the model's forward"


def blind(guards):
    return ["transformer_options" not in guard.name for guard in guards]


# Newer cores' node compiles once, whatever patches there are.
@pytest.mark.parametrize(
    "cached_first, sees_patches",
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.thorough),
        pytest.param(False, True, marks=pytest.mark.thorough),
    ],
)
def test_core_compile_node_in_either_order_gives_the_same_and_compiles_nothing_on_later_steps(
    small_unet, sample, cached_first, sees_patches, caplog
):
    def compiled(model):
        model = model.clone()
        options = None if sees_patches else {"guard_filter_fn": blind}
        set_torch_compile_wrapper(model, backend="eager", options=options)
        return model

    torch._dynamo.reset()  # else it may find what other tests compiled with DeepCache
    expected = sample(held(small_unet), **SIZE, steps=4)
    sample(compiled(small_unet), **SIZE, steps=1)
    model = compiled(held(small_unet)) if cached_first else held(compiled(small_unet))
    # Dynamo is kept from what looks different on a skipped step.
    sample(model, **SIZE, steps=1)
    graphs = counters["stats"]["unique_graphs"]
    assert_close(sample(model, **SIZE, steps=4), expected)
    assert counts() == (2, 2)
    assert counters["stats"]["unique_graphs"] == graphs
    assert caplog.text.count("TorchCompileModel compiles nothing") == 2  # runs


def test_blocks_that_another_pack_compiles_one_by_one_stay_compiled(small_unet, sample, caplog):
    """As KJNodes' compile nodes do, by core's own helper."""
    expected = sample(held(small_unet), **SIZE, steps=4)
    torch._dynamo.reset()
    ran = []

    def backend(graph, inputs):
        return lambda *args: ran.append(1) or graph.forward(*args)

    model = held(small_unet)
    block = next(name for name, _ in model.model.named_modules() if name.endswith("transformer_blocks.0"))
    set_torch_compile_wrapper(model, backend=backend, keys=[block])
    assert_close(sample(model, **SIZE, steps=4), expected)
    assert ran and "compiles nothing" not in caplog.text


def test_accelerated_blocks_with_everything_around_compile_nothing_more_in_either_order(sample):
    small = {**SMALL, "transformer_depth": [1, 0], "transformer_depth_output": [1, 1, 0, 0]}
    small["transformer_depth_middle"] = -1  # few kinds: tracing is most of the time
    small_unet = tiny_models.unet(**small)
    model = comfy.sd.load_lora_for_models(small_unet, None, lora_file(small_unet, 1), 0.5, 0)[0]
    model = FreeU_V2().patch(model, 1.3, 1.4, 0.9, 0.2)[0]
    control = Family("", "SD15", tiny_models.unet_config(**small), context_dim=768).control_net(torch.float32)
    run = {**SIZE, "steps": 4, "positive": with_control(tiny_models.conditioning(), control)}
    expected = sample(held(model), **run)
    compiled = GraphCache()
    fast = lambda model: accelerate(model, CompileSettings(backend="eager"), compiled)  # noqa: E731
    plain = sample(fast(model), **run)
    before = counters["stats"]["unique_graphs"]
    assert before
    for both in (fast(held(model)), held(fast(model))):
        assert_close(sample(both, **run), expected)
        assert counts() == (2, 2)
        assert_no_trace(both)
    assert torch.equal(sample(fast(model), **run), plain)
    assert counters["stats"]["unique_graphs"] == before


# Residuals for every layer, and guidance that asks twice


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("names", [("input",), ("middle", "output"), ("input", "middle", "output")])
def test_residuals_of_shallow_layers_are_applied_on_skipped_steps(tiny_unet, no_fallback, depth, names):
    x = torch.zeros(2, 4, 23, 31)
    full, skipped = full_and_skipped(tiny_unet, depth, 23, 31, control=lambda: residuals(x, names))
    assert torch.equal(full, skipped)
    without, _ = full_and_skipped(tiny_unet, depth, 23, 31)
    assert not torch.equal(full, without)
