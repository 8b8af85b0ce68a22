"""Resolution Snap and Restore as nodes of a real ComfyUI, with a small VAE of its own in between."""

import pytest
import torch
from kit import real_prompts, tiny_models
from kit.real_prompts import give, keep
from kit.thorough import thorough_except

SIZES = [(64, 64), (264, 264), (333, 97), (480, 270), (720, 960), (1000, 264), (2047, 257)]
QUICK = SIZES[:3]


@pytest.fixture
def prompts(monkeypatch, tmp_path):
    return real_prompts.prompts(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def unet():
    """Two levels, so that its multiple is 16."""
    return tiny_models.res_blocks()


def image(width, height, batch=1):
    return torch.rand(batch, height, width, 3, generator=torch.Generator().manual_seed(width * height))


def snap(given=(), width=64, height=64, batch_size=1):
    """A prompt of Resolution Snap alone, all its outputs but the image kept; given: inputs that are connected."""
    inputs = {"width": width, "height": height, "batch_size": batch_size, **{name: [name, 0] for name in given}}
    return {
        **{name: give(name) for name in given},
        "snap": {"class_type": "AccelResolutionSnap", "inputs": inputs},
        **{f"keep {name}": keep(name, "snap", slot) for name, slot in (("width", 0), ("height", 1), ("latent", 2))},
    }


def there_and_back():
    """Image → Snap → VAE Encode → VAE Decode → Restore; and straight from Snap to Restore."""
    return {
        **snap(given=("image",)),
        "vae": give("vae"),
        "encode": {"class_type": "VAEEncode", "inputs": {"pixels": ["snap", 3], "vae": ["vae", 0]}},
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["encode", 0], "vae": ["vae", 0]}},
        "restore": {"class_type": "AccelResolutionRestore", "inputs": {"image": ["decode", 0], "restore": ["snap", 4]}},
        "unmade": {"class_type": "AccelResolutionRestore", "inputs": {"image": ["snap", 3], "restore": ["snap", 4]}},
        **{"restored": keep("restored", "restore", 0), "back": keep("back", "unmade", 0)},
        **{"encoded": keep("encoded", "encode", 0), "snapped": keep("snapped", "snap", 3)},
    }


@pytest.mark.parametrize("asked", thorough_except(SIZES, *QUICK), ids=str)
def test_through_the_vae_and_back_the_size_is_exact_and_nothing_is_cut_off(asked, prompts, vae):
    width, height = asked
    pixels = image(width, height)
    pixels[..., 0] = torch.linspace(0, 1, width)  # across, so that a cut or a border would be seen
    kept = prompts.run(there_and_back(), image=pixels, vae=vae)
    assert kept["width"] % 64 == kept["height"] % 64 == 0
    assert kept["snapped"].shape == (1, kept["height"], kept["width"], 3)
    assert kept["encoded"]["samples"].shape[-2:] == (kept["height"] // 8, kept["width"] // 8)
    assert kept["latent"]["samples"].shape[-2:] == (kept["height"] // 8, kept["width"] // 8)
    assert kept["restored"].shape == kept["back"].shape == pixels.shape
    assert (kept["back"][..., 0] - pixels[..., 0]).abs().max() < 0.03
    if (kept["width"], kept["height"]) == asked:
        assert kept["snapped"] is pixels


def test_the_nodes_and_the_history_say_what_was_done(prompts, vae):
    prompts.run(snap(width=720, height=960))
    assert prompts.text("snap") == "720×960 → 704×960, 2.2 % narrower"
    prompts.run(there_and_back(), image=image(100, 64), vae=vae)
    assert prompts.text("restore") == "128×64 → 100×64"
    prompts.run(there_and_back(), image=image(128, 64), vae=vae)
    assert (prompts.text("snap"), prompts.text("restore")) == ("128×64, as asked", "128×64, as it was")


@pytest.mark.parametrize("frames", [(), (3,)])
@pytest.mark.parametrize("coarse", [1, 8])
def test_a_latent_is_snapped_with_its_mask(frames, coarse, prompts):
    samples = torch.randn(2, 4, *frames, 9, 11)
    mask = torch.zeros(2, 1, 72 // coarse, 88 // coarse)
    mask[..., : 32 // coarse, :] = 1.0
    latent = {"samples": samples, "noise_mask": mask, "batch_index": [3, 4]}
    kept = prompts.run(snap(given=("latent",)), latent=latent)
    snapped = kept["latent"]
    assert (kept["width"], kept["height"]) == (64, 64)
    assert snapped["samples"].shape == (2, 4, *frames, 8, 8) and torch.isfinite(snapped["samples"]).all()
    assert snapped["noise_mask"].shape == (2, 1, 64, 64)
    assert snapped["noise_mask"][..., :24, :].eq(1).all() and snapped["noise_mask"][..., 36:, :].eq(0).all()
    assert snapped["batch_index"] == [3, 4] and set(latent) == {"samples", "noise_mask", "batch_index"}


def test_a_latent_whose_size_is_right_stays_the_same_one(prompts):
    latent = {"samples": torch.randn(1, 4, 8, 16)}
    assert torch.equal(prompts.run(snap(given=("latent",)), latent=latent)["latent"]["samples"], latent["samples"])


def test_a_latent_without_a_model_tells_its_own_scale(prompts):
    latent = {"samples": torch.randn(1, 128, 5, 8), "downscale_ratio_spacial": 32}
    kept = prompts.run(snap(given=("latent",)), latent=latent)
    assert (kept["width"], kept["height"], kept["latent"]["samples"].shape[-2:]) == (256, 192, (6, 8))


def test_an_empty_latent_is_that_of_the_connected_model(prompts, unet):
    kept = prompts.run(snap(given=("model",), width=720, height=955, batch_size=3), model=unet)
    assert (kept["width"], kept["height"]) == (720, 960)
    assert kept["latent"]["samples"].shape == (3, 4, 120, 90) and not kept["latent"]["samples"].any()


def test_without_an_image_only_who_asks_for_one_is_told(prompts):
    prompt = snap(width=100, height=64)
    assert prompts.run(prompt)["latent"]["samples"].shape == (1, 4, 8, 16)
    assert prompts.blocked() == []
    kept = prompts.run({**prompt, "keep image": keep("image", "snap", 3)})
    (said,) = prompts.blocked()
    assert "This output gives an image only if one is connected to the node's image input." in said
    assert "image" not in kept


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"image": image(8, 8), "latent": {"samples": torch.zeros(1, 4, 8, 8)}}, "Both an image and a latent are"),
        ({"latent": {"samples": torch.zeros(1, 64, 1024)}}, "no height and width"),
    ],
    ids=["both", "sound"],
)
def test_what_cannot_be_snapped_is_refused_with_the_reason(given, reason, prompts):
    with pytest.raises(real_prompts.Failed, match=reason):
        prompts.run(snap(given=tuple(given)), **given)
