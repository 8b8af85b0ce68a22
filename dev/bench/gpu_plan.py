"""`bench gpu --plan NAME`: what to measure first on a card that is there for minutes, most telling first.

Each plan is one command of at most `MINUTES`, with a process for each of its stages. What it measured is in the folder
after every row, so a plan that is cut keeps its rows, and the next one adds to them. `prepare` fills a folder with
ComfyUI's code and packages for a card's machine without a network; `environment` makes a process there find them.
Standard library only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dev import ROOT, Problem
from dev.tools.comfyui import complete, tree

from .gpu_cases import BALANCED, COMPILED, CORE, FAST, SPEED_UP

MINUTES = {"default": 8.0, "default-2": 5.5}
"""Of a plan: both fit into fifteen of a card, its start included."""

REST = 9.0
"""Minutes of a plan's last stage, which takes what is left."""

LEAST = 30
"""Seconds under which nothing more is begun."""


@dataclass(frozen=True)
class Stage:
    """minutes: at most. arguments: of the module."""

    minutes: float
    arguments: str
    module: str = "dev.bench.gpu"


_LARGE = "--batches 1 --sizes 1024x1024"
_SMALL = "--batches 1 --sizes 512x512"
_OWN_PYTHON = "--images SDXL Flux --beside ours --cases 'CFG 1' 'unequal prompts' 'longer prompt'"

PLANS = {
    "default": (
        Stage(
            1.4,
            f"--flags default --models SDXL {_LARGE} 512x512 --parts steps --contenders {COMPILED} {SPEED_UP}",
        ),
        Stage(1.6, f"--flags default --models SD1.5 {_SMALL} --parts steps --contenders {COMPILED} {SPEED_UP} {CORE}"),
        Stage(
            1.6,
            f"--models SDXL {_LARGE} 512x512 --parts steps profile --contenders {SPEED_UP} {BALANCED} {FAST}",
        ),
        Stage(0.7, f"--models SD1.5 {_SMALL} --parts steps --contenders {SPEED_UP}"),
        Stage(1.2, f"--flags channels-last --models SDXL {_LARGE} --parts steps profile --contenders {SPEED_UP}"),
        Stage(REST, f"--models Flux Z-Image Wan {_LARGE} --parts attention rope --contenders eager"),
    ),
    "default-2": (
        Stage(1.2, _OWN_PYTHON, "dev.bench.overhead"),
        Stage(2.4, f"--flags default --models SDXL {_LARGE} 512x512 --parts steps --contenders {CORE}"),
        Stage(0.8, f"--flags default --models Wan {_LARGE} --parts steps --contenders {SPEED_UP}"),
        Stage(REST, f"--flags default --models Qwen-Image {_LARGE} --parts steps --contenders {SPEED_UP}"),
    ),
}
"""default: what people get as ComfyUI is installed and with CUDA graphs, and what decides the next change; default-2:
its rest."""


def run(plan: str, out: Path, prepared: Path | None, quick: bool, minutes: float | None = None) -> None:
    """Run a plan's stages, each in a process of its own, so that one that fails or hangs costs no other.

    out: where benchmarks.json is, or will be. prepared: a folder that `prepare` filled. quick: with tiny
    models on the CPU, which rehearses it. minutes: for all of it, to each stage its share; None: the usual ones.

    Raises:
        Problem: stages failed or were cut, after all others have run.
    """
    usual = MINUTES[plan]
    minutes = minutes or usual
    end = time.monotonic() + 60 * minutes
    failed = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        given = {**os.environ, **(environment(prepared, Path(work)) if prepared else {})}
        for stage in PLANS[plan]:
            seconds = min(60 * stage.minutes * minutes / usual, end - time.monotonic())
            name = stage.arguments
            if seconds < LEAST:
                failed.append(f"no time left for {name}")
                continue
            print(f"Plan {plan}: {name}, at most {seconds:.0f} s", file=sys.stderr, flush=True)
            command = [sys.executable, *_arguments(stage, seconds, out, quick)]
            try:
                options = {"env": given, "timeout": seconds + LEAST, "stdout": subprocess.DEVNULL}  # rows are on stderr
                code = subprocess.run(command, cwd=ROOT, **options).returncode
                if code:
                    failed.append(f"{name} ended with {code}")
            except subprocess.TimeoutExpired:
                failed.append(f"{name} was cut after its time, with what it had measured kept")
    print(f"Pages and rows: {out}")
    if failed:
        raise Problem(f"Plan {plan}: {'; '.join(failed)}.")


def _arguments(stage: Stage, seconds: float, out: Path, quick: bool) -> list[str]:
    rows = out / "benchmarks.json"
    command = ["-m", stage.module, *shlex.split(stage.arguments)]
    if stage.module == "dev.bench.overhead":
        fewer = ["--images", "SD1.5", "--cases", "longer prompt"] if quick else []
        return [*command, *fewer, "--json", str(out / "overhead.json")]
    return [
        *(*command, "--minutes", f"{seconds / 60:.2f}", "--out", str(out)),
        *(["--add", str(rows)] if rows.exists() and json.loads(rows.read_text(encoding="utf-8"))["rows"] else []),
        *(["--quick"] if quick else []),
    ]


PACKAGES = ("av", "torchsde", "trampoline", "einops", "psutil", "packaging")
"""What ComfyUI imports and a machine with torch and transformers may lack, modules as named."""

NEWER = ("comfy_aimdo", "comfy_kitchen")
"""What newer ones import too: brought where this Python has them."""

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
    named = [
        f"{package}=={metadata.version(package)}" for package in (*PACKAGES, *filter(importlib.util.find_spec, NEWER))
    ]
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
    missing = {package for package in PACKAGES + NEWER if importlib.util.find_spec(package) is None}
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
