"""Resolution Snap and Restore as nodes of a real ComfyUI, with a small VAE of its own in between."""

import itertools

import comfy.ldm.models.autoencoder
import comfy.sd
import pytest
import torch
from comfy_accel.accel.sizing.fit import ANCHORS, HOW
from comfy_accel.accel.sizing.resolution import MODES
from kit import real_prompts, tiny_models
from kit.thorough import thorough_except
from kit.tiny_models import randomize

VAE_CONFIG = {
    "ddconfig": {
        **{"double_z": True, "z_channels": 4, "resolution": 64, "in_channels": 3, "out_ch": 3, "ch": 32},
        **{"ch_mult": [1, 1, 1, 1], "num_res_blocks": 0, "attn_resolutions": [], "dropout": 0.0},
    },
    "embed_dim": 4,
}
SIZES = [
    *((256, 256), (264, 264), (728, 264), (720, 960), (960, 720), (896, 768), (512, 512), (513, 511), (2048, 256)),
    *((256, 2048), (2047, 257), (300, 300), (333, 777), (777, 333), (1000, 264), (360, 640), (640, 360), (720, 720)),
    *((257, 999), (1023, 401), (480, 270), (854, 480), (600, 800), (1080, 272), (1920, 264), (271, 1366), (404, 404)),
    *((299, 1501), (1280, 296), (808, 472)),
]
WAYS = itertools.cycle(itertools.product(("8", "from model", "32", "16", "64"), HOW))
ASKED = [(*size, next(WAYS)) for size in SIZES]
QUICK = [asked for asked in ASKED if asked[:2] in ((264, 264), (480, 270), (513, 511), (777, 333), (1000, 264))]
"""One for each way to fit, of the sizes that take the VAE no seconds."""
SNAP = {"width": 64, "height": 64, "multiple": "8", "mode": "nearest", "keep_aspect": False, "max_megapixels": 0.0}


@pytest.fixture
def prompts(monkeypatch, tmp_path):
    return real_prompts.prompts(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def vae():
    model = comfy.ldm.models.autoencoder.AutoencoderKL(**VAE_CONFIG)
    randomize(model)
    return comfy.sd.VAE(sd=model.state_dict(), config={"params": VAE_CONFIG}, dtype=torch.float32)


@pytest.fixture(scope="module")
def unet():
    """Two levels, so that its multiple is 16."""
    return tiny_models.res_blocks()


def image(width, height, batch=1):
    return torch.rand(batch, height, width, 3, generator=torch.Generator().manual_seed(width * height))


def give(name):
    return {"class_type": "Give", "inputs": {"name": name}}


def keep(name, node, slot):
    return {"class_type": "Keep", "inputs": {"name": name, "value": [node, slot]}}


def snap(given=(), **changes):
    """A prompt of Resolution Snap alone, all its outputs but the image kept; given: inputs that are connected."""
    inputs = {**SNAP, "batch_size": 1, **changes, **{name: [name, 0] for name in given}}
    return {
        **{name: give(name) for name in given},
        "snap": {"class_type": "AccelResolutionSnap", "inputs": inputs},
        **{f"keep {name}": keep(name, "snap", slot) for name, slot in (("width", 0), ("height", 1), ("latent", 2))},
    }


def there_and_back(**changes):
    """Image → Snap → VAE Encode → VAE Decode → Restore; and straight from Snap to Restore."""
    return {
        **snap(given=("image",), **changes),
        "vae": give("vae"),
        "encode": {"class_type": "VAEEncode", "inputs": {"pixels": ["snap", 3], "vae": ["vae", 0]}},
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["encode", 0], "vae": ["vae", 0]}},
        "restore": {"class_type": "AccelResolutionRestore", "inputs": {"image": ["decode", 0], "restore": ["snap", 4]}},
        "unmade": {"class_type": "AccelResolutionRestore", "inputs": {"image": ["snap", 3], "restore": ["snap", 4]}},
        **{"restored": keep("restored", "restore", 0), "back": keep("back", "unmade", 0)},
        **{"encoded": keep("encoded", "encode", 0), "snapped": keep("snapped", "snap", 3)},
    }


