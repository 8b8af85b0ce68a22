"""`bench gpu --plan N`: what to measure first on a card that is there for minutes, most telling first.

Each plan is one command of at most `MINUTES`. What it measured is in the folder after every row, so a plan that is cut
keeps its rows, and the next one adds to them. Standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kit import made_up_device

from tools import PYTEST, ROOT, Problem

from . import gpu_prepare

MINUTES = 9.0

LEAST = 30
"""Seconds under which nothing more is begun."""


@dataclass(frozen=True)
class Stage:
    """minutes: at most. arguments: of `bench gpu`; none: the tests that need a card."""

    minutes: float
    arguments: str = ""


_OURS = "--contenders cuda-graphs compiled-blocks shipped deepcache-3"
_BESIDE_CORE = "--contenders cuda-graphs core"

PLANS = {
    1: (
        Stage(1.5),
        Stage(4.5, f"--models SDXL --parts steps profile --sizes 1024x1024 512x512 --batches 1 {_OURS}"),
        Stage(MINUTES, f"--models SDXL --parts steps profile --sizes 1024x1024 --batches 1 {_BESIDE_CORE}"),
    ),
    2: (
        Stage(3.0, f"--models Flux --parts steps profile --sizes 1024x1024 --batches 1 {_OURS} core"),
        Stage(2.5, f"--models SD1.5 --parts steps --sizes 512x512 --batches 1 {_OURS} channels-last core"),
        Stage(
            MINUTES,
            "--models SDXL --parts steps sizes40 --sizes 720x960 768x768 1280x720 1024x1024 --batches 1 4"
            " --contenders cuda-graphs deepcache-3",
        ),
    ),
    3: (
        *(
            Stage(2.0, f"--models {model} --parts steps --sizes 1024x1024 --batches 1 {_OURS} core")
            for model in ("Z-Image", "Qwen-Image", "Wan")
        ),
        Stage(MINUTES, f"--models SDXL --parts session cold {_BESIDE_CORE}"),
    ),
}
"""1: the `gpu` tests, then SDXL, which the goals are of, with its kernels; core's node last, which compiles longest.
2: Flux, SD1.5, SDXL's other sizes and batches, single images first, and without those that would have to be compiled
once more for what plan 1 says. 3: the other models, a session and starts."""


def run(number: int, out: Path, prepared: Path | None, quick: bool) -> None:
    """Run a plan's stages, each in a process of its own, so that one that fails or hangs costs no other.

    out: where benchmarks.json is, or will be. prepared: a folder that `gpu_prepare.prepare` filled. quick: with tiny
    models on the CPU, which rehearses it.

    Raises:
        Problem: stages failed or were cut, after all others have run.
    """
    end = time.monotonic() + 60 * MINUTES
    failed = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        environment = {**os.environ, **(gpu_prepare.environment(prepared, Path(work)) if prepared else {})}
        for stage in PLANS[number]:
            seconds = min(60 * stage.minutes, end - time.monotonic())
            name = stage.arguments or "the tests marked gpu"
            if seconds < LEAST:
                failed.append(f"no time left for {name}")
                continue
            print(f"Plan {number}: {name}, at most {seconds:.0f} s", file=sys.stderr, flush=True)
            command = [sys.executable, *_arguments(stage, seconds, out, quick)]
            try:
                code = subprocess.run(command, cwd=ROOT, env=environment, timeout=seconds + LEAST).returncode
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
        # A rehearsal.
        return [
            "-c",
            f"import sys; sys.path.append({str(ROOT / 'tests')!r}); {PYTEST}",
            "-p",
            "without_values",
            *chosen,
        ]
    rows = out / "benchmarks.json"
    return [
        *("-m", "bench.gpu", *stage.arguments.split(), "--minutes", f"{seconds / 60:.2f}", "--out", str(out)),
        *(["--add", str(rows)] if rows.exists() and json.loads(rows.read_text(encoding="utf-8"))["rows"] else []),
        *(["--quick"] if quick else []),
    ]
