"""The benches on the trained test networks: work is counted as torch counts it, the demo draws its sheet."""

import json
import os
import subprocess
import sys

import pytest
import torch

from dev import ROOT


@pytest.mark.parametrize("network", ["unet", "dit", "mmdit", "vpred"])
def test_counted_flops_are_torchs_and_leave_out_what_is_skipped(network):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from dev.bench import toy
    from dev.bench.deepcache import skip_steps
    from dev.bench.flops import Flops

    patcher = toy.load(network)
    flops = Flops(patcher.model.diffusion_model)

    def taken(model, steps):
        toy.sample(model, torch.tensor([0]), 8, 12, steps, "euler", seed=0)
        return flops.take()

    with torch.inference_mode():
        flops.learn(lambda: toy.sample(patcher, torch.tensor([0]), 8, 12, 1, "euler", seed=0))
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            full = taken(patcher, 4)
        assert full == pytest.approx(counter.get_total_flops())
        assert taken(skip_steps(patcher, {2}), 4) == pytest.approx(0.75 * full)


@pytest.mark.thorough  # a bench as a subprocess
def test_bench_of_a_checkpoint_writes_its_sheet_and_figures_without_a_path(tmp_path):
    (tmp_path / "prompts.txt").write_text("a red cube\n", encoding="utf-8")
    few = ["--prompts", str(tmp_path / "prompts.txt"), "--steps", "6", "--width", "64", "--ways", "35 dB", "every 2nd"]
    command = [sys.executable, "-m", "dev.bench.quality", *few, "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    written = (tmp_path / "quality.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in written and str(ROOT) not in written and "red cube" not in written
    ways = [row["way"] for row in json.loads(written)["rows"]]
    assert ways == ["uncached", "35 dB", "fewer steps, as 35 dB", "every 2nd"]
    assert (tmp_path / "quality.png").stat().st_size > 0


def test_demo_makes_its_sheet_of_skipped_steps(tmp_path, monkeypatch):
    from dev.bench import demo

    monkeypatch.setattr(demo, "SHOWN", demo.SHOWN[:1])
    monkeypatch.setattr(demo, "SHEET", {**demo.SHEET, "steps": 12})
    for process_wide in (f"{demo.__name__}.boot", "torch.set_num_threads", "torch.set_flush_denormal"):
        monkeypatch.setattr(process_wide, lambda *_, **__: None)
    said = demo.sample_balanced(tmp_path / "sheet.png")
    assert "of the work was skipped" in said and (tmp_path / "sheet.png").is_file()