@pytest.mark.parametrize("asked", thorough_except(ASKED, *QUICK), ids=str)
def test_through_the_vae_and_back_the_size_is_exact(asked, prompts, vae):
    width, height, (multiple, how) = asked
    pixels = image(width, height)
    kept = prompts.run(there_and_back(multiple=multiple, how=how), image=pixels, vae=vae)
    step = 64 if multiple == "from model" else int(multiple)
    snapped = (kept["height"], kept["width"])
    assert kept["width"] % step == kept["height"] % step == 0
    assert kept["snapped"].shape == (1, *snapped, 3)
    assert kept["encoded"]["samples"].shape[-2:] == (kept["height"] // 8, kept["width"] // 8)
    assert kept["latent"]["samples"].shape[-2:] == (kept["height"] // 8, kept["width"] // 8)
    assert kept["restored"].shape == kept["back"].shape == pixels.shape
    if how.startswith("pad"):
        assert torch.equal(kept["back"], pixels)
    if snapped == (height, width):
        assert kept["snapped"] is pixels


# Mode and anchor do not know of each other: each is quick with one of the other's.
@pytest.mark.parametrize(
    "way", thorough_except([*itertools.product(MODES, ANCHORS)], *zip(itertools.cycle(MODES), ANCHORS)), ids=str
)
def test_padding_gives_every_pixel_back_in_every_mode(way, prompts, vae):
    mode, anchor = way
    pixels = image(72, 90, batch=2)
    kept = prompts.run(
        there_and_back(multiple="64", how="pad reflect", mode=mode, anchor=anchor), image=pixels, vae=vae
    )
    assert torch.equal(kept["back"], pixels)
    assert (kept["width"], kept["height"]) == (128, 128)
    assert kept["restored"].shape == pixels.shape


def test_the_node_and_the_history_say_what_was_done(prompts):
    prompts.run(snap(width=720, height=960, multiple="64"))
    assert prompts.text("snap") == "720×960 → 704×960, 2.2 % narrower"
    prompts.run(snap(width=704, height=960, multiple="64"))
    assert prompts.text("snap") == "704×960, as asked"
    prompts.run(snap(width=512, height=640, multiple="trained sizes"))
    assert prompts.text("snap").endswith("(a size that SDXL was trained at)")


def test_restore_says_what_it_did(prompts, vae):
    prompts.run(there_and_back(multiple="64", how="pad edge"), image=image(100, 64), vae=vae)
    assert prompts.text("restore") == "128×64 → 100×64"
    prompts.run(there_and_back(multiple="64"), image=image(128, 64), vae=vae)
    assert prompts.text("restore") == "128×64, as it was"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("frames", [(), (3,)])
@pytest.mark.parametrize("coarse", [1, 8])
def test_a_latent_is_snapped_with_its_mask(how, frames, coarse, prompts):
    samples = torch.randn(2, 4, *frames, 9, 11)
    mask = torch.zeros(2, 1, 72 // coarse, 88 // coarse)
    mask[..., 8 // coarse : 24 // coarse, :] = 1.0
    latent = {"samples": samples, "noise_mask": mask, "batch_index": [3, 4]}
    kept = prompts.run(snap(given=("latent",), multiple="64", mode="up", how=how, anchor="top left"), latent=latent)
    snapped = kept["latent"]
    assert (kept["width"], kept["height"]) == (128, 128)
    assert snapped["samples"].shape == (2, 4, *frames, 16, 16)
    assert snapped["noise_mask"].shape == (2, 1, 128, 128)
    assert snapped["batch_index"] == [3, 4] and set(latent) == {"samples", "noise_mask", "batch_index"}
    assert torch.isfinite(snapped["samples"]).all()
    if how.startswith("pad"):
        assert torch.equal(snapped["samples"][..., :9, :11], samples)
        assert snapped["noise_mask"][0, 0, 16, 0] == 1.0 and snapped["noise_mask"][0, 0, 40, 0] == 0.0
        assert snapped["noise_mask"][0, 0, 16, 100] == 1.0
        assert snapped["noise_mask"][0, 0, 127, 127] == {"pad edge": 0.0}.get(how, 1.0)  # mirrored, it is masked


def test_a_snapped_latent_is_sampled_with_its_mask(prompts, unet):
    """The part that the mask leaves out comes out of core's sampler as it went in."""
    samples = torch.randn(1, 4, 9, 11)
    mask = torch.zeros(1, 1, 72, 88)
    mask[..., 40:, :] = 1.0
    kept = prompts.run(
        snap(given=("latent", "model"), multiple="from model", how="pad edge", anchor="top left"),
        latent={"samples": samples, "noise_mask": mask},
        model=unet,
    )
    sampler = {"seed": 1, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    made = prompts.run(
        {
            **{name: give(name) for name in ("model", "positive", "latent")},
            "sampler": {
                "class_type": "KSampler",
                "inputs": sampler
                | {"model": ["model", 0], "positive": ["positive", 0], "negative": ["positive", 0]}
                | {"latent_image": ["latent", 0]},
            },
            "made": keep("made", "sampler", 0),
        },
        **{"model": unet, "positive": tiny_models.conditioning(), "latent": kept["latent"]},
    )["made"]["samples"]
    assert made.shape == (1, 4, 10, 12)
    torch.testing.assert_close(made[..., :4, :11], samples[..., :4, :], rtol=1e-4, atol=1e-4)
    assert (made[..., 6:9, :11] - samples[..., 6:, :]).abs().mean() > 0.1


def test_without_an_image_only_who_asks_for_one_is_told(prompts):
    prompt = snap(width=100, height=64)
    assert prompts.run(prompt)["latent"]["samples"].shape == (1, 4, 8, 13)
    assert prompts.blocked() == []
    kept = prompts.run({**prompt, "keep image": keep("image", "snap", 3)})
    (said,) = prompts.blocked()
    assert "This output gives an image only if one is connected to the node's image input." in said
    assert "image" not in kept


def test_an_image_and_a_latent_at_once_are_refused(prompts):
    with pytest.raises(real_prompts.Failed, match="Both an image and a latent are connected"):
        prompts.run(snap(given=("image", "latent")), image=image(8, 8), latent={"samples": torch.zeros(1, 4, 8, 8)})


def test_sound_has_no_size_to_snap(prompts):
    with pytest.raises(real_prompts.Failed, match="no height and width"):
        prompts.run(snap(given=("latent",)), latent={"samples": torch.zeros(1, 64, 1024)})


def test_a_workflow_saved_before_the_later_inputs_runs_as_it_did(prompts):
    inputs = {"width": 720, "height": 960, "multiple": "from model", "mode": "down", "keep_aspect": False}
    inputs |= {"max_megapixels": 0.0, "batch_size": 3}
    prompt = snap()
    prompt["snap"]["inputs"] = inputs
    kept = prompts.run(prompt)
    assert (kept["width"], kept["height"]) == (704, 960)
    assert kept["latent"]["samples"].shape == (3, 4, 120, 88) and not kept["latent"]["samples"].any()
