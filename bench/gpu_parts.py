"""The parts of `bench gpu` on one model, row by row: steps, kernels, forty sizes, a session, first images.

Import it after `inprocess.boot` and `pack.load`.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from comfy_accel.accel.core.errors import one_line
from comfy_accel.accel.report.run_record import records
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tools import Problem

from . import child, gpu_device
from .compilations import RecompileLimit, fresh_folders
from .gpu_cases import (
    BLOCKS,
    CAPTURED,
    COLD,
    COMPILED,
    CONTENDERS,
    CORE,
    EAGER,
    MADE_TO_SKIP,
    NEW_PROCESS,
    SAMPLED,
    SHIPPED,
    WARM,
    Case,
    TimeBudget,
    forty_sizes,
    in_session,
    skipped,
)
from .gpu_contenders import CACHE_BYTES, Lineup, ran_as
from .gpu_models import FULL, QUICK, FirstAnswer, Run, Runs, Subject, decibels, difference, tolerance
from .report import Row
from .session import Session
from .session_plan import Step

ROUNDS, TIMED = 2, 6
"""Turns that every contender takes at a case, and the steps of a turn after its first: twelve in all."""

WARM_UP = 16
"""Steps after which calls are replayed, probes of compiled blocks included."""

SHOWN, NAME_LENGTH = 25, 90
"""Kernels of a contender that have a row of their own, and characters of their names: C++ templates have hundreds."""

FORTY_BYTES, FORTY_STEPS = 6 << 30, 6
"""Budget of the forty sizes, and steps of each: enough for a model call to be recorded, and replayed."""

SESSION_STEPS, QUICK_SESSION_STEPS = 6, 2
"""A new size is compiled and recorded within its first image, so that the second has nothing of it."""

ANSWER = "eager.pt"


@dataclass
class Steps:
    """The part "steps": every contender's seconds a step at each case, in turns, and its output.

    answer: file for eager's output at the first case. begun: contenders whose first image here had nothing compiled to
    find, and its case.
    """

    model: str
    runs: Runs
    lineup: Lineup
    subject: Subject
    budget: TimeBudget
    matrix_flops: float
    answer: Path
    begun: dict[str, Case] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)
    _earlier: dict[tuple[Case, str], Row] = field(default_factory=dict)
    _first: Case | None = None

    def case(self, case: Case, names: Sequence[str]) -> Iterator[Row]:
        """A row for each contender, eager first, or one that says why it was skipped.

        A contender that fails is out at this case, with a row that says so; the others go on.
        """
        self._first = self._first or case
        expected: Run | None = None
        turns: dict[str, _Turns] = {}
        reserve = sum(self._seconds.get(f"turn {name}", 0) for name in names) * ROUNDS
        for name in names:
            fits = self.budget.fits(self._seconds.get(name, 0) + reserve)
            if not fits or (name != EAGER and expected is None):  # nobody to compare with
                if (case, name) not in self._earlier:
                    yield skipped("steps", self.model, str(case), name)
                continue
            row, run, first = self._warmed(case, name, expected)
            yield from first
            if run is None:
                yield row
            else:
                turns[name] = _Turns(row)
            if name == EAGER:
                expected = run
        for _ in range(ROUNDS):
            for name in list(turns):
                started = time.monotonic()
                failure = self._turn(case, name, turns[name])
                self._seconds[f"turn {name}"] = time.monotonic() - started
                if failure is not None:
                    yield {**turns.pop(name).row, "failed": failure}
        if not turns:
            return
        with torch.inference_mode():
            flops = self.runs.flops(case)
        eager_ms = statistics.median(turns[EAGER].steps) * 1e3 if EAGER in turns else None
        for name, done in turns.items():
            self._earlier[case, name] = row = self._result(name, done, flops, eager_ms)
            yield row

    def _warmed(self, case: Case, name: str, expected: Run | None) -> tuple[Row, Run | None, list[Row]]:
        """The contender's row so far, a warm run of it (None where it failed), and rows of a cold start."""
        place = {"model": self.model, "size": case.size, "batch": case.batch, "contender": name}
        row = {"part": "steps", **place, "width": case.width, "height": case.height}
        row |= {"frames": self.subject.frames, "dtype": self.subject.dtype}
        began = time.monotonic()
        is_cold = self._is_cold(case, name)
        has_probes = CONTENDERS[name].has_graphs or name == SHIPPED
        try:
            with self.lineup.running(name) as spent:
                gpu_device.forget_peak(self.subject.device)
                patcher = self.lineup.patcher(name)
                first = self.runs.run(patcher, case, SAMPLED)
                peak_mb = gpu_device.peak_mb(self.subject.device)
            with self.lineup.running(name) as settling:
                self.runs.run(patcher, case, WARM_UP if has_probes else SAMPLED)
            with self.lineup.running(name) as again:
                run = self.runs.run(patcher, case, SAMPLED)
                # Eager is compared with itself: what differs from run to run.
                reference = expected or self.runs.run(patcher, case, SAMPLED)
        except Exception as error:
            torch.cuda.empty_cache()
            return {**row, "failed": one_line(error)}, None, []
        taken = time.monotonic() - began
        # Ours compile at their first case alone; core's may at any.
        self._seconds[name] = taken if name in (CORE, BLOCKS) else taken - max(first.seconds - run.seconds, 0)
        answered = {"answer_diff": difference(run.answer, reference.answer), "tolerance": tolerance(self.subject.dtype)}
        row |= {
            **_sum(_sum(spent, settling), again),
            **answered,
            "first_image_s": round(first.seconds, 3),
            "image_diff": difference(run.image, reference.image),
            "psnr_db": decibels(run.image, reference.image) if CONTENDERS[name].caches else None,
        }
        earlier = self._earlier.get((case, name))
        if earlier is not None:
            row = {**_sum(row, earlier), "first_image_s": earlier["first_image_s"]}
        if not is_cold:
            return row, run, []
        self.begun[name] = case
        if name == EAGER:
            torch.save(run.answer, self.answer)
        starts = []
        for start, seconds, counted in ((COLD, first.seconds, spent), (WARM, run.seconds, again)):
            about = {"part": "cold", **place, "start": start, "first_image_s": round(seconds, 3), "peak_mb": peak_mb}
            ran = {"loaded": 0, "held_mb": None, **answered, **counted}
            starts.append({**about, **ran, "ran_as": ran_as(name, counted["replays"], SAMPLED)})
        return row, run, starts

    def _is_cold(self, case: Case, name: str) -> bool:
        """Whether this is the contender's first image, and nobody has compiled anything that it finds."""
        alone = name in (EAGER, CAPTURED, CORE, BLOCKS) or (name == COMPILED and CAPTURED not in self.begun)
        return alone and case == self._first and name not in self.begun

    def _turn(self, case: Case, name: str, done: _Turns) -> str | None:
        """One timed run; the reason where it failed."""
        steps = 1 + (MADE_TO_SKIP if CONTENDERS[name].caches else TIMED)
        gpu_device.forget_peak(self.subject.device)
        try:
            with self.lineup.running(name) as spent:
                run = self.runs.run(self.lineup.patcher(name), case, steps)
        except Exception as error:
            torch.cuda.empty_cache()
            return one_line(error)
        done.steps += run.steps
        done.replays += spent["replays"]
        done.expected_calls += steps
        # Calls that are recorded are there whoever runs, also eagerly.
        peak_mb = gpu_device.peak_mb(self.subject.device, self.lineup.kept_bytes())
        graphs = self.lineup.graph_bytes(name)
        done.row = {**_sum(done.row, spent), "peak_mb": peak_mb, "graphs_mb": None if graphs is None else _mb(graphs)}
        if CONTENDERS[name].interval:
            told = records.deep_cache()
            done.row |= {"full_steps": told.full_steps, "skipped_steps": told.skipped_steps}
        return None

    def _result(self, name: str, done: _Turns, flops: int, eager_ms: float | None) -> Row:
        caches = CONTENDERS[name].caches
        # Steps that skip and steps that do not are unlike by design: their mean is what a run pays.
        seconds = (statistics.mean if caches else statistics.median)(done.steps)
        # EasyCache leaves whole model calls out, and those are no replays.
        calls = 1 if caches and not CONTENDERS[name].interval else done.expected_calls
        return {
            **done.row,
            "step_ms": round(seconds * 1e3, 3),
            "eager_ms": eager_ms and round(eager_ms, 3),
            "steps_per_s": round(1 / seconds, 3),
            "steps_timed": len(done.steps),
            "replays": done.replays,
            "ran_as": ran_as(name, done.replays, calls),
            "tflop_a_step": round(flops / 1e12, 8),
            "share_of_matrix": None if caches else round(flops / seconds / self.matrix_flops, 4),
        }


