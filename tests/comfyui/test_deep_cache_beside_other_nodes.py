"""DeepCache beside other nodes: whatever else acts on a model, a run is as if every layer had run at every step.

Most of it is one table, `BESIDE`; what has an assertion of its own follows, by what acts.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import comfy.sd
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models import deep_cache as host
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.report.run_record import records
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras.nodes_freelunch import FreeU_V2
from kit import tiny_models
from kit.controls import adapter, control_net
from kit.deep_cache import (
    SMALL,
    assert_as_reference,
    assert_close,
    assert_no_trace,
    cached,
    counts,
    reference,
    said_of_fallbacks,
    split_chunks,
    unet_run,
)
from kit.families import DITS
from kit.other_nodes import (
    BLOCKS,
    SD15,
    both_attentions,
    by_uuid_reference,
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
    token_merging,
    two_prompts,
    windowed,
)
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


@dataclass(frozen=True)
class Beside:
    """How DeepCache is tried beside something.

    make: the plain model, and what its run is given. patch: what the other node does to the model. reference: how the
    run is compared with the reference.
    """

    make: Callable
    patch: Callable | None = None
    reference: dict = field(default_factory=dict)


def full(**run):
    return tiny_models.unet(), run


def small(change=lambda model: model, **run):
    return change(tiny_models.unet(**SMALL)), run


def sd15(*controls):
    return tiny_models.unet(**SD15), EVEN | {"positive": controlled(*controls)}


def with_hook(keyframes=((0.0, 1.0),)):
    model, positive = hooked(tiny_models.unet(**SMALL), keyframes)
    return model, {"positive": positive}


def with_dice(**run):
    """Of nodes that play with chance, every layer would take another course than only those that run."""
    return rolled_dice(tiny_models.unet()), run


def guidance(patch, slow=reference):
    return Beside(small, patch, {"slow": slow})


def guider(make):
    return Beside(small, reference={"sample": guided(make)})


def of_nine_channels():
    """What core's InpaintModelConditioning puts there."""
    mask = (ramp() > 0.4).float()
    extra = {"concat_latent_image": picture(seed=8), "concat_mask": mask}
    prompts = {name: tiny_models.conditioning(seed=i, **extra) for i, name in ((1, "positive"), (2, "negative"))}
    return tiny_models.unet(in_channels=9, **SMALL), {"noise_mask": mask, "latent": picture(), **prompts}


def prompt_from(percent):
    """One that begins then, beside one for all; at 0.15 in the second of four steps."""
    return tiny_models.conditioning(seed=1) + tiny_models.conditioning(seed=5, start_percent=percent)


BESIDE = {
    # Attention, and other patches
    "image prompt": Beside(full, image_prompt),
    "more context": Beside(full, more_context),
    "every patch": Beside(full, every_patch),
    "in place": Beside(full, in_place),
    "FreeU": Beside(full, free_u),
    "HyperTile": Beside(lambda: with_dice(**WIDE), hyper_tile),
    "ToMe": Beside(with_dice, token_merging),
    "Deep Shrink": Beside(lambda: (deep_shrink(tiny_models.unet(), True, 0.6), SIZE)),
    "Deep Shrink before skips": Beside(lambda: (deep_shrink(tiny_models.unet(), False, 0.6), SIZE)),
    # Guidance
    "PAG": guidance(perturbed_attention),
    "SAG": guidance(self_attention, reference_with_held_attention),
    "PAG and SAG": guidance(both_attentions, reference_with_held_attention),
    "PerpNeg": guidance(perpendicular),
    "two prompts": guider(lambda model: two_prompts(model, False)),
    "two prompts, nested": guider(lambda model: two_prompts(model, True)),
    "PerpNeg's guider": guider(perpendicular_guider),
    # ControlNets and adapters
    "ControlNet": Beside(lambda: full(positive=controlled(control_net()))),
    "ControlNet, apart": Beside(lambda: (split_chunks(tiny_models.unet()), {"positive": controlled(control_net())})),
    "ControlNet of one prompt": Beside(
        lambda: full(positive=controlled(control_net(), both=False)), reference={"interval": 2}
    ),
    "T2I adapter": Beside(lambda: sd15(adapter())),
    "T2I adapter and ControlNet": Beside(lambda: sd15(adapter(), control_net(**SD15))),
    # Layouts
    "SDXL": Beside(sdxl),
    "SDXL refiner": Beside(refiner),
    "SVD": Beside(svd),
    "SVD of one frame": Beside(lambda: (svd()[0], svd()[1] | {"batch": 1})),
    "inpainting model": Beside(of_nine_channels, reference={"sample": masked_sample}),
    # Areas, times and windows
    "areas": Beside(lambda: small(positive=in_areas())),
    "masks, apart": Beside(lambda: small(split_chunks, positive=in_masks())),
    "a prompt that begins late": Beside(
        lambda: small(positive=prompt_from(0.15)),
        reference={"slow": by_uuid_reference, "expected": (3, 1)},
    ),
    "a prompt that begins late, apart": Beside(
        lambda: small(split_chunks, positive=prompt_from(0.15)),
        reference={"slow": by_uuid_reference, "expected": (2, 2)},
    ),
    # As many noise levels as frames: core 0.3.75 compares the two element by element.
    "windows that stay": Beside(
        lambda: small(lambda model: windowed(model, "standard_static"), batch=5),
        reference={"slow": by_uuid_reference},
    ),
    # LoRAs, hooks and injections
    "LoRA": Beside(small, lora),
    "hooked LoRA": Beside(with_hook),
    # Percents of the third step of four, and of the last, which is full.
    "LoRA of changing strength": Beside(lambda: with_hook(((0.0, 1.0), (0.5, 0.1), (0.8, 0.6)))),
    "injected layers": Beside(lambda: small(lambda model: injected(model, [1, 2, 3]), batch=3)),
}


