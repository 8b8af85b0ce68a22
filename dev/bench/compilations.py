"""What was compiled, by torch's own counters, and a compiler's cache that starts empty."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock


class Counts(NamedTuple):
    """Since the process began: graphs compiled, graph breaks, calls of blocks that our engine ran uncompiled.

    Graphs that ours had torch trace to learn of a block, and dropped, are no compilations.
    """

    graphs: int
    breaks: int
    uncompiled: int

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


@functools.cache
def _traced() -> Counter[str]:
    """How often our engine has told each event since this was first called."""
    from comfy_accel.accel.core.events import subscribe

    told: Counter[str] = Counter()
    subscribe(lambda name, data: told.update([name]))
    return told


def read_counts() -> Counts:
    from comfy_accel.accel.core.fallbacks import fallbacks
    from torch._dynamo.utils import counters

    return Counts(
        graphs=counters["stats"]["unique_graphs"] - _traced()["block_traced"],
        breaks=sum(counters["graph_break"].values()),
        uncompiled=sum(row["calls"] for row in fallbacks.rows()),
    )


class RecompileLimit(logging.Handler):
    """Hears torch say that it reached its recompile limit; from then on it runs the function eagerly.

    A contender that gave up so compiles nothing more, which must not be read as needing nothing more.
    """

    def __init__(self):
        super().__init__(logging.WARNING)
        self.heard = False

    def emit(self, record: logging.LogRecord) -> None:
        self.heard |= "recompile_limit" in record.getMessage()

    def __enter__(self) -> RecompileLimit:
        logging.getLogger("torch._dynamo.convert_frame").addHandler(self)
        return self

    def __exit__(self, *_) -> None:
        logging.getLogger("torch._dynamo.convert_frame").removeHandler(self)


@contextmanager
def seconds_heard() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Seconds that ours compiles while it lasts: by kind of block, and by stage (`generated_code.STAGES`)."""
    from comfy_accel.accel.compile.generated_code import TRACE
    from comfy_accel.accel.core.events import subscribe

    kinds: Counter[str] = Counter()
    stages: Counter[str] = Counter()
    stage, began = "", 0.0

    def hear(name: str, data: dict[str, Any]) -> None:
        nonlocal stage, began
        if name not in ("compile_start", "compile_stage", "compile_end", "compile_failed"):
            return
        now = time.perf_counter()
        if stage:
            stages[stage] += now - began
        stage, began = {"compile_start": TRACE, "compile_stage": data.get("stage", "")}.get(name, ""), now
        if name == "compile_end":
            kinds[data["name"]] += data["seconds"]

    unsubscribe = subscribe(hear)
    try:
        yield kinds, stages
    finally:
        unsubscribe()


@contextmanager
def empty_inductor_cache() -> Iterator[None]:
    """While it lasts, inductor keeps its files in a new folder, so that nobody finds what an earlier run compiled."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, compiling_into(Path(folder)):
        yield


@contextmanager
def compiling_into(folder: Path) -> Iterator[None]:
    """While it lasts, inductor and triton keep their files in `folder`, and look nowhere else."""
    with mock.patch.dict(os.environ, fresh_folders(folder)):
        yield


def fresh_folders(folder: Path) -> dict[str, str]:
    """Environment of a process that keeps what it compiles in `folder` alone."""
    # Inductor gives triton a folder once for a process, where none is named.
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
