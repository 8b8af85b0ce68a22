"""Every contender at every size on one GPU, in one run: eager, core's compile node, ours, ours with DeepCache.

Models at their published size with random weights, made in place. What is finished is written after every row, so a
run that is cut keeps its results. On a card that is there for minutes: --plan default, which measures what tells most.
--quick tries all of it on the CPU, with tiny models and nothing compiled.
"""

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from dev import ROOT, WORK, Problem
from dev.tools import command
from dev.tools.comfyui import complete, tree

from . import gpu_page, report
from .child import begin
from .compilations import RecompileLimit
from .gpu_page import CHANNELS_LAST, CONTENDERS, DEFAULT, EAGER, FLAGS, MODELS, NATIVE, PARTS, QUICK_MODELS

LEAST = 30
"""Seconds under which no stage of a plan is begun."""

PLANS = {
    "default": (
        (1.4, f"--flags {DEFAULT} --models SDXL --sizes 1024x1024 512x512 --contenders compiled-blocks speed-up"),
        (1.6, f"--flags {DEFAULT} --models SD1.5 --sizes 512x512 --contenders compiled-blocks speed-up core"),
        (1.6, "--models SDXL --sizes 1024x1024 512x512 --parts steps profile --contenders speed-up balanced fast"),
        (0.7, "--models SD1.5 --sizes 512x512 --contenders speed-up"),
        (1.2, f"--flags {CHANNELS_LAST} --models SDXL --parts steps profile --contenders speed-up"),
        (1.5, "--models Flux Z-Image Wan --parts profile --contenders eager"),
    ),
    "default-2": (
        (2.4, f"--flags {DEFAULT} --models SDXL --sizes 1024x1024 512x512 --contenders core"),
        (0.8, f"--flags {DEFAULT} --models Wan --contenders speed-up"),
        (1.8, f"--flags {DEFAULT} --models Qwen-Image --contenders speed-up"),
    ),
}
"""Minutes and arguments of stages. default: what people get as ComfyUI is installed and with CUDA graphs, and what
decides the next change; default-2: its rest. Both fit into fifteen minutes of a card, its start included."""

EACH_STAGE = ("--batches", "1", "--sizes", "1024x1024", "--parts", "steps")
"""What a stage's own arguments come after."""

PACKAGES = ("av", "torchsde", "trampoline", "einops", "psutil", "packaging")
"""What ComfyUI imports and a machine with torch and transformers may lack, modules as named."""

NEWER = ("comfy_aimdo", "comfy_kitchen")
"""What newer ones import too: brought where this Python has them."""

FOLDERS = ("comfy", "comfy_api", "comfy_config", "comfy_execution", "comfy_extras", "app", "utils")
"""Of ComfyUI, that sampling in one process imports; of the other files the Python ones beside them."""


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    if options.comfyui:
        os.environ["COMFYUI_PATH"] = os.path.abspath(options.comfyui)
    if options.prepare:
        return prepare(options.prepare, options.for_python)
    if options.plan:
        return run_plan(options)
    if options.flags == DEFAULT and not options.quick:  # as ComfyUI's main.py does, before torch is imported
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    tree()  # what is wrong with the path is said before torch is imported
    _require_device(options)
    begin(options.quick, *FLAGS[options.flags])
    measure(options)


def measure(options: argparse.Namespace, capturer=None) -> list[report.Row]:
    """The rows of all models, part by part, each written as soon as it is there. capturer: instead of CUDA's.

    Raises:
        Problem: a contender failed or its output is wrong.
    """
    import comfy.model_management
    import torch

    from . import gpu_parts

    if options.quick:
        torch.set_num_threads(1)  # Layers this small gain nothing from more.
    end = float("inf") if options.minutes is None else time.monotonic() + 60 * options.minutes
    results = Results(options, gpu_parts.describe(comfy.model_management.get_torch_device()))
    for model in options.models:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work, RecompileLimit() as limit:
            given = limit, Path(work), results.device["matrix_tflops"], capturer
            parts = gpu_parts.Parts(model, options, lambda seconds: time.monotonic() + seconds < end, *given)
            for part in options.parts:
                for row in parts.measure(part):
                    results.add(row)
            parts.free()
    print(results.save())
    if wrong := gpu_page.find_failures(results.rows):
        raise Problem(f"{len(wrong)} failures, the first: {wrong[0]}.")
    return results.rows


