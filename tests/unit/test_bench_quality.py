"""The bench on a user's own checkpoint: its prompts and its table."""

import pytest

from dev import Problem
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