@dataclass
class _Turns:
    """What one contender has done at one case so far."""

    row: Row
    expected_calls: int = 0
    steps: list[float] = field(default_factory=list)
    replays: int = 0


def kernels(
    model: str, runs: Runs, lineup: Lineup, case: Case, names: Sequence[str], budget: TimeBudget
) -> Iterator[Row]:
    """The part "profile": a row for each of the longest kernels of a contender's step, and one for the others together.

    Without a GPU the rows are of operators.
    """
    is_cuda = runs.model.load_device.type == "cuda"
    for name in names:
        place = {"part": "profile", "model": model, "size": case.size, "batch": case.batch, "contender": name}
        if not budget.fits():
            yield skipped("profile", model, str(case), name)
            continue
        try:
            with lineup.running(name):
                patcher = lineup.patcher(name)
                runs.run(patcher, case, WARM_UP if CONTENDERS[name].has_graphs else SAMPLED)
                activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
                with profile(activities=[activity], acc_events=True) as seen:
                    runs.run(patcher, case, SAMPLED)
        except Exception as error:
            yield {**place, "failed": one_line(error)}
            continue
        found = [
            (event.key, event.count, event.self_device_time_total if is_cuda else event.self_cpu_time_total)
            for event in seen.key_averages()
            if not is_cuda or event.device_type == DeviceType.CUDA
        ]
        found.sort(key=lambda kernel: -kernel[2])
        total = sum(microseconds for _, _, microseconds in found)
        if not total:
            yield skipped("profile", model, str(case), name, "the profiler saw no kernel")
            continue
        others = found[SHOWN:]
        if others:
            found[SHOWN:] = [("others", sum(count for _, count, _ in others), sum(time for _, _, time in others))]
        for kernel, count, microseconds in found:
            calls, kernel_ms = round(count / SAMPLED, 1), round(microseconds / SAMPLED / 1e3, 4)
            share = round(microseconds / total, 4)
            yield {**place, "kernel": kernel[:NAME_LENGTH], "calls": calls, "kernel_ms": kernel_ms, "share": share}