class Results:
    """The rows so far, and the files that they are written to.

    Raises:
        Problem: the folder has rows of another device or torch.
    """

    def __init__(self, options: argparse.Namespace, device: report.Row):
        self._out, self._json, self._comfyui, self.device = options.out, options.json, tree(), device
        self.rows: list[report.Row] = []
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%d %B %Y, %H:%M UTC")
        self._facts = {"date": date, "command": " ".join(["dev.py bench gpu", *options.given]), "device": device}
        self._old: list[report.Row] = []
        if options.out and (file := options.out / "benchmarks.json").exists():
            known = json.loads(file.read_text(encoding="utf-8"))
            if any(known["device"][name] != device[name] for name in ("name", "torch")):
                raise Problem(f"{file} is of another device or torch: name another folder.")
            self._old = [row for row in known["rows"] if row["part"] in gpu_page.TABLES]  # there were more once

    def add(self, row: report.Row) -> None:
        """Keep the row, print it, and write all files anew."""
        self.rows.append(row)
        if "kernel" not in row or gpu_page.is_telling(row["kernel"]):  # there are hundreds; the page has them
            print(gpu_page.tell(row), file=sys.stderr, flush=True)
        self.save()

    def save(self) -> str:
        """Write everything so far to the files that were asked for; returns the page."""
        rows = gpu_page.merge(self._old, self.rows)
        for file in filter(None, [self._json, self._out and self._out / "benchmarks.json"]):
            report.write(file, rows, self._comfyui, **self._facts)
        page = gpu_page.write_page(rows, {**self._facts, "versions": report.versions(self._comfyui)})
        if self._out:
            (self._out / "benchmarks.md").write_text(page, encoding="utf-8")
        return page


def run_plan(options: argparse.Namespace) -> None:
    """Run a plan's stages, each in a process of its own, so that one that fails or hangs costs no other.

    Raises:
        Problem: stages failed or were cut, after all others have run.
    """
    stages, out = PLANS[options.plan], (options.out or WORK / "gpu").resolve()  # docs has rows of another card
    usual = sum(minutes for minutes, _ in stages)
    whole = options.minutes or usual
    end, failed = time.monotonic() + 60 * whole, []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        given = {**os.environ, **(_use_prepared(options.prepared, work) if options.prepared else {})}
        for number, (minutes, name) in enumerate(stages, 1):
            left = end - time.monotonic()  # the last stage gets what is left
            seconds = left if number == len(stages) else min(60 * minutes * whole / usual, left)
            if seconds < LEAST:
                failed.append(f"no time left for {name}")
                continue
            print(f"Plan {options.plan}: {name}, at most {seconds:.0f} s", file=sys.stderr, flush=True)
            own = [*EACH_STAGE, *name.split(), "--minutes", f"{seconds / 60:.2f}", "--out", str(out)]
            own += ["--quick"] if options.quick else []
            settings = {"env": given, "timeout": seconds + LEAST, "stdout": subprocess.DEVNULL}  # rows are on stderr
            try:
                code = subprocess.run([sys.executable, "-m", "dev.bench.gpu", *own], cwd=ROOT, **settings).returncode
                failed += [f"{name} ended with {code}"] if code else []
            except subprocess.TimeoutExpired:
                failed.append(f"{name} was cut after its time, with what it had measured kept")
    print(f"Page and rows: {out}")
    if failed:
        raise Problem(f"Plan {options.plan}: {'; '.join(failed)}.")


