"""`dev.py bench gpu`: its full-size models are the published ones, and all of it runs at test scale on the CPU."""

import json
import os
import subprocess
import sys
import types

import comfy.model_detection
import pytest
import torch
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.nodes import speed_up
from kit.captures import CpuCapturer
from kit.thorough import thorough_except

from dev import ROOT
from dev.bench import gpu, gpu_models, gpu_page, gpu_parts
from dev.bench.gpu_cases import (
    CAPTURED,
    COLD,
    CORE,
    DEFAULT,
    EAGER,
    FAST,
    PARTS,
    SPEED_UP,
    TimeBudget,
)

PUBLISHED = {
    "SDXL": (2567e6, 2568e6),
    "SD1.5": (859e6, 860e6),
    "Flux": (11.8e9, 12.0e9),
    "Z-Image": (6.0e9, 6.3e9),
    "Qwen-Image": (20.0e9, 20.6e9),
    "Wan": (1.3e9, 1.45e9),
}
"""Parameters, from and to."""

CONTENDERS = [EAGER, CAPTURED, FAST]


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size_model_is_the_published_one_and_core_detects_the_same_config(name):
    family = gpu_models.FULL[name].family
    network = family.build(torch.float16, "meta").diffusion_model
    least, most = PUBLISHED[name]
    assert least <= sum(parameter.numel() for parameter in network.parameters()) <= most
    weights = network.state_dict()
    detected = comfy.model_detection.detect_unet_config(weights, "")
    assert {key: family.config.get(key) for key in detected} == detected
    found = comfy.model_detection.model_config_from_unet_config(detected, weights)
    assert type(found).__name__ == family.model_class


# Contenders run one after the other through the same code.
@pytest.mark.parametrize("ours", thorough_except([[CAPTURED], [CAPTURED, CORE]], [CAPTURED]))
def test_small_model_runs_as_every_sort_of_contender(ours):
    rows = quick("Qwen-Image", [EAGER, *ours])
    assert [row["contender"] for row in rows] == [EAGER, *ours]
    assert gpu_page.failures(rows) == []
    assert rows[1]["ran_as"] == "CUDA graphs"


def test_speed_up_is_a_contender_as_its_node_installs_it(monkeypatch):
    monkeypatch.setattr(speed_up, "accelerate", lambda model, settings, **given: (settings, given["graphs"]))
    installed = speed_up.AccelSpeedUp.execute(None, "Exact").args[0]
    assert installed == (CompileSettings(measured=True), True)
    rows = quick("Qwen-Image", [EAGER, SPEED_UP])
    assert rows[1]["contender"] == SPEED_UP and rows[1]["ran_as"] == "CUDA graphs" and gpu_page.failures(rows) == []


def quick(model, contenders, *more):
    """The rows of the steps of a small model at one size, with a capturer that the CPU has."""
    arguments = ["--quick", "--models", model, "--parts", "steps", "--sizes", "512x512", "--contenders", *contenders]
    options = gpu._parse([*arguments, *more])
    device = {"matrix_tflops": 0.1}
    made = gpu.of_model(model, options, TimeBudget(None), 1, device, capturer=CpuCapturer())
    return [row for row in made if row["part"] == "steps"]


def test_steps_tell_host_time_and_first_images_their_seconds_by_kind_and_stage():
    options = gpu._parse(["--quick", "--models", "Wan", "--parts", "steps", "--sizes", "512x512", "--flags", DEFAULT])
    options.contenders = [EAGER, SPEED_UP]
    rows = list(gpu.of_model("Wan", options, TimeBudget(None), 1, {"matrix_tflops": 0.1}))
    assert {row["flags"] for row in rows} == {DEFAULT}
    (cold,) = [row for row in rows if row.get("start") == COLD and row["contender"] == SPEED_UP]
    assert list(cold["kinds_s"]) == ["WanAttentionBlock"] and set(cold["stages_s"]) <= {"trace", "generate", "build"}
    assert 0 < sum(cold["stages_s"].values()) <= cold["first_image_s"]
    assert all(row["host_ms"] > 0 for row in rows if row["part"] == "steps")


def test_longest_attention_of_a_model_is_timed_as_core_and_as_torch_choose():
    options = gpu._parse(["--quick", "--models", "Wan", "--sizes", "512x512", "--parts", "attention"])
    own, _, cudnn = gpu.of_model("Wan", options, TimeBudget(None), 1, {"matrix_tflops": 0.1})
    assert own["chosen_by"] == "this core" and own["attention_ms"] > 0 and "attention" in own["kernel"]
    assert cudnn["chosen_by"] == "CUDNN_ATTENTION" and cudnn["without"]  # a CPU has none
    assert own["kernel"] in gpu_page.attention_table([own, cudnn]) and gpu_page.failures([own, cudnn]) == []


def test_rotary_embedding_of_comfy_kitchen_is_timed_traced_and_as_its_operator_where_a_core_has_it(monkeypatch):
    options = gpu._parse(["--quick", "--models", "Wan", "--sizes", "512x512", "--parts", "rope"])
    monkeypatch.delitem(sys.modules, "comfy_kitchen", raising=False)
    (left_out,) = gpu.of_model("Wan", options, TimeBudget(None), 1, {"matrix_tflops": 0.1})
    assert left_out["why"] == "this core has no comfy-kitchen"
    monkeypatch.setitem(sys.modules, "comfy_kitchen", types.ModuleType("comfy_kitchen"))
    rows = list(gpu.of_model("Wan", options, TimeBudget(None), 1, {"matrix_tflops": 0.1}))
    assert [row["embedding"] for row in rows] == ["traced", "operator"] and gpu_page.failures(rows) == []
    assert all(row["step_ms"] > 0 and row["compilations"] for row in rows) and "traced" in gpu_page.rope_table(rows)


