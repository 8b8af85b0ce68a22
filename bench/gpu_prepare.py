"""What a machine without a network lacks for `bench gpu`: a folder with ComfyUI's code and packages, and its use.

`prepare` fills the folder where there is a network; `environment` makes a process on the other machine find it.
Standard library only.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from tools import Problem
from tools.comfyui import complete, tree

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
