"""Every contender at every size on one GPU, in one run: eager, core's compile nodes, ours, ours with DeepCache.

Models at their published size with random weights, made in place. What is finished is written after every row, so a
run that is cut keeps its results. --quick tries all of it on the CPU, with tiny models and nothing compiled.
"""

import argparse
import datetime
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kit import made_up_device

from tools import Problem, command, pack
from tools.comfyui import tree
from tools.inprocess import boot

from . import gpu_page, gpu_plan, report
from .compilations import STORE_KEY, RecompileLimit
from .gpu_cases import (
    BATCHES,
    CAPTURED,
    CHANNELS_LAST,
    COMPILED,
    COMPILING,
    CONTENDERS,
    EAGER,
    MODELS,
    PARTS,
    QUICK_BATCHES,
    QUICK_COMPILING,
    QUICK_MODELS,
    QUICK_SESSION,
    QUICK_SIZES,
    SESSION,
    SIZES,
    Case,
    TimeBudget,
    cases,
    merged,
    named,
    replaced,
    size_of,
    skipped,
    turns,
)

COLD_CASE = Case(512, 512, 1)

IN_PROCESS = ("steps", "profile", "sizes40")
"""Parts that share one model and what was compiled of it."""


def main(arguments: list[str] | None = None) -> None:
    began = time.perf_counter()
    options = _parse(arguments)
    if options.child:
        boot(cpu=options.child["quick"])
        pack.load()
        from . import gpu_parts

        print(json.dumps(gpu_parts.started(options.child, began)))
        return
    if options.comfyui:
        os.environ["COMFYUI_PATH"] = os.path.abspath(options.comfyui)
    if options.prepare:
        size = gpu_plan.prepare(options.prepare, options.for_python)
        print(f"{options.prepare}: {size:.0f} MB. There: python3 -m bench.gpu --plan 1 --prepared {options.prepare}")
        return
    if options.plan:
        return gpu_plan.run(options.plan, (options.out or Path("docs")).resolve(), options.prepared, options.quick)
    tree()  # what is wrong with the path is said before torch is imported
    _require_device(options.quick)
    boot(cpu=options.quick)
    if made_up_device.is_here():
        made_up_device.prepare()
        made_up_device.sample_without_values()
    pack.load()
    # Saved graphs are of the part "cold" alone, in folders of its own.
    os.environ.update(ACCEL_STORE="off", ACCEL_STORE_KEY=STORE_KEY)
    results = Results(options)
    budget = TimeBudget(None if options.minutes is None else 60 * options.minutes)
    for number, model in enumerate(options.models):
        started = time.monotonic()
        for row in of_model(model, options, budget, len(options.models) - number, results.facts["device"]):
            results.add(row)
        results.took(model, time.monotonic() - started)
    results.tell()


class Results:
    """The rows so far, and the files that they are written to."""

    def __init__(self, options: argparse.Namespace):
        from . import gpu_device, gpu_models

        self._options, self._comfyui = options, tree()
        self.rows: list[report.Row] = []
        self.skips: list[report.Row] = []
        self.seconds: dict[str, float] = {}
        self.facts: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%d %B %Y, %H:%M UTC"),
            "command": " ".join(["dev.py bench gpu", *options.given]),
            "device": gpu_device.described(gpu_models.FULL["SDXL"].device),
            "versions": report.versions(self._comfyui),
        }
        self._old: dict[str, list] = {"rows": [], "skipped": []}
        if options.add:
            self._old = json.loads(options.add.read_text(encoding="utf-8"))
            for name in ("name", "torch"):
                if self._old["device"][name] != self.facts["device"][name]:
                    raise Problem(f"--add {options.add} is of another {name}: measure all of it here.")
            self.seconds = self._old["seconds"]

    def add(self, row: report.Row) -> None:
        """Keep the row, say it, and write all files anew."""
        if "why" in row:
            self.skips = replaced(self.skips, row)
        else:
            self.rows = replaced(self.rows, row)
        if "kernel" not in row:  # there are hundreds; the page has them
            print(gpu_page.line(row), file=sys.stderr, flush=True)
        self.save()

    def took(self, model: str, seconds: float) -> None:
        """The model's rows are all there; with --add the seconds are those of its runs together."""
        self.seconds[model] = round(self.seconds.get(model, 0) + seconds, 1)
        self.save()

    def save(self) -> str:
        """Write everything so far to the files that were asked for; the page."""
        rows, skips = self._all()
        out = self._options.out
        more = {name: self.facts[name] for name in ("date", "command", "device")}
        for file in filter(None, [self._options.json, out and out / "benchmarks.json"]):
            report.write(file, rows, self._comfyui, **more, seconds=self.seconds, skipped=skips)
        page = gpu_page.page(rows, skips, self.facts, self.seconds)
        if out:
            (out / "benchmarks.md").write_text(page, encoding="utf-8")
        return page

    def tell(self) -> None:
        """The page on stdout; and what failed, as the sentence of a Problem."""
        print(self.save())
        if self._options.out:
            print(f"Written: {self._options.out / 'benchmarks.md'} and benchmarks.json beside it")
        wrong = gpu_page.failures(self._all()[0])
        if wrong:
            raise Problem(f"{len(wrong)} failures, the first: {wrong[0]}.")

    def _all(self) -> tuple[list[report.Row], list[report.Row]]:
        done = {(row["part"], row["model"], row["contender"]) for row in self.rows}
        skips = [row for row in self._old["skipped"] if (row["part"], row["model"], row["contender"]) not in done]
        return merged(self._old["rows"], self.rows), merged(skips, self.skips)


