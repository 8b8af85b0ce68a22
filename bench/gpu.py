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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit import made_up_device

from tools import Problem, command, pack
from tools.comfyui import tree
from tools.inprocess import boot

from . import gpu_goals, gpu_page, gpu_plan, gpu_prepare, report
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
    options = _parse(arguments)
    if options.comfyui:
        os.environ["COMFYUI_PATH"] = os.path.abspath(options.comfyui)
    if options.prepare:
        size = gpu_prepare.prepare(options.prepare, options.for_python)
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
        results.save()
    results.tell()


class Results:
    """The rows so far, and the files that they are written to."""

    def __init__(self, options: argparse.Namespace):
        from . import gpu_device, gpu_models

        self._options = options
        self._comfyui = tree()
        self.rows: list[report.Row] = []
        self.skips: list[report.Row] = []
        self.seconds: dict[str, float] = {}
        device = next(iter(gpu_models.QUICK.values())).device
        self.facts: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%d %B %Y, %H:%M UTC"),
            "command": " ".join(["dev.py bench gpu", *options.given]),
            "device": gpu_device.described(device),
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

    def save(self) -> None:
        """Everything so far to the files that were asked for."""
        rows, skips = self._all()
        files = [self._options.json, self._options.out and self._options.out / "benchmarks.json"]
        more = {"date": self.facts["date"], "command": self.facts["command"], "device": self.facts["device"]}
        for file in filter(None, files):
            report.write(file, rows, self._comfyui, **more, seconds=self.seconds, skipped=skips)
        if self._options.out:
            text = gpu_page.page(rows, skips, self._goals(), gpu_goals.failures(rows), self.facts)
            (self._options.out / "benchmarks.md").write_text(text, encoding="utf-8")

    def tell(self) -> None:
        """The page on stdout; and what failed, as the sentence of a Problem."""
        rows, skips = self._all()
        wrong = gpu_goals.failures(rows)
        print(gpu_page.page(rows, skips, self._goals(), wrong, self.facts))
        if self._options.out:
            print(f"Written: {self._options.out / 'benchmarks.md'} and benchmarks.json beside it")
        if wrong:
            raise Problem(f"{len(wrong)} failures, the first: {wrong[0]}.")

    def _all(self) -> tuple[list[report.Row], list[report.Row]]:
        done = {(row["part"], row["model"], row["contender"]) for row in self.rows}
        skips = [row for row in self._old["skipped"] if (row["part"], row["model"], row["contender"]) not in done]
        return merged(self._old["rows"], self.rows), merged(skips, self.skips)

    def _goals(self) -> list[gpu_goals.Goal]:
        rows, skips = self._all()
        return gpu_goals.goals(rows, skips, self.facts["device"]["cuda"] is not None, self.seconds)


def of_model(
    model: str, options: argparse.Namespace, budget: TimeBudget, models_left: int, device: dict[str, Any], capturer=None
) -> Iterator[report.Row]:
    """All rows of one model, part by part. capturer: in place of CUDA's."""
    import torch

    from . import gpu_cold, gpu_forty, gpu_models, gpu_profile, gpu_session
    from .gpu_contenders import Lineup
    from .gpu_runs import Runs
    from .gpu_steps import Steps

    subject = (gpu_models.QUICK if options.quick else gpu_models.FULL)[model]
    missing = subject.missing()
    if missing:
        yield from (skipped(part, model, "everything", EAGER, missing) for part in options.parts)
        return
    contenders = [name for name in options.contenders if name != CHANNELS_LAST or subject.has_convolutions]
    if options.quick:
        torch.set_num_threads(1)  # Layers this small gain nothing from more.

    def compiling(part: str) -> list[str]:
        wanted = QUICK_COMPILING[part] if options.quick else COMPILING
        return [name for name in (EAGER, *wanted) if name in contenders]

    matrix_flops = device["matrix_tflops"] * 1e12
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, RecompileLimit() as limit:
        work, runs, lineup = Path(folder), None, None
        begun: dict[str, Case] = {}
        for part in budget.parts(options.parts, models_left):
            if part in IN_PROCESS and runs is None:
                runs = Runs(subject)
                backend = "eager" if options.quick else "inductor"
                kept = "cold" in options.parts
                lineup = Lineup(runs.model, backend, work / "steps", limit, capturer=capturer, keeps=kept)
            if part == "steps":
                answer = work / "steps" / gpu_cold.ANSWER
                answer.parent.mkdir()
                steps = Steps(model, runs, lineup, subject, budget, matrix_flops, answer)
                for names in turns(contenders):
                    for case in cases(options.sizes, options.batches):
                        yield from steps.case(case, names)
                begun = steps.begun
            elif part == "profile":
                names = [name for name in contenders if not CONTENDERS[name].caches]
                case = cases(options.sizes, options.batches)[0]
                yield from gpu_profile.rows(model, runs, lineup, case, names, budget, subject.device)
            elif part == "sizes40" and CAPTURED in contenders:
                yield from gpu_forty.rows(model, runs, lineup, budget)
            if part not in IN_PROCESS:
                runs = lineup = steps = None
                _free()
            if part == "session":
                prompts = QUICK_SESSION if options.quick else SESSION
                yield from gpu_session.rows(
                    model, subject, compiling(part), prompts, options.quick, work / part, budget, limit
                )
            elif part == "cold":
                case = next(iter(begun.values()), COLD_CASE)
                # Compiled blocks have the same kernels without CUDA graphs as with them.
                known = {*begun, *([COMPILED] if CAPTURED in begun else [])}
                yield from gpu_cold.rows(model, compiling(part), case, options.quick, budget, work / "steps", known)
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

    def choice(option: str, known: Any, summary: str) -> None:
        known = list(known)
        parser.add_argument(
            f"--{option}", nargs="+", choices=known, metavar="NAME", help=f"{summary}: {', '.join(known)}"
        )

    choice("models", MODELS, "default: all, with --quick " + " and ".join(QUICK_MODELS))
    choice("contenders", CONTENDERS, "default: all; eager always runs")
    choice("parts", PARTS, "default: all")
    parser.add_argument("--sizes", nargs="+", metavar="WxH", help="pixels, such as 720x960")
    parser.add_argument("--batches", nargs="+", type=int, metavar="N", help="images at a time")
    parser.add_argument("--minutes", type=float, metavar="N", help="leave out what does not fit; default: all of it")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write benchmarks.md and benchmarks.json there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument(
        "--add",
        type=Path,
        metavar="FILE",
        help="benchmarks.json of an earlier run on this device: its"
        " rows stay where this run has none of the model's part",
    )
    parser.add_argument("--comfyui", metavar="PATH", help="a ComfyUI checkout, instead of the embedded 0.3.75")
    parser.add_argument(
        "--plan",
        type=int,
        choices=gpu_plan.PLANS,
        help=f"measure what tells most in {gpu_plan.MINUTES:.0f} minutes, part 1 to {max(gpu_plan.PLANS)} of it",
    )
    parser.add_argument(
        "--prepare",
        type=Path,
        metavar="FOLDER",
        help="measure nothing: put there what a machine lacks that has torch, transformers and no network",
    )
    parser.add_argument("--for-python", default="3.12", metavar="VERSION", help="Python of that machine, default: 3.12")
    parser.add_argument("--prepared", type=Path, metavar="FOLDER", help="with --plan: the folder that --prepare filled")
    parser.add_argument("--quick", action="store_true", help="tiny models on the CPU: whether it runs, and counts")
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
