"""Every diffusion model class of core: what DeepCache skips of it, and that a skipped call adds up.

The zoo's models are tiny; those with two blocks in their one list get five more of the same.
"""

import pytest
import torch
from comfy_accel.accel.modules.substitution import Order, substituted
from comfy_accel.accel.step_cache.splits.dit import DiTSplit
from comfy_accel.accel.step_cache.splits.layouts import find_split, numbers_kept, why_no_split
from comfy_accel.accel.step_cache.splits.unet import UNetSplit
from kit.deep_cache import assert_close
from kit.families import lengthened
from kit.step_cache import features_of
from kit.zoo import ZOO, Noise, Size

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


def call(model, name, stand_ins):
    latent, given = ZOO[name].inputs(Size(height=12, batch=2), Noise(0))
    sigmas = torch.tensor([1.0, 0.7, 0.0])
    options = {"sigmas": sigmas[1:2], "sample_sigmas": sigmas, "cond_or_uncond": [0], "patches": {}}
    given = {"context": None, "control": None, "transformer_options": options} | given
    with torch.inference_mode(), substituted(stand_ins, Order.CACHED):
        return model(latent, torch.full((len(latent),), 0.7), **given)


@pytest.mark.parametrize("name", STREAMS)
def test_skipped_call_adds_what_a_full_one_remembered(name):
    model = lengthened(name)
    split = find_split(model)
    assert isinstance(split, DiTSplit)
    features = features_of(split, levels=(14.6, 8.0, 0.0))
    latent, _ = ZOO[name].inputs(Size(height=12, batch=2), Noise(0))
    plain = call(model, name, {})
    features.run.begin(14.6)
    keys = features.branches(latent, ["a"], [0], None)
    assert torch.equal(call(model, name, split.full_layers(features, keys)), plain)
    assert tuple(span.streams.names for span in split.spans) == STREAMS[name]
    features.run.begin(8.0)
    keys = features.branches(latent, ["a"], [0], None)
    assert features.can_skip(keys)
    assert_close(call(model, name, split.skip_layers(features, keys)), plain, 1e-5)
    assert torch.equal(call(model, name, {}), plain)


@pytest.mark.parametrize("name", UNETS + NEITHER)
def test_other_layouts_are_told_apart(name):
    model = ZOO[name].build()
    split = find_split(model)
    if name in UNETS:
        assert isinstance(split, UNetSplit)
    else:
        assert split is None
        assert (
            why_no_split(model)
            == "it is neither a UNet with skip levels nor a transformer with one main list of blocks"
        )


@pytest.mark.parametrize("name", [name for name in (*STREAMS, *UNETS) if name not in ODD_HEADS])
def test_what_is_kept_is_known_before_the_first_call(name):
    """Within a factor of three, of models as narrow as their text is long and with latents as small."""
    split = find_split(lengthened(name))
    features = features_of(split, levels=(14.6, 8.0, 0.0))
    latent, _ = ZOO[name].inputs(Size(height=12, batch=2), Noise(0))
    features.run.begin(14.6)
    call(split.model, name, split.full_layers(features, features.branches(latent, ["a"], [0], None)))
    known = numbers_kept(split, latent.shape) * latent.itemsize
    assert features.bytes / 3 < known < features.bytes * 3
    assert features.run.bytes == features.bytes


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
