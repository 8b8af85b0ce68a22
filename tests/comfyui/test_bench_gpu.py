"""`dev.py bench gpu`: its full-size models are the published ones, and all of it runs at test scale on the CPU."""

import json
import subprocess
import sys

import comfy.model_detection
import pytest
import torch
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.nodes import speed_up
from kit.blocks import raising
from kit.captures import CpuCapturer

from dev import ROOT, Problem
from dev.bench import full_size, gpu, gpu_parts
from dev.bench.gpu_page import CAPTURED, EAGER, SPEED_UP

PUBLISHED = {
    "SDXL": (2567e6, 2568e6),
    "SD1.5": (859e6, 860e6),
    "Flux": (11.8e9, 12.0e9),
    "Z-Image": (6.0e9, 6.3e9),
    "Qwen-Image": (20.0e9, 20.6e9),
    "Wan": (1.3e9, 1.45e9),
}
"""Parameters, from and to."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size_model_is_the_published_one_and_core_detects_the_same_config(name):
    family = full_size.FULL[name].family
    network = family.build(torch.float16, "meta").diffusion_model
    least, most = PUBLISHED[name]
    assert least <= sum(parameter.numel() for parameter in network.parameters()) <= most
    weights = network.state_dict()
    detected = comfy.model_detection.detect_unet_config(weights, "")
    assert {key: family.config.get(key) for key in detected} == detected
    found = comfy.model_detection.model_config_from_unet_config(detected, weights)
    assert type(found).__name__ == family.model_class


def measure_steps(model, *contenders):
    """The rows of the steps of a small model at one size, with a capturer that the CPU has."""
    arguments = ["--quick", "--models", model, "--parts", "steps", "--sizes", "512x512", "--contenders", *contenders]
    rows = gpu.measure(gpu._parse(arguments), CpuCapturer())
    return [row for row in rows if row["part"] == "steps"]


def test_speed_up_is_a_contender_as_its_node_installs_it(monkeypatch):
    monkeypatch.setattr(speed_up, "accelerate", lambda model, settings, **given: (settings, given["graphs"]))
    installed = speed_up.AccelSpeedUp.execute(None, "Exact").args[0]
    assert installed == (CompileSettings(measured=True), True)
    rows = measure_steps("Qwen-Image", SPEED_UP)
    assert [row["contender"] for row in rows] == [EAGER, SPEED_UP] and rows[1]["ran_as"] == "CUDA graphs"


def test_contender_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(gpu_parts, "accelerate", raising(RuntimeError("cannot")))
    with pytest.raises(Problem, match="1 failures, the first: Flux, .* cannot"):
        measure_steps("Flux", CAPTURED)


@pytest.mark.thorough  # six processes, one for each stage
def test_plan_for_a_new_card_runs_to_its_end_at_test_scale(tmp_path):
    command = [sys.executable, "-m", "dev.bench.gpu", "--quick", "--plan", "default", "--minutes", "30"]
    ended = subprocess.run([*command, "--out", tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = json.loads((tmp_path / "benchmarks.json").read_text(encoding="utf-8"))["rows"]
    found = {(row["model"], row["part"], row["flags"]) for row in rows}
    assert {("SD1.5", "steps", "default"), ("SDXL", "profile", "channels-last"), ("Wan", "profile", "native")} <= found
    assert (tmp_path / "benchmarks.md").is_file()