def test_part_that_fails_as_a_whole_is_told_and_the_next_goes_on(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(gpu_parts.Parts, "sizes40", lambda self: full())
    options = gpu._parse(["--quick", "--models", "Wan", "--sizes", "512x512", "--parts", "sizes40", "attention"])
    failed, *attention = gpu.of_model("Wan", options, TimeBudget(None), 1, {"matrix_tflops": 0.1})
    assert gpu_page.failures([failed]) == ["Wan, 512x512 batch 1, eager: OutOfMemoryError: full"]
    assert all(write([failed]) for write in gpu_page.TABLES.values()) and len(attention) == 3


@pytest.mark.thorough  # four contenders, one of them core's own node
def test_captured_calls_are_counted_where_they_can_be_captured():
    eager, ours, cached, core = quick("SDXL", [EAGER, CAPTURED, FAST, CORE])
    assert ours["ran_as"] == cached["ran_as"] == "CUDA graphs"
    assert ours["captures"] == 1 and ours["replays"] == ours["steps_timed"] + 2 and ours["compilations"] > 0
    assert cached["captures"] >= 1 and cached["skipped_steps"] > 0 and cached["image_s"] > 0
    assert ours["answer_diff"] == cached["answer_diff"] == eager["answer_diff"] == 0
    assert core["ran_as"] == "core's TorchCompileModel" and core["captures"] == 0 and core["compilations"] > 0
    assert min(row["steps_timed"] for row in (eager, ours, cached, core)) >= 10
    assert eager["tflop_a_step"] > 0 and eager["share_of_matrix"] > 0 and cached["share_of_matrix"] is None


def test_contender_that_fails_is_told_and_the_others_go_on(monkeypatch):
    from dev.bench import gpu_contenders

    def broken(*_, **__):
        raise RuntimeError("cannot")

    monkeypatch.setattr(gpu_contenders, "accelerate", broken)
    eager, ours = quick("Flux", [EAGER, CAPTURED])
    assert "cannot" in ours["failed"] and eager["step_ms"] > 0
    assert len(gpu_page.failures([eager, ours])) == 1


def test_no_time_leaves_everything_out_and_says_so():
    options = gpu._parse(["--quick", "--models", "Flux", "--sizes", "512x512", "--parts", "steps", "attention"])
    rows = list(gpu.of_model("Flux", options, TimeBudget(0.0), 1, {"matrix_tflops": 0.1}))
    assert rows and {row["why"] for row in rows} == {"no time left"}


def test_profile_tells_what_a_step_spends_in_each_kernel():
    options = gpu._parse(
        ["--quick", "--models", "Wan", "--sizes", "512x512", "--parts", "profile", "--contenders", CAPTURED]
    )
    rows = list(gpu.of_model("Wan", options, TimeBudget(None), 1, {"matrix_tflops": 0.1}))
    for contender in (EAGER, CAPTURED):
        own = [row for row in rows if row["contender"] == contender]
        assert sum(row["share"] for row in own) == pytest.approx(1, abs=0.01)
        assert own[0]["kernel_ms"] >= own[1]["kernel_ms"] > 0 and own[-1]["kernel"] == "others"
        assert any("attention" in row["kernel"] and row["calls"] >= 6 for row in own)  # three blocks, two a block


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What a whole run writes; in a process of its own, as users run it."""
    folder = tmp_path_factory.mktemp("gpu")
    # The family that is compiled soonest.
    arguments = ["--quick", "--models", "Wan", "--sizes", "512x512", "--contenders", *CONTENDERS, "--out", str(folder)]
    command = [sys.executable, "-m", "dev.bench.gpu", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "# Benchmarks" in ended.stdout
    content = json.loads((folder / "benchmarks.json").read_text(encoding="utf-8"))
    return content, (folder / "benchmarks.md").read_text(encoding="utf-8")


def of(content, part, contender=None):
    return [row for row in content["rows"] if row["part"] == part and contender in (None, row["contender"])]


@pytest.mark.thorough  # a whole bench as a subprocess
def test_whole_run_has_every_part_and_outputs_that_are_eagers(written):
    content, page = written
    assert {row["part"] for row in content["rows"] + content["skipped"]} == {*PARTS, "cold"}
    assert {row["part"] for row in content["skipped"]} <= {"rope"}
    assert not any("failed" in row for row in content["rows"])
    assert all(row["answer_diff"] <= 2e-3 for row in content["rows"] if row.get("answer_diff") is not None)
    assert content["device"]["name"] == "CPU" and of(content, "steps", CAPTURED)[0]["ran_as"] == "compiled blocks"
    assert "No GPU was measured" in page.splitlines()[2] and "outputs were compared" in page


@pytest.mark.thorough  # a whole bench as a subprocess
def test_whole_run_compiles_in_the_first_image_of_each_part_alone(written):
    content, _ = written
    assert of(content, "steps", CAPTURED)[0]["compilations"] > 0
    sizes = of(content, "sizes40")
    assert len(sizes) == 40 and not any(row["compilations"] or row["uncompiled"] for row in sizes)
