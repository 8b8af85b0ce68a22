"""What every measurement ends in: a table to read and JSON to keep, one flat row per measurement."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dev import ROOT, Problem
from dev.tools import command
from dev.tools.comfyui import tree, version

Row = dict[str, Any]


def parser(name: str, summary: str) -> argparse.ArgumentParser:
    """The arguments that every measurement has; it adds its own."""
    made = command.Parser(prog=f"dev.py bench {name}", description=summary)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    return made


def tell(row: Row, columns: Sequence[str]) -> None:
    """The row on stderr, while others are still measured."""
    print(table([row], columns).splitlines()[-1], file=sys.stderr, flush=True)


def scientific(value: float) -> str:
    """A difference as tables show it."""
    return f"{value:.1e}"


def machine() -> dict[str, Any]:
    """The hardware and the system. Memory in GiB; `gpu` and `gpu_memory` None without one."""
    import psutil
    import torch

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu and gpu.name,
        "gpu_memory": gpu and round(gpu.total_memory / 2**30, 1),
        "compiler": compiler(),
    }


def versions(comfyui: Path) -> dict[str, str | None]:
    """What ran: the pack, ComfyUI, Python, torch, triton and diffusers (None where missing)."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return {
        "comfy-accel": re.search(r'^version = "(.+)"', pyproject, re.MULTILINE)[1],
        "comfyui": version(comfyui),
        "python": platform.python_version(),
        "torch": _installed("torch"),
        "triton": _installed("triton"),
        "diffusers": _installed("diffusers"),
    }


def compiler() -> str | None:
    """The C++ compiler that inductor would use, None where it or Python's headers are missing."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return None
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl"]
    return next((found for found in map(shutil.which, filter(None, names)) if found), None)


def table(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """The rows as text, numbers to the right; by default with the first row's columns."""
    columns = columns or (list(rows[0]) if rows else [])
    cells = [list(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def grouped(rows: Iterable[Row], names: Sequence[str]) -> list[tuple[Row, list[Row]]]:
    """What these columns have, and the rows that have it, in the order of the first of each."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return [(dict(zip(names, place, strict=True)), group) for place, group in groups.items()]


def markdown(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The rows as a table of Markdown, numbers to the right."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    are_numbers = [all(_NUMBER.fullmatch(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = [columns, ["--:" if is_number else "---" for is_number in are_numbers], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_NUMBER = re.compile(r"[-+]?[\d.]*(e[-+]?\d+)?%?")
"""Also "-", which stands for none."""


def write(path: Path, rows: Sequence[Row], comfyui: Path, **more: Any) -> None:
    """Save the rows to `path` as {"machine": ..., "versions": ..., **more, "rows": [...]}."""
    content = {"machine": machine(), "versions": versions(comfyui), **more, "rows": list(rows)}
    # One row, one line.
    fields = [f"{json.dumps(name)}: {_json(value)}" for name, value in content.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")  # a run that is stopped while it writes leaves the rows before
    unfinished.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")
    unfinished.replace(path)


def finish(file: Path | None, rows: Sequence[Row], failure: str | None = None) -> None:
    """The end of a measurement: keep its rows in the file, if one was asked for. Raises Problem: the failure."""
    if file:
        write(file, rows, tree())
        print(f"JSON: {file}")
    if failure:
        raise Problem(failure)


def _json(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
