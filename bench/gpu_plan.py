"""`bench gpu --plan N`: what to measure first on a card that is there for minutes, most telling first.

Each plan is one command of at most `MINUTES`. What it measured is in the folder after every row, so a plan that is cut
keeps its rows, and the next one adds to them. `prepare` fills a folder with ComfyUI's code and packages for a card's
machine without a network; `environment` makes a process there find them. Standard library only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kit import made_up_device

from tools import PYTEST, ROOT, Problem
from tools.comfyui import complete, tree

MINUTES = 9.0

LEAST = 30
"""Seconds under which nothing more is begun."""


@dataclass(frozen=True)
class Stage:
    """minutes: at most. arguments: of the module; none: the tests that need a card."""

    minutes: float
    arguments: str = ""
    module: str = "bench.gpu"


FIRST = ("machine", "captures", "values", "attention", "fp8", "malloc_async", "masked")
_OURS = "--contenders cuda-graphs compiled-blocks shipped deepcache-3"
_BESIDE_CORE = "--contenders cuda-graphs core"

PLANS = {
    "first": (
        Stage(6.0, " ".join(FIRST), "bench.gpu_first"),
        Stage(
            MINUTES, f"--models SDXL SD1.5 Z-Image --parts steps profile --sizes 1024x1024 512x512 --batches 1 {_OURS}"
        ),
    ),
    "1": (
        Stage(1.5),
        Stage(4.5, f"--models SDXL --parts steps profile --sizes 1024x1024 512x512 --batches 1 {_OURS}"),
        Stage(MINUTES, f"--models SDXL --parts steps profile --sizes 1024x1024 --batches 1 {_BESIDE_CORE}"),
    ),
    "2": (
        Stage(3.0, f"--models Flux --parts steps profile --sizes 1024x1024 --batches 1 {_OURS} core"),
        Stage(2.5, f"--models SD1.5 --parts steps --sizes 512x512 --batches 1 {_OURS} core"),
        Stage(
            MINUTES,
            "--models SDXL --parts steps sizes40 --sizes 720x960 768x768 1280x720 1024x1024 --batches 1 4"
            " --contenders cuda-graphs deepcache-3",
        ),
    ),
    "3": (
        *(
            Stage(2.0, f"--models {model} --parts steps --sizes 1024x1024 --batches 1 {_OURS} core")
            for model in ("Z-Image", "Qwen-Image", "Wan")
        ),
        Stage(MINUTES, f"--models SDXL --parts session {_BESIDE_CORE}"),
    ),
}
"""first: what only a card can say (`gpu_first`), then steps and their kernels. 1: the `gpu` tests, then SDXL, which the
goals are about, with its kernels; core's node last, which compiles longest. 2: Flux, SD1.5, SDXL's other sizes and
batches, single images first, and without those that would be compiled again for what plan 1 says. 3: the other
models and a session.
"""


def run(number: str, out: Path, prepared: Path | None, quick: bool) -> None:
    """Run a plan's stages, each in a process of its own, so that one that fails or hangs costs no other.

    out: where benchmarks.json is, or will be. prepared: a folder that `prepare` filled. quick: with tiny
    models on the CPU, which rehearses it.

    Raises:
        Problem: stages failed or were cut, after all others have run.
    """
    end = time.monotonic() + 60 * MINUTES
    failed = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        given = {**os.environ, **(environment(prepared, Path(work)) if prepared else {})}
        for stage in PLANS[number]:
            seconds = min(60 * stage.minutes, end - time.monotonic())
            name = stage.arguments or "the tests marked gpu"
            if seconds < LEAST:
                failed.append(f"no time left for {name}")
                continue
            print(f"Plan {number}: {name}, at most {seconds:.0f} s", file=sys.stderr, flush=True)
            command = [sys.executable, *_arguments(stage, seconds, out, quick)]
            try:
                code = subprocess.run(command, cwd=ROOT, env=given, timeout=seconds + LEAST).returncode
                if code:
                    failed.append(f"{name} ended with {code}")
            except subprocess.TimeoutExpired:
                failed.append(f"{name} was cut after its time, with what it had measured kept")
    if failed:
        raise Problem(f"Plan {number}: {'; '.join(failed)}.")


def _arguments(stage: Stage, seconds: float, out: Path, quick: bool) -> list[str]:
    if not stage.arguments:
        chosen = ["-m", "gpu", "tests/unit/test_capture_cuda.py", "-p", "no:cacheprovider", "-rs"]
        if not made_up_device.is_here():
            return ["-c", PYTEST, *chosen]
        rehearsal = f"import sys; sys.path.append({str(ROOT / 'tests')!r}); {PYTEST}"
        return ["-c", rehearsal, "-p", "kit.made_up_device.without_values", *chosen]
    rows = out / "benchmarks.json"
    if stage.module != "bench.gpu":
        return ["-m", stage.module, *stage.arguments.split(), "--out", str(out), *(["--quick"] if quick else [])]
    return [
        *("-m", "bench.gpu", *stage.arguments.split(), "--minutes", f"{seconds / 60:.2f}", "--out", str(out)),
        *(["--add", str(rows)] if rows.exists() and json.loads(rows.read_text(encoding="utf-8"))["rows"] else []),
        *(["--quick"] if quick else []),
    ]


PACKAGES = ("av", "torchsde", "trampoline", "einops", "psutil", "pytest", "pluggy", "iniconfig", "packaging")
"""What ComfyUI and the tests for a card import and a machine with torch and transformers may lack, modules as named."""

PARTS = ("comfy", "comfy_api", "comfy_config", "comfy_execution", "comfy_extras", "app", "utils")
"""Folders of ComfyUI that sampling in one process imports; of the other files the Python ones beside them."""

WHEELS, COMFYUI, SITE = "wheels", "comfyui", "site"

PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 5)] + ["manylinux2014_x86_64"]


def prepare(folder: Path, python: str) -> float:
    """Fill the folder for a Linux machine with this version of Python, such as "3.12"; its size, MB.

    Raises:
        Problem: a package could not be had, or the folder holds something else.
    """
    if folder.exists() and any(entry.name not in (WHEELS, COMFYUI) for entry in folder.iterdir()):
        raise Problem(f"{folder} holds other files: name a new folder.")
    wheels = folder / WHEELS
    wheels.mkdir(parents=True, exist_ok=True)
    named = [f"{package}=={metadata.version(package)}" for package in PACKAGES]
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), *target, *named]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise Problem(f"Fetching packages for Python {python} failed: {done.stderr.strip().splitlines()[-1]}")
    _pack(tree(), folder / COMFYUI)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def environment(folder: Path, place: Path) -> dict[str, str]:
    """Environment variables for a process that uses a prepared folder; missing packages are unpacked into `place`."""
    missing = {package for package in PACKAGES if importlib.util.find_spec(package) is None}
    site = place / SITE
    for wheel in sorted((folder / WHEELS).glob("*.whl")):
        if wheel.name.partition("-")[0].lower() in missing:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"COMFYUI_PATH": str((folder / COMFYUI).resolve()), "PYTHONPATH": os.pathsep.join(paths)}


def _pack(comfyui: Path, folder: Path) -> None:
    """Copy the code of a ComfyUI, without its tests and without the tables of its tokenizers."""
    complete(comfyui)
    shutil.rmtree(folder, ignore_errors=True)
    files = [*comfyui.glob("*.py"), *(file for part in PARTS for file in (comfyui / part).rglob("*.py"))]
    for file in files:
        place = folder / file.relative_to(comfyui)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
