"""Batch Snap: the images that were asked for get the noise they would get without it."""

import comfy.sample
import comfy.sampler_helpers
import pytest
import real_prompts
import tiny_models
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.sizes.batch import pad_batch

SIZES = [1, 2, 4, 8]


@pytest.fixture
def prompts(monkeypatch, tmp_path):
    return real_prompts.prompts(monkeypatch, tmp_path)


def noise(latent, seed=7):
    return comfy.sample.prepare_noise(latent["samples"], seed, latent.get("batch_index"))


def latent(batch, height=8, width=8, channels=4, **others):
    return {"samples": torch.randn(batch, channels, height, width), **others}


@pytest.mark.parametrize(
    "given",
    [latent(3), latent(5, 12, 7), latent(1, 5, 5), latent(3, 9, 11, 16), latent(3, batch_index=[6, 7, 8])]
    + [latent(1, 5, 5, batch_index=[2])],
    ids=["3", "5", "odd 1", "odd 3 of 16 channels", "with an index", "odd with an index"],
)
def test_the_first_images_noise_is_bit_identical(given):
    padded, reason = pad_batch(given, SIZES)
    count, made = len(given["samples"]), len(padded["samples"])
    if count == 1:
        padded, reason = pad_batch(given, [4])
        made = len(padded["samples"])
    assert reason == "" and made in (4, 8) and count < made
    assert torch.equal(padded["samples"][:count], given["samples"])
    for seed in (0, 7, 2**40):
        assert torch.equal(noise(padded, seed)[:count], noise(given, seed))


def test_where_the_noise_would_change_nothing_is_padded():
    given = latent(3, 5, 5)  # 100 numbers an image, which torch draws in sixteens over the whole batch
    padded, reason = pad_batch(given, SIZES)
    assert padded is given and "noise for the last image depends on the batch" in reason
    longer = comfy.sample.prepare_noise(torch.zeros(4, 4, 5, 5), 0)
    assert not torch.equal(longer[:3], comfy.sample.prepare_noise(torch.zeros(3, 4, 5, 5), 0))


def test_a_right_or_too_large_batch_comes_back_as_it_is():
    for batch, said in ((4, ""), (9, "more than 8")):
        given = latent(batch)
        assert pad_batch(given, SIZES) == (given, said)


def test_a_mask_for_each_image_is_padded_with_them():
    masks = torch.rand(3, 1, 64, 64)
    padded, _ = pad_batch(latent(3, noise_mask=masks), SIZES)
    assert torch.equal(padded["noise_mask"], masks[[0, 1, 2, 2]])
    one = torch.rand(1, 1, 64, 64)
    assert pad_batch(latent(3, noise_mask=one), SIZES)[0]["noise_mask"] is one


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "heun"])
def test_the_images_are_those_of_the_smaller_batch(sampler):
    model = tiny_models.unet(dtype=torch.float64)  # in single precision, rounding is above the bounds on some CPUs
    given = {"samples": torch.zeros(3, 4, 8, 8)}
    padded, _ = pad_batch(given, SIZES)

    def sampled(latent):
        return comfy.sample.sample(
            *(model, noise(latent), 3, 5.0, sampler, "normal"),
            *(tiny_models.conditioning(seed=1), tiny_models.conditioning(seed=2), latent["samples"]),
            **{"disable_pbar": True, "seed": 7},
        )

    # Bit by bit the noise is; what a convolution sums up in another order at another batch is not.
    torch.testing.assert_close(sampled(padded)[:3], sampled(given), rtol=1e-4, atol=1e-4)


def test_padded_batches_share_exact_size_graphs():
    cache = GraphCache()
    two_levels = {"num_res_blocks": [1, 1], "channel_mult": [1, 1], "transformer_depth": [0, 0]}
    model = tiny_models.unet(**two_levels, transformer_depth_output=[0] * 4)
    fast = accelerate(model, CompileSettings(backend="eager", any_size=False), cache)

    def compiled(batch, sizes):
        given = {"samples": torch.zeros(batch, 4, 8, 8)}
        before = cache.statistics()["compilations"]
        padded, _ = pad_batch(given, sizes)
        tiny_models.sample(fast, latent=padded["samples"], steps=1)
        return cache.statistics()["compilations"] - before

    assert compiled(4, [4]) > 0
    assert compiled(3, [4]) == compiled(2, [4]) == 0
    assert compiled(3, [3]) > 0


