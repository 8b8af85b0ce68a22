"""DeepCache of transformers in a real ComfyUI: its own samplers, and what is skipped of every class of core.

The models of the zoo are tiny; those with two blocks in their one list get five more of the same.
"""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.modules.substitution import Order, substituted
from comfy_accel.accel.step_cache.splits.dit import DiTSplit
from comfy_accel.accel.step_cache.splits.layouts import find_split, numbers_kept, why_no_split
from comfy_accel.accel.step_cache.splits.unet import UNetSplit
from kit.deep_cache import SPLIT_TOLERANCE, assert_close, assert_no_trace, cached, counts, split_chunks
from kit.families import CONTROLLED, DITS, lengthened
from kit.step_cache import features_of
from kit.tiny_models import with_control
from kit.zoo import ZOO, Noise, Size
from torch._dynamo.utils import counters

LARGEST_DISTANCE = 0.8
"""Of the plain image, in the 2-norm: at interval 3 over four steps random networks give 0.2 to 0.7."""


# What is skipped of each class is in the table below; here core samples with them: two lists, one, and a video.
@pytest.mark.parametrize("name", ["Flux", "SD3", "Wan"])
def test_steps_between_are_skipped_at_two_sizes_and_the_model_stays_plain(name, no_fallback):
    dit = DITS[name]
    model = dit.load()
    deep = cached(model)
    for size in (0, 1):
        plain = dit.sample(model, size)
        out = dit.sample(deep, size)
        assert counts() == (2, 2)
        assert 1e-3 < (out - plain).norm() / plain.norm() < LARGEST_DISTANCE
        assert torch.equal(dit.sample(model, size), plain)
    assert_no_trace(model)


@pytest.mark.parametrize(
    "name, settings, run, tolerance",
    [
        *((name, {}, {"size": 1, "batch": 2}, SPLIT_TOLERANCE) for name in ("Flux", "SD3", "Wan")),
        ("Flux", {"points": 2}, {"steps": 8}, 1e-3),
    ],
    ids=["Flux", "SD3", "Wan", "Flux, forecast"],
)
def test_split_chunks_agree_with_joined_ones(name, settings, run, tolerance, no_fallback):
    dit = DITS[name]
    model = dit.load()
    joined = dit.sample(cached(model, **settings), **run)
    decided = counts()
    assert decided[1] >= 1
    assert_close(dit.sample(cached(split_chunks(model), **settings), **run), joined, tolerance)
    assert counts() == decided


@pytest.mark.parametrize("name", ["Flux", "SD3"])
def test_prompts_of_different_lengths_keep_their_own_text(name, no_fallback):
    dit = DITS[name]
    model = cached(dit.load())
    out = dit.sample(model, negative=dit.conditioning(2, tokens=17))
    assert counts() == (2, 2)
    assert not torch.equal(out, dit.sample(model))


# Company


def call(model, stand_ins, x, context, control=None):
    options = {"patches": {}, "patches_replace": {}}
    given = {"guidance": torch.zeros(len(x))} if hasattr(model, "double_blocks") else {}
    given |= dict(context=context, control=control, transformer_options=options)
    with torch.inference_mode(), substituted(stand_ins, Order.CACHED):
        return model(x, torch.full((len(x),), 0.7), **given)