@pytest.mark.parametrize("name", BESIDE)
def test_run_is_as_if_every_layer_ran_in_either_order_of_the_nodes(name):
    beside = BESIDE[name]
    model, run = beside.make()
    run, other_order = (SIZE if "latent" not in run else {}) | run, None
    if beside.patch is not None:
        model, plain = beside.patch(model), model
        other_order = lambda: beside.patch(cached(plain))  # noqa: E731
        sample = beside.reference.get("sample", tiny_models.sample)
        assert not torch.equal(sample(model, steps=2, **run), sample(plain, steps=2, **run)), "it does something"
    assert_as_reference(model, **run, **beside.reference, other_order=other_order)


# Attention


def test_attention_patch_is_asked_in_full_steps_alone(tiny_unet):
    seen = []
    tiny_models.sample(cached(image_prompt(tiny_unet, seen=seen)), **SIZE, steps=2)
    assert seen == [(block, index) for index, block in enumerate(BLOCKS)] and counts() == (1, 1)


@pytest.mark.parametrize(
    "interval, points, end, positive, steps",
    [
        *((interval, points, 0.5, None, 8) for interval in (2, 3, 5) for points in (1, 2)),
        *((4, 1, end, prompt_from(end), 4) for end in (0.15, 0.3)),
    ],
)
def test_deep_shrink_that_ends_in_mid_run_fails_nothing(tiny_unet, caplog, interval, points, end, positive, steps):
    model = cached(deep_shrink(tiny_unet, True, end), interval, points=points)
    assert tiny_models.sample(model, **SIZE, steps=steps, positive=positive).isfinite().all()
    assert counts()[1] >= 2 or positive
    assert said_of_fallbacks(caplog) == []


# Guidance


def test_calls_in_which_other_blocks_are_replaced_have_features_of_their_own(small_unet):
    """As those of a guidance in two ranges of noise levels."""
    run, x = unet_run(), torch.zeros(1, 4, 8, 8)
    features = run.of(small_unet.model.diffusion_model)
    run.begin(3.0)
    variants = set()
    for patches in ({}, {"attn1": {("middle", 0): len}}, {"attn1": {("output", 0): len}}):
        (key,) = host._branches(features, x, {"uuids": ["a"], "cond_or_uncond": [0], "patches_replace": patches})
        variants.add(key.variant)
    assert len(variants) == 3


# ControlNets and T2I-Adapters


def test_chained_control_nets_of_which_one_ends_halfway(tiny_unet):
    first, second = control_net(), control_net(seed=8)
    positive = controlled(first, second, ends=(1.0, 0.5))
    assert_as_reference(tiny_unet, **SIZE, positive=positive)
    # Three runs of four steps and one of two; the second acts on the first two, the latter of which is skipped there.
    assert (len(first.calls), len(second.calls)) == (3 * 4 + 2, 3 * 2 + 1)


# Masks, areas, times and windows


def test_inpainting_with_a_noise_mask_is_as_if_every_layer_ran(small_unet):
    mask = (ramp() > 0.4).float()
    run = {"noise_mask": mask, "latent": picture()}
    out = assert_as_reference(small_unet, sample=masked_sample, denoise=0.6, **run)
    kept = mask[..., ::8, ::8].expand_as(out) == 0
    assert torch.allclose(out[kept], picture()[kept], atol=1e-5)


def test_differential_diffusion_moves_its_mask_on_skipped_steps_too(small_unet):
    from comfy_extras.nodes_differential_diffusion import DifferentialDiffusion

    patch = lambda model: DifferentialDiffusion.execute(model, 0.8).args[0]  # noqa: E731
    run = {"noise_mask": ramp(), "latent": picture()}
    other_order = lambda: patch(cached(small_unet))  # noqa: E731
    out = assert_as_reference(patch(small_unet), sample=masked_sample, **run, other_order=other_order)
    assert not torch.equal(out, masked_sample(cached(small_unet), 4, **run))


