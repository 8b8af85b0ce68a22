"""The trained test network and the bench on it: it knows its data, training is repeatable, the bench runs."""

import json
import os
import subprocess
import sys

import pytest
import torch

from bench import ROOT, Problem, toy_data

MEASURED_LOSS = 0.05
"""Of the predicted noise, at a noise level of 1; noise itself is 1."""


@pytest.fixture(scope="module")
def network():
    from bench import toy

    return toy.load()


def test_network_tells_noise_from_its_data_at_every_trained_size(network):
    from bench import toy

    generator = torch.Generator().manual_seed(123)
    classes = torch.arange(len(toy_data.CLASSES))
    with torch.inference_mode():
        for height, width in toy.SIZES:
            latent = toy_data.pictures(classes, height, width, generator)
            noise = torch.randn(latent.shape, generator=generator)
            timestep = network.model.model_sampling.timestep(torch.ones(len(classes)))
            scaled = (latent + noise) / 2**0.5
            predicted = network.model.diffusion_model(scaled, timestep.float(), toy.class_tokens()[classes])
            assert (predicted - noise).square().mean() < MEASURED_LOSS


def test_network_makes_what_its_prompt_names(network):
    """Samples are told by the pictures of the data that they are nearest to; noise by chance, 0.125."""
    from bench import toy

    each = 3
    known = torch.arange(len(toy_data.CLASSES)).repeat_interleave(200)
    pictures = _described(toy_data.pictures(known, 16, 16, torch.Generator().manual_seed(7)))
    asked = torch.arange(len(toy_data.CLASSES)).repeat_interleave(each)
    with torch.inference_mode():
        made = _described(toy.sample(network, asked, 16, 16, 20, "euler", seed=0))
    right = {}
    for name, described in (("made", made), ("noise", torch.randn_like(made))):
        nearest = torch.cdist(described, pictures).topk(15, largest=False).indices
        right[name] = (known[nearest].mode(1).values == asked).float().mean().item()
    assert right["made"] >= 0.5
    assert right["noise"] <= 0.3


def _described(latents):
    return toy_data.view(latents).flatten(1)


def test_file_is_small_enough_to_keep():
    from bench import toy

    assert toy.FILE.stat().st_size < 12e6


def test_training_is_repeatable_and_goes_on_from_a_checkpoint():
    from bench.train_toy import Training

    whole, halves = Training(2, 2, seed=5), Training(2, 2, seed=5)
    whole.advance()
    halves.advance()
    resumed = Training(2, 2, seed=5)
    resumed.restore(halves.state())
    with pytest.raises(Problem, match="another --work"):
        Training(2, 2, seed=6).restore(halves.state())
    for training in (whole, resumed):
        training.advance()
    for name, value in whole.average.items():
        assert torch.equal(value, resumed.average[name]), name


@pytest.mark.thorough  # a bench as a subprocess
def test_bench_writes_rows_table_and_plot(tmp_path):
    command = [sys.executable, "-m", "bench.deepcache", "--quick", "--steps", "4", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = json.loads((tmp_path / "deepcache.json").read_text(encoding="utf-8"))["rows"]
    wanted = {
        "method",
        "interval",
        "schedule",
        "between",
        "sampler",
        "width",
        "height",
        "flops_share",
        "psnr_db",
        "ssim",
    }
    assert all(wanted <= row.keys() for row in rows)
    assert {row["method"] for row in rows} == {"DeepCache", "EasyCache"}
    assert all(0 < row["flops_share"] <= 1 for row in rows)
    for name in ("deepcache.md", "deepcache.png"):
        assert (tmp_path / name).stat().st_size > 0