@pytest.mark.parametrize("name, width", [("Flux", 64), ("Chroma", 64), ("SD3", 128), ("Qwen-Image", 64)])
def test_residuals_of_a_control_net_count_once(name, width):
    dit = DITS[name]
    model = dit.load().model.diffusion_model
    noise = lambda *shape, seed=0: torch.randn(shape, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    residuals = [None if index == 3 else noise(2, 36, width, seed=index) for index in range(dit.blocks - 1)]
    control = {"input": residuals, "output": residuals[::-1]}
    x, context = noise(2, *dit.latents[0][1:]), noise(2, 24, 48)
    split = find_split(model)
    features = features_of(split, levels=(3.0, 2.0, 1.0, 0.0))
    plain = call(model, {}, x, context, control)
    features.run.begin(3.0)
    keys = features.branches(x, ["a", "b"], [0, 1], None)
    assert torch.equal(call(model, split.full_layers(features, keys), x, context, control), plain)
    features.run.begin(2.0)
    keys = features.branches(x, ["a", "b"], [0, 1], None)
    assert features.can_skip(keys)
    withheld = split.withhold(control)
    assert withheld != control
    assert_close(call(model, split.skip_layers(features, keys), x, context, withheld), plain, 1e-5)
    # Nothing depends on their being withheld, as in models whose lists nobody has named.
    assert_close(call(model, split.skip_layers(features, keys), x, context, control), plain, 1e-5)


def test_control_net_in_a_real_run(no_fallback):
    model, net = CONTROLLED.load(), CONTROLLED.family.control_net(torch.float32)
    conds = {
        name: with_control(CONTROLLED.conditioning(seed), net) for seed, name in enumerate(("positive", "negative"), 1)
    }
    out = CONTROLLED.sample(cached(model), **conds)
    assert counts() == (2, 2)
    plain = CONTROLLED.sample(model, **conds)
    assert 1e-3 < (out - plain).norm() / plain.norm() < LARGEST_DISTANCE
    assert not torch.equal(out, CONTROLLED.sample(cached(model)))
    assert_close(CONTROLLED.sample(cached(split_chunks(model)), **conds), out)


@pytest.mark.parametrize("layer", [0, 2])
def test_guidance_that_leaves_a_block_out(layer, no_fallback):
    """Where it takes the first block, its own call is never skipped."""
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    dit = DITS["SD3"]
    guided = SkipLayerGuidanceDiT.execute(dit.load(), 3.0, 0.0, 1.0, str(layer), "", 0.0).args[0]
    joined = dit.sample(cached(guided))
    assert counts() == (2, 2)
    assert_close(dit.sample(cached(split_chunks(guided))), joined)
    assert not torch.equal(joined, dit.sample(guided))


def test_accelerate_model_in_either_order_compiles_nothing_more(no_fallback):
    dit = DITS["Wan"]  # of one kind
    model = dit.load()
    expected = dit.sample(cached(model))
    graphs = GraphCache()
    fast = lambda model: accelerate(model, CompileSettings(backend="eager"), graphs)  # noqa: E731
    dit.sample(fast(model), steps=2)
    before = counters["stats"]["unique_graphs"]
    assert before
    for both in (fast(cached(model)), cached(fast(model))):
        assert_close(dit.sample(both), expected)
        assert counts() == (2, 2)
        assert counters["stats"]["unique_graphs"] == before
        assert_no_trace(both)


# Every diffusion model class of core


ODD_HEADS = ("Chroma Radiance", "Cosmos", "Cosmos predict2")
"""At these sizes: a head for pixels after the blocks, and inner layers narrower than it."""

UNETS = ("SD1.5", "SD1.5 inpaint", "SD2", "SDXL", "SDXL refiner", "SVD")
NEITHER = ("Stable Cascade C", "Stable Cascade B")
OUTWEIGHED = "ACE-Step"
"""Its lyric encoder has its real width here, and more weights than the transformer; a real one has 24 wide blocks."""

DOUBLE_AND_SINGLE = (("img", "txt"), ("x",))
STREAMS = {
    "Flux": DOUBLE_AND_SINGLE,
    "Flux Kontext": DOUBLE_AND_SINGLE,
    "Flux 2": DOUBLE_AND_SINGLE,
    "Chroma": DOUBLE_AND_SINGLE,
    "Chroma Radiance": DOUBLE_AND_SINGLE,
    "SD3": ((None, "args[1]"),),
    "SD3.5 medium": ((None, "args[1]"),),
    "AuraFlow": (("c", "x"), ("cx",)),
    "PixArt Alpha": (("x",),),
    "PixArt Sigma": (("x",),),
    "HunyuanDiT": (("x",),),
    "HiDream": (("image_tokens", "text_tokens"), ("image_tokens",)),
    "Lumina2": (("x",),),
    "Z-Image": (("x",),),
    "OmniGen2": (("hidden_states",),),
    "OmniGen2 edit": (("hidden_states",),),
    "Qwen-Image": (("encoder_hidden_states", "hidden_states"),),
    "Wan t2v": (("x",),),
    "Wan i2v": (("x",),),
    "Wan VACE": (("x",),),
    "Wan camera": (("x",),),
    "Wan HuMo": (("x",),),
    "Wan S2V": (("x",),),
    "Wan animate": (("x",),),
    "HunyuanVideo": DOUBLE_AND_SINGLE,
    "HunyuanVideo i2v": DOUBLE_AND_SINGLE,
    "HunyuanVideo 1.5": DOUBLE_AND_SINGLE,
    "HunyuanImage 2.1": DOUBLE_AND_SINGLE,
    "LTXV": (("x",),),
    "Mochi": (("x", "y"),),
    "Cosmos": (("x",),),
    "Cosmos predict2": (("x_B_T_H_W_D",),),
    "Stable Audio": (("x",),),
    "Hunyuan3D 2": DOUBLE_AND_SINGLE,
    "Hunyuan3D 2.1": (("hidden_states",),),
}
"""What is remembered: for each list of blocks the arguments whose change is; None for one that ends with it."""


def call_specimen(model, name, stand_ins):
    latent, given = ZOO[name].inputs(Size(height=12, batch=2), Noise(0))
    sigmas = torch.tensor([1.0, 0.7, 0.0])
    options = {"sigmas": sigmas[1:2], "sample_sigmas": sigmas, "cond_or_uncond": [0], "patches": {}}
    given = {"context": None, "control": None, "transformer_options": options} | given
    with torch.inference_mode(), substituted(stand_ins, Order.CACHED):
        return model(latent, torch.full((len(latent),), 0.7), **given)


def assert_known_before(split, latent, features):
    """What is kept: within a factor of three, of models as narrow as their text is long and with latents as small."""
    known = numbers_kept(split, latent.shape) * latent.itemsize
    assert features.bytes / 3 < known < features.bytes * 3
    assert features.run.bytes == features.bytes


@pytest.mark.parametrize("name", STREAMS)
def test_skipped_call_adds_what_a_full_one_remembered(name):
    model = lengthened(name)
    split = find_split(model)
    assert isinstance(split, DiTSplit)
    features = features_of(split, levels=(14.6, 8.0, 0.0))
    latent, _ = ZOO[name].inputs(Size(height=12, batch=2), Noise(0))
    plain = call_specimen(model, name, {})
    features.run.begin(14.6)
    keys = features.branches(latent, ["a"], [0], None)
    assert torch.equal(call_specimen(model, name, split.full_layers(features, keys)), plain)
    assert tuple(span.streams.names for span in split.spans) == STREAMS[name]
    features.run.begin(8.0)
    keys = features.branches(latent, ["a"], [0], None)
    assert features.can_skip(keys)
    assert_close(call_specimen(model, name, split.skip_layers(features, keys)), plain, 1e-5)
    assert torch.equal(call_specimen(model, name, {}), plain)
    if name not in ODD_HEADS:
        assert_known_before(split, latent, features)


@pytest.mark.parametrize("name", NEITHER)
def test_other_layouts_are_told_apart(name):
    model = ZOO[name].build()
    assert find_split(model) is None
    reason = "it is neither a UNet with skip levels nor a transformer with one main list of blocks"
    assert why_no_split(model) == reason


@pytest.mark.parametrize("name", UNETS)
def test_what_a_unet_keeps_is_known_before_the_first_call(name):
    split = find_split(ZOO[name].build())
    features = features_of(split, levels=(14.6, 8.0, 0.0))
    latent, _ = ZOO[name].inputs(Size(height=12, batch=2), Noise(0))
    features.run.begin(14.6)
    call_specimen(split.model, name, split.full_layers(features, features.branches(latent, ["a"], [0], None)))
    assert isinstance(split, UNetSplit)
    assert_known_before(split, latent, features)


@pytest.mark.parametrize(
    "latent, widths, lists, megabytes",
    [
        ((1, 16, 128, 128), (3072, 64), 2, 48),  # Flux at 1024 by 1024
        ((1, 16, 21, 60, 104), (5120, 64), 1, 320),  # Wan 14B, 81 frames of 480p
        ((1, 4, 128, 128), (320, 4), 1, 10),  # SDXL
    ],
)
def test_what_models_of_full_size_keep_of_one_point(latent, widths, lists, megabytes):
    model = torch.nn.Module()
    for name in ("double_blocks", "single_blocks")[-lists:]:
        setattr(model, name, torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(8, 2, 8) for _ in range(3)))
    model.embed = torch.nn.Linear(256, widths[0], device="meta")
    model.head = torch.nn.Linear(*widths, device="meta")
    assert round(numbers_kept(DiTSplit(model), latent) * 2 / (1 << 20)) == megabytes


def test_every_specimen_is_in_one_table():
    assert sorted((*STREAMS, *UNETS, *NEITHER, OUTWEIGHED)) == sorted(ZOO)
