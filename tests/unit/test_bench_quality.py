"""The bench on a user's own checkpoint: its prompts, its table, and measures whose packages may be missing."""

import sys
from types import SimpleNamespace

import pytest
import torch

from bench import perceptual, quality
from tools import Problem


def test_prompts_are_lines_and_a_file_without_any_is_refused(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a cat\n\n  a dog \n", encoding="utf-8")
    assert quality._prompts(file) == ["a cat", "a dog"]
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(Problem, match="has no prompt"):
        quality._prompts(file)
    with pytest.raises(Problem, match="No file"):
        quality._prompts(tmp_path / "none.txt")


def test_table_has_means_over_prompts_and_leaves_out_what_a_run_did_not_tell():
    runs = [
        {"sampler": "euler", "steps": 30, "way": "40 dB asked", "psnr_db": psnr, "estimated_db": estimate}
        for psnr, estimate in ((40.0, 41.0), (50.0, None))
    ]
    (line,) = quality._by_way(runs)
    assert line == {"sampler": "euler", "steps": 30, "way": "40 dB asked", "psnr_db": 45.0}


def test_measures_are_those_whose_packages_and_weights_are_there(monkeypatch, capsys):
    class Network:
        def __init__(self, **_):
            pass

        def __call__(self, image, plain):
            return (image - plain).abs().mean()

    monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=Network))
    monkeypatch.setitem(sys.modules, "transformers", None)

    def missing(name):
        raise OSError("no weights")

    monkeypatch.setitem(sys.modules, "ImageReward", SimpleNamespace(load=missing))
    found = perceptual.measures()
    assert list(found) == ["lpips"]
    assert found["lpips"](torch.ones(3, 4, 4), torch.zeros(3, 4, 4), "") == 2.0
    assert "Without image_reward: no weights" in capsys.readouterr().err