def of_model(
    model: str, options: argparse.Namespace, budget: TimeBudget, models_left: int, device: dict[str, Any], capturer=None
) -> Iterator[report.Row]:
    """All rows of one model, part by part. capturer: in place of CUDA's."""
    import torch

    from . import gpu_models, gpu_parts
    from .gpu_contenders import Lineup

    quick = options.quick
    subject = (gpu_models.QUICK if quick else gpu_models.FULL)[model]
    missing = subject.missing()
    if missing:
        yield from (skipped(part, model, "everything", EAGER, missing) for part in options.parts)
        return
    contenders = [name for name in options.contenders if name != CHANNELS_LAST or subject.has_convolutions]
    if quick:
        torch.set_num_threads(1)  # Layers this small gain nothing from more.
    given = cases(options.sizes, options.batches)
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, RecompileLimit() as limit:
        work, runs, lineup = Path(folder), None, None
        begun: dict[str, Case] = {}
        for part in budget.parts(options.parts, models_left):
            if part in IN_PROCESS and runs is None:
                runs = gpu_models.Runs(subject)
                backend, keeps = "eager" if quick else "inductor", "cold" in options.parts
                lineup = Lineup(runs.model, backend, work / "steps", limit, capturer=capturer, keeps=keeps)
            if part == "steps":
                answer = work / "steps" / gpu_parts.ANSWER
                answer.parent.mkdir()
                flops = device["matrix_tflops"] * 1e12
                steps = gpu_parts.Steps(model, runs, lineup, subject, budget, flops, answer, begun)
                for names in turns(contenders):
                    for case in given:
                        yield from steps.case(case, names)
            elif part == "profile":
                names = [name for name in contenders if not CONTENDERS[name].caches]
                yield from gpu_parts.kernels(model, runs, lineup, given[0], names, budget)
            elif part == "sizes40" and CAPTURED in contenders:
                yield from gpu_parts.forty(model, runs, lineup, budget)
            if part in IN_PROCESS:
                continue
            runs = lineup = steps = None
            _free()
            wanted = (EAGER, *(QUICK_COMPILING[part] if quick else COMPILING))
            compiling = [name for name in wanted if name in contenders]
            if part == "session":
                prompts = QUICK_SESSION if quick else SESSION
                yield from gpu_parts.session(model, subject, compiling, prompts, quick, work / part, budget, limit)
            else:
                case = next(iter(begun.values()), COLD_CASE)
                # Compiled blocks have the same kernels without CUDA graphs as with them.
                known = {*begun, *([COMPILED] if CAPTURED in begun else [])}
                yield from gpu_parts.starts(model, compiling, case, quick, budget, work / "steps", known)
        runs = lineup = steps = None
        _free()


def _free() -> None:
    import comfy.model_management
    import torch

    torch._dynamo.reset()
    comfy.model_management.unload_all_models()
    gc.collect()
    torch.cuda.empty_cache()


def _require_device(quick: bool) -> None:
    import torch

    if quick:
        return
    if not torch.cuda.is_available():
        raise Problem("bench gpu measures a CUDA device and torch sees none: --quick tries all of it on the CPU.")
    if torch.cuda.get_allocator_backend() != "native":
        raise Problem("CUDA graphs need torch's own allocator: unset PYTORCH_CUDA_ALLOC_CONF.")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench gpu", description=__doc__)

    def choice(option: str, known: Iterable[str], summary: str) -> None:
        summary = f"{summary}: {', '.join(known)}"
        parser.add_argument(f"--{option}", nargs="+", choices=list(known), metavar="NAME", help=summary)

    choice("models", MODELS, "default: all, with --quick " + " and ".join(QUICK_MODELS))
    choice("contenders", CONTENDERS, "default: all; eager always runs")
    choice("parts", PARTS, "default: all")
    add = parser.add_argument
    add("--sizes", nargs="+", metavar="WxH", help="pixels, such as 720x960")
    add("--batches", nargs="+", type=int, metavar="N", help="images at a time")
    add("--minutes", type=float, metavar="N", help="leave out what does not fit; default: all of it")
    add("--out", type=Path, metavar="FOLDER", help="write benchmarks.md and benchmarks.json there")
    add("--json", type=Path, metavar="FILE", help="write the rows there too")
    earlier = "benchmarks.json of an earlier run on this device: its rows stay where this run has none about the same"
    add("--add", type=Path, metavar="FILE", help=earlier)
    add("--comfyui", metavar="PATH", help="a ComfyUI checkout, instead of the embedded 0.3.75")
    most = f"measure what tells most in {gpu_plan.MINUTES:.0f} minutes, part 1 to {max(gpu_plan.PLANS)} of it"
    add("--plan", type=int, choices=gpu_plan.PLANS, help=most)
    lacking = "measure nothing: put there what a machine lacks that has torch, transformers and no network"
    add("--prepare", type=Path, metavar="FOLDER", help=lacking)
    add("--for-python", default="3.12", metavar="VERSION", help="Python of that machine, default: 3.12")
    add("--prepared", type=Path, metavar="FOLDER", help="with --plan: the folder that --prepare filled")
    add("--quick", action="store_true", help="tiny models on the CPU: whether it runs, and counts")
    add("--child", type=json.loads, help=argparse.SUPPRESS)  # one start of `gpu_parts.starts`
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
