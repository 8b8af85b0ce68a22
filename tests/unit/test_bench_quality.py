"""The bench on a user's own checkpoint: its prompts and its table."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from dev import ROOT, Problem
from dev.bench import quality


def test_prompts_are_lines_and_a_file_without_any_is_refused(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a cat\n\n  a dog \n", encoding="utf-8")
    assert quality._prompts(file) == ["a cat", "a dog"]
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(Problem, match="has no prompt"):
        quality._prompts(file)
    with pytest.raises(Problem, match="No file"):
        quality._prompts(tmp_path / "none.txt")


def test_table_has_means_over_prompts():
    runs = [{"sampler": "euler", "steps": 30, "way": "40 dB", "target_db": 40.0, "psnr_db": db} for db in (40.0, 50.0)]
    assert quality._by_way(runs) == [{"sampler": "euler", "steps": 30, "way": "40 dB", "psnr_db": 45.0}]


@pytest.mark.thorough  # loads a checkpoint with a text encoder and a VAE
def test_checkpoint_is_sampled_in_each_way_and_its_pictures_are_on_one_sheet(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n", encoding="utf-8")
    options = ["--prompts", tmp_path / "prompts.txt", "--ways", "Fast", "--steps", "6", "--out", tmp_path]
    command = [sys.executable, "-m", "dev.bench.quality", *map(str, options), "--width", "128", "--height", "64"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=500)
    rows = json.loads((tmp_path / "quality.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["prompt"], row["way"]) for row in rows] == [(0, "Fast"), (1, "Fast")]
    assert all(row["flops_share"] < 1 and row["psnr_db"] > 20 for row in rows)
    with Image.open(tmp_path / "quality.png") as sheet:
        assert sheet.width > 2 * 128 and sheet.height > 2 * 64
