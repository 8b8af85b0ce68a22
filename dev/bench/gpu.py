"""Every contender at every size on one GPU, in one run: eager, core's compile node, ours, ours with DeepCache.

Models at their published size with random weights, made in place. What is finished is written after every row, so a
run that is cut keeps its results. --quick tries all of it on the CPU, with tiny models and nothing compiled.
"""

import argparse
import datetime
import json
import operator
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dev import WORK, Problem
from dev.tools import command
from dev.tools.comfyui import tree

from . import gpu_page, gpu_plan, report
from .child import begin
from .compilations import RecompileLimit
from .gpu_cases import (
    BATCHES,
    CONTENDERS,
    DEFAULT,
    EAGER,
    FLAGS,
    MODELS,
    NATIVE,
    PARTS,
    QUICK_BATCHES,
    QUICK_MODELS,
    QUICK_SIZES,
    SIZES,
    TimeBudget,
    merged,
    named,
    size_of,
)


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    if options.comfyui:
        os.environ["COMFYUI_PATH"] = os.path.abspath(options.comfyui)
    if options.prepare:
        size = gpu_plan.prepare(options.prepare, options.for_python)
        print(f"{options.prepare}: {size:.0f} MB. There: python3 -m dev.bench.gpu --plan default --prepared FOLDER")
        return
    if options.plan:
        out = (options.out or WORK / "gpu").resolve()  # docs has rows of another card
        return gpu_plan.run(options.plan, out, options.prepared, options.quick, options.minutes)
    if options.flags == DEFAULT and not options.quick:  # as ComfyUI's main.py does, before torch is imported
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"backend:{ALLOCATORS[DEFAULT]}"
    tree()  # what is wrong with the path is said before torch is imported
    _require_device(options)
    begin(options.quick, *FLAGS[options.flags])
    results = Results(options)
    budget = TimeBudget(None if options.minutes is None else 60 * options.minutes)
    for number, model in enumerate(options.models):
        for row in of_model(model, options, budget, len(options.models) - number, results.facts["device"]):
            results.add(row)
    results.tell()


class Results:
    """The rows so far, and the files that they are written to."""

    def __init__(self, options: argparse.Namespace):
        from . import gpu_device, gpu_models

        self._options, self._comfyui = options, tree()
        self.rows: list[report.Row] = []
        self.skips: list[report.Row] = []
        self.facts: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%d %B %Y, %H:%M UTC"),
            "command": " ".join(["dev.py bench gpu", *options.given]),
            "device": gpu_device.described(gpu_models.FULL["SDXL"].device),
            "versions": report.versions(self._comfyui),
        }
        self._old: dict[str, list] = {"rows": [], "skipped": []}
        if options.add:
            old = json.loads(options.add.read_text(encoding="utf-8"))
            for name in ("name", "torch"):
                if old["device"][name] != self.facts["device"][name]:
                    raise Problem(f"--add {options.add} is of another {name}: measure all of it here.")
            known = (*PARTS, "cold")  # earlier versions measured more
            self._old = {kind: [row for row in old[kind] if row["part"] in known] for kind in self._old}

    def add(self, row: report.Row) -> None:
        """Keep the row, print it, and write all files anew."""
        (self.skips if "why" in row else self.rows).append(row)
        if "kernel" not in row or gpu_page.is_telling(row["kernel"]):  # there are hundreds; the page has them
            print(gpu_page.line(row), file=sys.stderr, flush=True)
        self.save()

    def save(self) -> str:
        """Write everything so far to the files that were asked for; returns the page."""
        rows, skips = self._all()
        out = self._options.out
        more = {name: self.facts[name] for name in ("date", "command", "device")}
        for file in filter(None, [self._options.json, out and out / "benchmarks.json"]):
            report.write(file, rows, self._comfyui, **more, skipped=skips)
        page = gpu_page.page(rows, skips, self.facts)
        if out:
            (out / "benchmarks.md").write_text(page, encoding="utf-8")
        return page

    def tell(self) -> None:
        """Print the page. Raises Problem: a contender failed or its output is wrong."""
        print(self.save())
        if self._options.out:
            print(f"Written: {self._options.out / 'benchmarks.md'} and benchmarks.json beside it")
        wrong = gpu_page.failures(self._all()[0])
        if wrong:
            raise Problem(f"{len(wrong)} failures, the first: {wrong[0]}.")

    def _all(self) -> tuple[list[report.Row], list[report.Row]]:
        about = operator.itemgetter("part", "model", "flags", "contender")
        done = set(map(about, self.rows))
        skips = [row for row in self._old["skipped"] if about(row) not in done]
        return merged(self._old["rows"], self.rows), merged(skips, self.skips)