def prepare(folder: Path, python: str) -> None:
    """Fill the folder with ComfyUI's code and packages, for a Linux machine without a network and with this Python.

    Raises:
        Problem: a package could not be had.
    """
    comfyui = tree()
    complete(comfyui)
    shutil.rmtree(folder / "comfyui", ignore_errors=True)
    for file in (*comfyui.glob("*.py"), *(file for name in FOLDERS for file in (comfyui / name).rglob("*.py"))):
        place = folder / "comfyui" / file.relative_to(comfyui)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    named = [f"{name}=={metadata.version(name)}" for name in (*PACKAGES, *filter(importlib.util.find_spec, NEWER))]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 5)]
    target = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder / 'wheels'}"]
    done = subprocess.run([*download, *target, *named], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise Problem(f"Fetching packages for Python {python} failed: {done.stderr.strip().splitlines()[-1]}")
    print(f"There: python3 -m dev.bench.gpu --plan default --prepared {folder.name}")


def _use_prepared(folder: Path, work: str) -> dict[str, str]:
    """Environment variables for a process that uses a prepared folder; missing packages are unpacked into `work`."""
    missing = {package for package in PACKAGES + NEWER if importlib.util.find_spec(package) is None}
    for wheel in (folder / "wheels").glob("*.whl"):
        if wheel.name.partition("-")[0].lower() in missing:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(work)
    paths = os.pathsep.join(filter(None, [work, os.environ.get("PYTHONPATH")]))
    return {"COMFYUI_PATH": str((folder / "comfyui").resolve()), "PYTHONPATH": paths}


def _require_device(options: argparse.Namespace) -> None:
    if options.quick:
        return
    import torch

    if not torch.cuda.is_available():
        raise Problem("bench gpu measures a CUDA device and torch sees none: --quick tries all of it on the CPU.")
    allocator = "cudaMallocAsync" if options.flags == DEFAULT else "native"
    if torch.cuda.get_allocator_backend() != allocator:
        raise Problem(f"--flags {options.flags} means torch's allocator {allocator}: unset PYTORCH_CUDA_ALLOC_CONF.")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = report.parser("gpu", __doc__)

    def choose(option: str, known: Iterable[str], summary: str) -> None:
        summary = f"{summary}: {', '.join(known)}"
        parser.add_argument(f"--{option}", nargs="+", choices=list(known), metavar="NAME", help=summary)

    choose("models", MODELS, "default: all, with --quick " + " and ".join(QUICK_MODELS))
    choose("contenders", CONTENDERS, "default: all; eager always runs")
    choose("parts", PARTS, "default: all")
    add = parser.add_argument
    add("--flags", choices=FLAGS, default=NATIVE, help=f"of ComfyUI, default: {NATIVE}, {' '.join(FLAGS[NATIVE])}")
    add("--sizes", nargs="+", type=_read_size, metavar="WxH", help="pixels, such as 720x960")
    add("--batches", nargs="+", type=int, metavar="N", help="images at a time")
    add("--minutes", type=float, metavar="N", help="leave out what does not fit; default: all of it, or the plan's")
    kept = "write benchmarks.md and benchmarks.json there; rows that it has of this device stay where this run has none"
    add("--out", type=Path, metavar="FOLDER", help=f"{kept}; default with --plan: .work/gpu")
    add("--comfyui", metavar="PATH", help="a ComfyUI checkout, instead of the embedded 0.3.75")
    most = "measure what tells most in about eight minutes: default, or in five what it leaves to default-2"
    add("--plan", choices=PLANS, help=most)
    lacking = "measure nothing: put there what a machine lacks that has torch, transformers and no network"
    add("--prepare", type=Path, metavar="FOLDER", help=lacking)
    add("--for-python", default="3.12", metavar="VERSION", help="Python of that machine, default: 3.12")
    add("--prepared", type=Path, metavar="FOLDER", help="with --plan: the folder that --prepare filled")
    add("--quick", action="store_true", help="tiny models on the CPU: whether it runs, and counts")
    options = parser.parse_args(arguments)
    options.given = sys.argv[1:] if arguments is None else arguments
    quick = options.quick
    options.models = _order(options.models or (QUICK_MODELS if quick else MODELS), MODELS)
    options.contenders = _order({EAGER, *(options.contenders or CONTENDERS)}, CONTENDERS)
    options.parts = _order(options.parts or PARTS, PARTS)
    options.batches = options.batches or (gpu_page.QUICK_BATCHES if quick else gpu_page.BATCHES)
    options.sizes = options.sizes or (gpu_page.QUICK_SIZES if quick else gpu_page.SIZES)
    if min(options.batches) < 1:
        raise Problem("--batches takes numbers from 1 on.")
    return options


def _order(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names in the order of `known`."""
    return [name for name in known if name in names]


def _read_size(text: str) -> tuple[int, int]:
    """ "720x960" as width and height."""
    try:
        width, height = (int(side) for side in text.lower().split("x"))
    except ValueError:
        width = height = 0
    if min(width, height) < 64 or width % 8 or height % 8:
        raise argparse.ArgumentTypeError("it takes sizes such as 720x960, both sides multiples of 8 from 64 on")
    return width, height


if __name__ == "__main__":
    sys.exit(command.run(main))