def forty(model: str, runs: Runs, lineup: Lineup, budget: TimeBudget) -> Iterator[Row]:
    """The part "sizes40": forty sizes in a row with CUDA graphs, under a budget that does not hold them all.

    A row for each size, in their order, with the memory that is held after its image.
    """
    cache = lineup.cache
    cache.set_budget(max_bytes=FORTY_BYTES)
    evictions = cache.statistics()["evictions"]
    try:
        for number, (width, height) in enumerate(forty_sizes(), 1):
            case = Case(width, height, 1)
            if not budget.fits():
                yield skipped("sizes40", model, f"sizes {number} to 40", CAPTURED)
                return
            row = {"part": "sizes40", "model": model, "number": number, "size": case.size, "contender": CAPTURED}
            try:
                with lineup.running(CAPTURED) as spent:
                    seconds = runs.run(lineup.patcher(CAPTURED), case, FORTY_STEPS).seconds
            except Exception as error:
                yield {**row, "failed": one_line(error)}
                return
            known = cache.statistics()
            yield {
                **row,
                "image_s": round(seconds, 3),
                "cache_mb": _mb(known["bytes"]),
                "budget_mb": FORTY_BYTES >> 20,
                "graphs_mb": _mb(lineup.graph_bytes(CAPTURED) or 0),
                "held_mb": gpu_device.held_mb(runs.model.load_device),
                "evictions": known["evictions"] - evictions,
                # Replays begin with the fifth call of a sort, and a run of a size that is known has all of them.
                "ran_as": ran_as(CAPTURED, spent["replays"], 1),
                **spent,
            }
    finally:
        cache.set_budget(max_bytes=CACHE_BYTES)


