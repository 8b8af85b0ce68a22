"""`bench gpu` without torch: what is measured when time is short, how goals are judged, what the page says."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dev import ROOT, Problem
from dev.bench import gpu, gpu_page, gpu_plan, overhead_images
from dev.bench.gpu_cases import (
    CAPTURED,
    COMPILED,
    CORE,
    DEFAULT,
    EAGER,
    FAST,
    MODELS,
    NATIVE,
    PARTS,
    SHARES,
    SPEED_UP,
    TimeBudget,
    merged,
    named,
    size_of,
    skipped,
)
from dev.tools.comfyui import tree


def step(contender, step_ms, eager_ms=20.0, size="512x512", batch=1, model="SDXL", **changes):
    row = {"part": "steps", "model": model, "size": size, "batch": batch, "frames": None, "dtype": "fp16"}
    row |= {
        "flags": NATIVE,
        "contender": contender,
        "step_ms": step_ms,
        "eager_ms": eager_ms,
        "steps_per_s": 1000 / step_ms,
    }
    row |= {"first_image_s": 1.0, "compilations": 0, "captures": 1, "gave_up": False, "uncompiled": 0, "reasons": []}
    row |= {"answer_diff": 1e-3, "tolerance": 2e-2, "peak_mb": 9000, "graphs_mb": 100.0}
    row |= {"ran_as": "CUDA graphs", "share_of_matrix": 0.4}
    return row | changes


def forty(number, **changes):
    row = {
        "part": "sizes40",
        "model": "SDXL",
        "flags": NATIVE,
        "contender": CAPTURED,
        "number": number,
        "size": "512x512",
    }
    row |= {"image_s": 0.5, "cache_mb": 5000.0, "budget_mb": 6144, "held_mb": 12000.0, "ran_as": "CUDA graphs"}
    return row | {"evictions": 0, "compilations": 0, "captures": 1, "reasons": []} | changes


def start(contender, which, **changes):
    row = {"part": "cold", "model": "SDXL", "flags": NATIVE, "contender": contender, "start": which, "size": "512x512"}
    row |= {"first_image_s": 60.0, "compilations": 13, "peak_mb": 8000, "ran_as": "CUDA graphs"}
    return row | {"answer_diff": 0.0, "reasons": []} | changes


KERNEL = {"part": "profile", "model": "SDXL", "flags": NATIVE, "contender": CAPTURED, "size": "512x512", "batch": 1} | {
    **{"kernel": "gemm", "calls": 2.0, "kernel_ms": 0.5, "share": 0.25}
}


def everything():
    """Rows of every part."""
    rows = []
    for size in ("512x512", "1024x1024"):
        rows += [step(EAGER, 20.0, size=size), step(CAPTURED, 12.0, size=size), step(CORE, 13.0, size=size)]
        rows.append(step(FAST, 7.0, size=size, full_steps=11, skipped_steps=20, share_of_matrix=None))
    rows += [step(SPEED_UP, 19.0, size="1024x1024", flags=DEFAULT, ran_as="compiled blocks")]
    rows += [step(name, 15.0, model="SD1.5", flags=DEFAULT, ran_as="compiled blocks") for name in (SPEED_UP, CORE)]
    rows += [step(SPEED_UP, 12.0, model="SD1.5")]
    rows += [forty(number) for number in range(1, 41)]
    return [*rows, start(CAPTURED, "cold"), KERNEL]


# What is measured


@pytest.mark.parametrize("text", ["512", "512x500", "0x512", "axb", "8x8"])
def test_size_that_is_none_is_refused(text):
    with pytest.raises(ValueError):
        size_of(text)
    with pytest.raises(Problem, match="multiples of 8"):
        gpu._parse(["--sizes", text])


def test_asking_for_some_keeps_the_order_and_eager():
    options = gpu._parse(["--contenders", "core", "cuda-graphs", "--parts", "profile", "steps", "--sizes", "720x960"])
    assert options.contenders == [EAGER, CAPTURED, CORE]
    assert options.parts == ["steps", "profile"] and options.sizes == [(720, 960)]
    assert options.models == list(MODELS) and named(None, PARTS) == list(PARTS)


# When time is short


def test_each_part_has_its_share_and_what_an_earlier_one_leaves():
    budget, left = TimeBudget(540.0, lambda: 100.0), {}
    for part in budget.parts(PARTS, models_left=1):
        left[part] = next(seconds for seconds in range(1000) if not budget.fits(seconds))
    assert left["steps"] == pytest.approx(SHARES["steps"] * 540, abs=1)
    assert left[PARTS[-1]] == pytest.approx(540, abs=1)
    assert list(left.values()) == sorted(left.values())


def test_what_does_not_fit_any_more_is_told_and_the_next_model_has_its_part():
    now = [0.0]
    budget = TimeBudget(100.0, lambda: now[0])
    for _ in budget.parts(["steps"], models_left=2):
        assert budget.fits(49) and not budget.fits(51)
        now[0] += 60
        assert not budget.fits()
    for _ in budget.parts(["steps"], models_left=1):
        assert budget.fits(39) and not budget.fits(41)
    row = skipped("steps", "SDXL", "512x512, batch 4", CORE)
    assert gpu_page.line(row) == "SDXL, steps, 512x512, batch 4, core: left out, no time left"


# Rows of several runs


def test_rows_of_an_earlier_run_stay_where_the_same_was_not_measured_again():
    old = [step(CAPTURED, 12.0), start(CAPTURED, "cold")]
    old += [step(CAPTURED, 9.0, model="Flux"), step(CAPTURED, 30.0, size="1024x1024")]
    new = [step(CAPTURED, 11.0), step(CORE, 13.0)]
    assert merged(old, new) == [*old[1:], *new]
    assert len(merged(old, [start(CAPTURED, "warm")])) == len(old) + 1


# Plans


@pytest.mark.parametrize("number", gpu_plan.PLANS)
def test_every_stage_of_a_plan_is_a_command_that_bench_gpu_takes(number, tmp_path):
    stages = gpu_plan.PLANS[number]
    for stage in stages:
        _, module, *arguments = gpu_plan._arguments(stage, 60 * stage.minutes, tmp_path, quick=False)
        if module == "dev.bench.gpu":
            assert gpu._parse(arguments).minutes == stage.minutes
        elif module == "dev.bench.overhead":
            known = {case.name for case in overhead_images.CASES}
            assert known > set(arguments[arguments.index("--cases") + 1 : arguments.index("--json")])
    # The last takes what is left, and that is worth starting it.
    limit = gpu_plan.MINUTES[number]
    assert sum(stage.minutes for stage in stages[:-1]) + 1 < limit <= stages[-1].minutes


def test_stage_that_fails_costs_no_other(tmp_path, monkeypatch):
    (tmp_path / "benchmarks.json").write_text('{"rows": [1]}')
    ran = []

    def run(command, **given):
        ran.append(command)
        if len(ran) == 2:
            raise subprocess.TimeoutExpired(command, given["timeout"])
        return subprocess.CompletedProcess(command, returncode=3 if len(ran) == 1 else 0)

    monkeypatch.setattr(gpu_plan.subprocess, "run", run)
    with pytest.raises(Problem, match="ended with 3; .* cut after its time, with what it had measured kept"):
        gpu_plan.run("default", tmp_path, None, quick=True)
    assert len(ran) == len(gpu_plan.PLANS["default"])
    assert all(command[-1] == "--quick" and str(tmp_path / "benchmarks.json") in command for command in ran)


def test_prepared_folder_brings_what_is_missing_and_hides_nothing(tmp_path):
    wheels = tmp_path / "carried" / "wheels"
    wheels.mkdir(parents=True)
    for package in ("torchsde", "comfy_aimdo", "packaging"):
        with zipfile.ZipFile(wheels / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{package}/__init__.py", "")
    find, lacking = importlib.util.find_spec, ["torchsde", "comfy_aimdo"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if name in lacking else find(name))
        made = gpu_plan.environment(tmp_path / "carried", tmp_path)
    assert made["COMFYUI_PATH"] == str(tmp_path / "carried" / "comfyui")
    brought = Path(made["PYTHONPATH"].split(os.pathsep)[0])
    assert {entry.name for entry in brought.iterdir()} == set(lacking)


@pytest.mark.thorough  # a process that imports all of core
def test_prepared_comfyui_is_enough_to_import_its_sampling(tmp_path):
    gpu_plan._pack(tree(), tmp_path / "comfyui")
    code = "from dev.tools import inprocess, pack; inprocess.boot(cpu=True); pack.load(); import dev.bench.gpu_models"
    environment = {**os.environ, "COMFYUI_PATH": str(tmp_path / "comfyui")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, timeout=200)


# Failures


@pytest.mark.parametrize("value", [2.1e-2, float("inf"), float("nan")])
def test_output_that_is_not_eagers_is_a_failure_and_named(value):
    rows = [*everything(), step(COMPILED, 13.0, answer_diff=value)]
    (sentence,) = gpu_page.failures(rows)
    assert sentence.startswith("SDXL, 512x512 batch 1, ours, compiled blocks: differs")
    failed = {"part": "cold", "model": "SDXL", "start": "warm", "contender": CORE, "failed": "out of memory"}
    assert gpu_page.failures([failed]) == ["SDXL, warm start, core's TorchCompileModel: out of memory"]


def test_outputs_without_values_are_not_called_equal():
    rows = [step(contender, 13.0, answer_diff=float("inf"), tolerance=None) for contender in (EAGER, CAPTURED)]
    assert gpu_page.failures(rows) == [] and "No output was compared" in page(rows)


# The page


def facts(cuda):
    device = {"name": "H200" if cuda else "CPU", "driver": "570.1" if cuda else None, "cuda": cuda, "torch": "2.11.0"}
    device |= {"matrix_tflops": 700.0, "matrix_dtype": "float16", "matrix_side": 8192}
    made = {"date": "22 November 2026, 03:00 UTC", "command": "dev.py bench gpu"}
    return {"device": device, "versions": {"comfyui": "0.3.75", "triton": "3.6.0"}, **made}


def page(rows, skips=(), cuda="13.0"):
    return gpu_page.page(rows, skips, facts(cuda))


def test_page_tells_device_driver_torch_date_and_rows():
    text = page(everything())
    assert "No GPU was measured" not in text
    assert "on 22 November 2026, 03:00 UTC: H200, driver 570.1; ComfyUI 0.3.75, torch 2.11.0 (CUDA 13.0)" in text
    assert " outputs were compared with eager's, the worst is off by 1.0e-03" in text
    assert "| 512x512 | 1 | native | ours, CUDA graphs | 83.33 | 1.67 | 40.0% |" in text
    assert "20 of 31 steps skipped" in text


def test_page_of_a_cpu_says_so_first():
    lines = page(everything(), cuda=None).splitlines()
    assert lines[2].startswith("**No GPU was measured.**")
    assert "seconds, ratios and shares say nothing" in " ".join(lines[2:6])


def test_page_lists_what_was_left_out_what_failed_and_why_calls_were_not_replayed():
    rows = [*everything(), step(COMPILED, 13.0, answer_diff=1.0, reasons=["memory is short"])]
    text = page(rows, [skipped("sizes40", "SDXL", "sizes 3 to 40", CAPTURED)])
    assert "| SDXL | sizes40 | sizes 3 to 40 | cuda-graphs | no time left |" in text
    assert "## What failed" in text and "ours, compiled blocks: differs from eager by 1.0e+00" in text
    assert "- SDXL: memory is short" in text