@pytest.mark.parametrize("schedule", ["standard_uniform", "looped_uniform"])
def test_windows_that_move_are_computed_where_they_are_new(small_unet, schedule):
    seen = []
    model = windowed(small_unet, schedule)
    out = tiny_models.sample(cached(noticing(model, seen), 4), **SIZE, batch=5, steps=4)
    expected = tiny_models.sample(by_uuid_reference(model, 4), **SIZE, batch=5, steps=4)
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


def test_lora_that_comes_changes_and_goes_leaves_no_feature_of_its_own(small_unet, sample):
    def image(model):
        return sample(cached(model), **SIZE, steps=4)

    without, first, second = image(small_unet), image(lora(small_unet)), image(lora(small_unet, 2, 0.3))
    assert torch.equal(image(lora(small_unet)), first) and not torch.equal(first, second)
    assert torch.equal(image(small_unet), without) and not torch.equal(first, without)


def test_loras_of_two_masked_prompts_keep_their_features_apart(small_unet):
    left, right = torch.zeros(2, 1, 11, 9)
    left[..., :5], right[..., 4:] = 1, 1
    model, first = hooked(small_unet, mask=left)
    model, second = hooked(model, ((0.0, 0.2), (0.3, 1.0)), seed=2, mask=right)
    assert_as_reference(model, **SIZE, positive=first + second)


def test_injected_layers_come_and_go_between_runs_of_one_model(small_unet, sample):
    run = {**SIZE, "batch": 3, "steps": 4}
    without = sample(cached(small_unet), **run)
    moving = sample(cached(injected(small_unet, [1])), **run)
    assert torch.equal(sample(cached(small_unet), **run), without)
    assert torch.equal(sample(cached(injected(small_unet, [1])), **run), moving)
    assert counts() == (2, 2)
    assert not torch.equal(moving, without)


# Caches of whole steps, and compiled blocks


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
    "own forward": (own_forward, "another node has replaced the model's forward"),
    "tiles": (tiled, MAKES_CALLS),
}


@pytest.mark.parametrize("name", CACHES)
def test_image_beside_a_node_that_may_skip_steps_itself_is_that_nodes_alone(small_unet, sample, caplog, name):
    other, why = CACHES[name]
    run = {**SIZE, "steps": 10}
    expected, plain = sample(other(small_unet), **run), sample(small_unet, **run)
    assert torch.equal(expected, plain) == name.startswith("own")
    for both in (other(cached(small_unet)), cached(other(small_unet))):
        caplog.clear()
        with caplog.at_level("INFO"):
            assert torch.equal(sample(both, **run), expected)
        assert counts()[1] == 0 and why in records.deep_cache().why_full
        said = [record.getMessage() for record in caplog.records if "DeepCache" in record.getMessage()]
        assert said and all(why in line and " 0 " not in line for line in said)
    assert torch.equal(sample(small_unet, **run), plain)
    sample(cached(small_unet), **run)
    assert counts()[1] and records.deep_cache().why_full is None, "once the other node is gone"


@pytest.mark.parametrize("module", ["/ComfyUI/custom_nodes/a-pack.nodes", "custom_nodes.a-pack.nodes"])
def test_node_that_makes_the_models_calls_is_named_by_its_packs_folder(small_unet, sample, module):
    model = cached(small_unet)
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
    assert torch.equal(dit.sample(cached(model)), expected)
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
    expected = sample(cached(small_unet), **SIZE, steps=4)
    sample(compiled(small_unet), **SIZE, steps=1)
    model = compiled(cached(small_unet)) if cached_first else cached(compiled(small_unet))
    # Dynamo is kept from what looks different on a skipped step.
    sample(model, **SIZE, steps=1)
    graphs = counters["stats"]["unique_graphs"]
    assert_close(sample(model, **SIZE, steps=4), expected)
    assert counts() == (2, 2)
    assert counters["stats"]["unique_graphs"] == graphs
    assert caplog.text.count("TorchCompileModel compiles nothing") == 2  # runs


def test_blocks_that_another_pack_compiles_one_by_one_stay_compiled(small_unet, sample, caplog):
    """As KJNodes' compile nodes do, by core's own helper."""
    expected = sample(cached(small_unet), **SIZE, steps=4)
    torch._dynamo.reset()
    ran = []

    def backend(graph, inputs):
        return lambda *args: ran.append(1) or graph.forward(*args)

    model = cached(small_unet)
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
    expected = sample(cached(model), **run)
    compiled = GraphCache()
    fast = lambda model: accelerate(model, CompileSettings(backend="eager"), compiled)  # noqa: E731
    plain = sample(fast(model), **run)
    before = counters["stats"]["unique_graphs"]
    assert before
    for both in (fast(cached(model)), cached(fast(model))):
        assert_close(sample(both, **run), expected)
        assert counts() == (2, 2)
        assert_no_trace(both)
    assert torch.equal(sample(fast(model), **run), plain)
    assert counters["stats"]["unique_graphs"] == before


# Residuals for every layer, and guidance that asks twice