def session(
    model: str,
    subject: Subject,
    contenders: Sequence[str],
    steps: Sequence[Step],
    quick: bool,
    folder: Path,
    budget: TimeBudget,
    limit: RecompileLimit,
) -> Iterator[Row]:
    """The part "session": how long each contender makes a person wait beyond the steps themselves.

    A row for each contender and prompt, eager first; each contender starts with nothing compiled. One whose time is
    over, or that fails, leaves the rest of its prompts out, with a row that says so.
    """
    eager: dict[str, Any] = {}
    given = in_session(subject.has_control_net, steps)
    for contender in contenders:
        if not budget.fits():
            yield skipped("session", model, "all prompts", contender)
            continue
        measured, lineup = None, Lineup(None, "eager" if quick else "inductor", folder / contender, limit)
        for number, step in enumerate(given, 1):
            rest = f"prompts {number} to {len(given)}"
            if contender != EAGER and not budget.fits():
                yield skipped("session", model, rest, contender)
                break
            if contender != EAGER and step.name not in eager:
                yield skipped("session", model, rest, contender, "eager has no image of them")
                break
            try:
                if measured is None:
                    measured = TimedSession(subject, contender, quick, limit, lineup)
                yield {"part": "session", "model": model, **measured.twice(step, eager)}
            except Exception as error:
                what = {"step": step.name, "contender": contender, "failed": one_line(error)}
                yield {"part": "session", "model": model, **what}
                break
        measured = lineup = None
        gc.collect()
        torch.cuda.empty_cache()


class TimedSession(Session):
    """One contender's run through the prompts. Each is sampled twice; its stall is what the first takes longer."""

    def __init__(self, subject: Subject, contender: str, quick: bool, limit: RecompileLimit, lineup: Lineup):
        self._lineup, self._subject, self._first = lineup, subject, FirstAnswer()

        def apply(model: Any) -> Any:
            seen = model.clone()
            self._first.watch(seen)
            return lineup.applied(contender, seen)

        super().__init__(subject.family, contender, subject.dtype, quick, limit, apply, device=subject.device)
        self._sampler_steps = QUICK_SESSION_STEPS if quick else SESSION_STEPS

    def _latent(self, step: Step) -> torch.Tensor:
        return self._subject.latent(Case(step.width, step.height, step.batch))

    def twice(self, step: Step, eager: dict[str, Any]) -> Row:
        """The prompt's row; `eager`: images by step and answers by (step, "answer"), filled by the contender eager."""
        self._first.answer = None
        with self._lineup.running(self._contender) as spent:
            row = self.row(step, eager)
            started = time.perf_counter()
            self.image(step)
            steady = time.perf_counter() - started
        answer = self._first.answer
        return {
            **{key: row[key] for key in ("step", "contender", "first_image_s", "dtype")},
            "answer_diff": difference(answer, eager.setdefault((step.name, "answer"), answer)),
            "image_diff": row["relative_diff"],
            "tolerance": tolerance(row["dtype"]),
            "steady_s": round(steady, 3),
            "stall_s": round(max(row["first_image_s"] - steady, 0), 3),
            **spent,
        }