def of_model(
    model: str, options: argparse.Namespace, budget: TimeBudget, models_left: int, device: dict[str, Any], capturer=None
) -> Iterator[report.Row]:
    """All rows of one model, part by part. device: as `gpu_device.described`. capturer: instead of CUDA's."""
    import torch

    from .gpu_parts import Parts

    if options.quick:
        torch.set_num_threads(1)  # Layers this small gain nothing from more.
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work, RecompileLimit() as limit:
        parts = Parts(model, options, budget, limit, Path(work), device["matrix_tflops"] * 1e12, capturer)
        for part in budget.parts(options.parts, models_left):
            yield from ({**row, "flags": options.flags} for row in parts.rows(part))
        parts.free()


ALLOCATORS = {DEFAULT: "cudaMallocAsync"}
"""Of torch, by ComfyUI's flags."""


def _require_device(options: argparse.Namespace) -> None:
    if options.quick:
        return
    import torch

    if not torch.cuda.is_available():
        raise Problem("bench gpu measures a CUDA device and torch sees none: --quick tries all of it on the CPU.")
    allocator = ALLOCATORS.get(options.flags, "native")
    if torch.cuda.get_allocator_backend() != allocator:
        raise Problem(f"--flags {options.flags} means torch's allocator {allocator}: unset PYTORCH_CUDA_ALLOC_CONF.")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(prog="dev.py bench gpu", description=__doc__)

    def choice(option: str, known: Iterable[str], summary: str) -> None:
        summary = f"{summary}: {', '.join(known)}"
        parser.add_argument(f"--{option}", nargs="+", choices=list(known), metavar="NAME", help=summary)

    choice("models", MODELS, "default: all, with --quick " + " and ".join(QUICK_MODELS))
    choice("contenders", CONTENDERS, "default: all; eager always runs")
    choice("parts", PARTS, "default: all")
    add = parser.add_argument
    add("--flags", choices=FLAGS, default=NATIVE, help=f"of ComfyUI, default: {NATIVE}, {' '.join(FLAGS[NATIVE])}")
    add("--sizes", nargs="+", metavar="WxH", help="pixels, such as 720x960")
    add("--batches", nargs="+", type=int, metavar="N", help="images at a time")
    add("--minutes", type=float, metavar="N", help="leave out what does not fit; default: all of it, or the plan's")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write benchmarks.md and benchmarks.json there; default with --plan: .work/gpu",
    )
    add("--json", type=Path, metavar="FILE", help="write the rows there too")
    earlier = "benchmarks.json of an earlier run on this device: its rows stay where this run has none about the same"
    add("--add", type=Path, metavar="FILE", help=earlier)
    add("--comfyui", metavar="PATH", help="a ComfyUI checkout, instead of the embedded 0.3.75")
    most = "measure what tells most in under ten minutes: default, or what it leaves to default-2"
    add("--plan", choices=gpu_plan.PLANS, help=most)
    lacking = "measure nothing: put there what a machine lacks that has torch, transformers and no network"
    add("--prepare", type=Path, metavar="FOLDER", help=lacking)
    add("--for-python", default="3.12", metavar="VERSION", help="Python of that machine, default: 3.12")
    add("--prepared", type=Path, metavar="FOLDER", help="with --plan: the folder that --prepare filled")
    add("--quick", action="store_true", help="tiny models on the CPU: whether it runs, and counts")
    options = parser.parse_args(arguments)
    options.given = sys.argv[1:] if arguments is None else arguments
    quick = options.quick
    options.models = named(options.models or (QUICK_MODELS if quick else None), MODELS)
    options.contenders = named(options.contenders and [EAGER, *options.contenders], CONTENDERS)
    options.parts = named(options.parts, PARTS)
    options.batches = options.batches or (QUICK_BATCHES if quick else BATCHES)
    try:
        options.sizes = [size_of(text) for text in options.sizes or ()] or (QUICK_SIZES if quick else SIZES)
    except ValueError as error:
        raise Problem("--sizes takes sizes such as 720x960, both sides multiples of 8 from 64 on.") from error
    if min(options.batches) < 1:
        raise Problem("--batches takes numbers from 1 on.")
    return options


if __name__ == "__main__":
    sys.exit(command.run(main))