def batch_snap(enabled=True, sizes="1, 2, 4, 8"):
    return {
        "latent": {"class_type": "Give", "inputs": {"name": "latent"}},
        "snap": {
            "class_type": "AccelResolutionSnap",
            "inputs": {"width": 64, "height": 64, "multiple": "64", "mode": "nearest", "keep_aspect": False}
            | {"max_megapixels": 0.0, "batch_size": 1, "how": "pad edge", "latent": ["latent", 0]},
        },
        "batch": {
            "class_type": "AccelBatchSnap",
            "inputs": {"latent": ["snap", 2], "enabled": enabled, "sizes": sizes, "restore": ["snap", 4]},
        },
        "images": {"class_type": "Give", "inputs": {"name": "images"}},
        "restore": {
            "class_type": "AccelResolutionRestore",
            "inputs": {"image": ["images", 0], "restore": ["batch", 1]},
        },
        "padded": {"class_type": "Keep", "inputs": {"name": "padded", "value": ["batch", 0]}},
        "restored": {"class_type": "Keep", "inputs": {"name": "restored", "value": ["restore", 0]}},
    }


def test_one_restore_undoes_both_snaps(prompts):
    images = torch.rand(4, 128, 64, 3)
    kept = prompts.run(batch_snap(), latent=latent(3, 9, 8), images=images)
    assert kept["padded"]["samples"].shape == (4, 4, 16, 8)
    assert torch.equal(kept["restored"], images[:3, 24:96])  # 56 px were added, 24 of them above: whole elements
    assert prompts.text("batch") == "3 → 4 images"
    assert prompts.text("restore") == "64×128 → 64×72, 3 of 4 images"


@pytest.mark.parametrize(("enabled", "made"), [(True, 8), (False, 4)])
def test_of_a_batch_filled_up_twice_the_images_asked_for_at_first_are_left(enabled, made, prompts):
    prompt = batch_snap(sizes="4")
    inputs = {"latent": ["batch", 0], "enabled": enabled, "sizes": "8", "restore": ["batch", 1]}
    prompt["again"] = {"class_type": "AccelBatchSnap", "inputs": inputs}
    prompt["restore"]["inputs"]["restore"] = ["again", 1]
    images = torch.rand(made, 64, 64, 3)
    assert torch.equal(prompts.run(prompt, latent=latent(3), images=images)["restored"], images[:3])


def test_a_mask_over_frames_is_none_for_each_image():
    """Core takes [3, h, w] for three frames' masks where the latent has frames."""
    masks, samples = torch.rand(3, 64, 64), torch.randn(3, 16, 3, 8, 8)
    padded, _ = pad_batch({"samples": samples, "noise_mask": masks}, SIZES)
    assert padded["noise_mask"] is masks
    before, after = (
        comfy.sampler_helpers.prepare_mask(mask, shape, "cpu")
        for mask, shape in ((masks, samples.shape), (padded["noise_mask"], padded["samples"].shape))
    )
    assert torch.equal(before, after[:3])
    own = torch.rand(3, 1, 3, 64, 64)
    assert torch.equal(pad_batch({"samples": samples, "noise_mask": own}, SIZES)[0]["noise_mask"], own[[0, 1, 2, 2]])


def test_turned_off_it_changes_nothing(prompts):
    given = latent(3, 8, 8)
    kept = prompts.run(batch_snap(enabled=False), latent=given, images=torch.rand(3, 64, 64, 3))
    assert kept["padded"] is given
    assert prompts.text("batch") == "3 images, unchanged: turned off"
    from comfy_accel.nodes.batch_snap import AccelBatchSnap

    defaults = {declared.id: getattr(declared, "default", None) for declared in AccelBatchSnap.define_schema().inputs}
    assert defaults["enabled"] is False


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ("1, two", "'two' is not valid for batch sizes: write whole numbers from 1 to 4096"),
        ("0", "'0' is not valid for batch sizes"),
        ("", "sizes is empty; write whole numbers from 1 to 4096"),
    ],
)
def test_wrong_sizes_are_refused_with_what_is_right(sizes, reason, prompts):
    assert reason in prompts.refused(batch_snap(sizes=sizes))