def starts(
    model: str,
    contenders: Sequence[str],
    case: Case,
    quick: bool,
    budget: TimeBudget,
    begun: Path,
    answered: Collection[str],
) -> Iterator[Row]:
    """The part "cold": the first image with nothing compiled, the next one, and the first of a new process.

    Three rows for each contender, eager first; its folders are its own, and empty at first. begun: folder in which the
    contenders `answered` have left what they compiled at their cold start, the rows of which are there already. Only
    the new process is started then.
    """
    expected = 0.0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        answer = (begun if EAGER in answered else Path(work)) / ANSWER
        for name in contenders:
            folder = begun if name in answered else Path(work) / name
            for start in (NEW_PROCESS,) if name in answered else (COLD, NEW_PROCESS):
                if not budget.fits(expected):
                    yield skipped("cold", model, f"{start} start", name)
                    continue
                given = {"model": model, "contender": name, "start": start, "quick": quick, "answer": str(answer)}
                given["case"] = [case.width, case.height, case.batch]
                environment = {**fresh_folders(folder), "ACCEL_STORE": str(folder / "graphs")}
                began = time.monotonic()
                try:
                    yield from child.result_of(
                        "bench.gpu", [json.dumps(given)], f"{model}, {name}, {start}", environment
                    )
                except Problem as problem:
                    where = {"contender": name, "start": start, "size": case.size, "failed": str(problem)}
                    yield {"part": "cold", "model": model, **where}
                if name == EAGER:
                    expected = time.monotonic() - began  # what a process takes at least


def started(given: dict[str, Any], began: float) -> list[Row]:
    """The rows of one process of `starts`: of the cold one two, since its second image is the warm one.

    began: when the process did, by `time.perf_counter`; the clock of an image starts once the model is loaded.
    """
    from comfy_accel.accel.cache.graph_cache import shared
    from comfy_accel.accel.hosts.comfyui import preferences

    if given["quick"]:
        torch.set_num_threads(1)
    preferences.current()  # or it would set the budget later
    shared.set_budget(max_bytes=CACHE_BYTES)
    subject = (QUICK if given["quick"] else FULL)[given["model"]]
    name, case, answer = given["contender"], Case(*given["case"]), Path(given["answer"])
    runs = Runs(subject)
    loaded_s = time.perf_counter() - began
    made = []
    with RecompileLimit() as limit:
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        lineup = Lineup(runs.model, "eager" if given["quick"] else "inductor", folder, limit, shared)
        for start in (COLD, WARM) if given["start"] == COLD else (NEW_PROCESS,):
            gpu_device.forget_peak(subject.device)
            if start == WARM and CONTENDERS[name].has_graphs:
                with lineup.running(name):
                    runs.run(lineup.patcher(name), case, WARM_UP)  # recorded calls are part of a warm process
            loaded = shared.statistics()["loaded"]
            with lineup.running(name) as spent:
                run = runs.run(lineup.patcher(name), case, SAMPLED)
            if name == EAGER and start == COLD:
                torch.save(run.answer, answer)
            place = {"model": given["model"], "contender": name, "start": start, "size": case.size, "batch": case.batch}
            made.append(
                {
                    "part": "cold",
                    **place,
                    "first_image_s": round(run.seconds, 3),
                    "loaded": shared.statistics()["loaded"] - loaded,
                    "process_s": round(loaded_s, 1),
                    "peak_mb": gpu_device.peak_mb(subject.device),
                    "held_mb": gpu_device.held_mb(subject.device),
                    "answer_diff": difference(run.answer, torch.load(answer)) if answer.exists() else None,
                    "tolerance": tolerance(subject.dtype),
                    "ran_as": ran_as(name, spent["replays"], SAMPLED),
                    **spent,
                }
            )
    return made


def _sum(one: Row, other: Row) -> Row:
    """The first row, with what was counted in the other too."""
    counts = ("compilations", "graph_breaks", "uncompiled", "captures")
    return {
        **one,
        **{name: one[name] + other[name] for name in counts},
        "gave_up": one["gave_up"] or other["gave_up"],
        "reasons": list(dict.fromkeys([*one["reasons"], *other["reasons"]])),
    }


def _mb(number: int) -> float:
    return round(number / 2**20, 1)
