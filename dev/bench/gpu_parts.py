"""The parts of `bench gpu` on one model, row by row: steps with first images, kernels, forty sizes, a session.

Import it after `inprocess.boot` and `pack.load`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from comfy_accel.accel.core.errors import one_line
from comfy_accel.accel.report.run_record import records

from . import gpu_device
from .compilations import RecompileLimit, seconds_heard
from .gpu_cases import (
    CAPTURED,
    COLD,
    COMPILING,
    CONTENDERS,
    CORE,
    EAGER,
    MADE_TO_SKIP,
    QUICK_SESSION,
    SAMPLED,
    SESSION,
    WARM,
    Case,
    TimeBudget,
    cases,
    forty_sizes,
    in_session,
    skipped,
    turns,
)
from .gpu_contenders import CACHE_BYTES, Lineup, ran_as
from .gpu_models import FULL, QUICK, FirstAnswer, Run, Runs, Subject, difference, free, tolerance
from .report import Row
from .session import Session
from .session_plan import Step

ROUNDS, TIMED = 2, 6
"""Turns that every contender takes at a case, and timed steps of a turn: twelve in all."""

WARM_UP = 16
"""Steps after which calls are replayed, probes of compiled blocks included."""

SHOWN, NAME_LENGTH = 25, 90
"""Kernels of a contender that get a row each, and characters of their names: those of C++ templates have hundreds."""

FORTY_BYTES, FORTY_STEPS = 6 << 30, 6
"""Budget of the forty sizes, and steps of each: enough for a model call to be captured and replayed."""

SESSION_STEPS, QUICK_SESSION_STEPS = 6, 2
"""A new size is compiled and captured within its first image, so the second has none of that."""


@dataclass
class Turns:
    """What one contender has done at one case so far."""

    row: Row
    expected_calls: int = 0
    runs: list[Run] = field(default_factory=list)
    replays: int = 0

    @property
    def steps(self) -> list[float]:
        return [seconds for run in self.runs for seconds in run.steps]


class Parts:
    """One model's parts: each method named after a part yields its rows, or rows that say what was left out.

    A contender that fails is out, with a row that says why; the others go on. work: a folder for compiled files.
    matrix_flops: a second, as `gpu_device.matrix_rate` measured. capturer: instead of CUDA's.
    """

    def __init__(
        self,
        model: str,
        options: argparse.Namespace,
        budget: TimeBudget,
        limit: RecompileLimit,
        work: Path,
        matrix_flops: float,
        capturer: Any = None,
    ):
        self._model, self._quick, self._budget, self._limit, self._work = model, options.quick, budget, limit, work
        self._subject = (QUICK if options.quick else FULL)[model]
        self._names = options.contenders
        self._cases = cases(options.sizes, options.batches)
        self._backend = "eager" if options.quick else "inductor"
        self._matrix_flops, self._capturer = matrix_flops, capturer
        self._runs: Runs | None = None
        self._lineup: Lineup | None = None
        self._seconds: dict[str, float] = {}
        """What a contender's start at a case took, and each of its turns ("turn NAME")."""
        self._earlier: dict[tuple[Case, str], Row] = {}
        self._begun: set[str] = set()
        """Contenders whose cold start is known."""

    def steps(self) -> Iterator[Row]:
        """Seconds a step and the output of every contender at each case, taken in turns, eager first.

        And the first image of those that find nothing compiled, cold and once more: rows of the part "cold".
        """
        self._load()
        for names in turns(self._names):
            for case in self._cases:
                yield from self._case(case, names)

    def _case(self, case: Case, names: Sequence[str]) -> Iterator[Row]:
        expected: Run | None = None
        running: dict[str, Turns] = {}
        reserve = sum(self._seconds.get(f"turn {name}", 0) for name in names) * ROUNDS
        for name in names:
            fits = self._budget.fits(self._seconds.get(name, 0) + reserve)
            if not fits or (name != EAGER and expected is None):  # nothing to compare with
                if (case, name) not in self._earlier:
                    yield skipped("steps", self._model, str(case), name)
                continue
            row, run, starts = self._warmed(case, name, expected)
            yield from starts
            if run is None:
                yield row
            else:
                running[name] = Turns(row)
            if name == EAGER:
                expected = run
        for _ in range(ROUNDS):
            for name in list(running):
                started = time.monotonic()
                failure = self._turn(case, name, running[name])
                self._seconds[f"turn {name}"] = time.monotonic() - started
                if failure is not None:
                    yield {**running.pop(name).row, "failed": failure}
        if not running:
            return
        with torch.inference_mode():
            flops = self._runs.flops(case)
        eager_ms = statistics.median(running[EAGER].steps) * 1e3 if EAGER in running else None
        for name, done in running.items():
            self._earlier[case, name] = row = self._result(name, done, flops, eager_ms)
            yield row

    def _warmed(self, case: Case, name: str, expected: Run | None) -> tuple[Row, Run | None, list[Row]]:
        """The contender's row so far, a warm run of it (None where it failed), and rows of a cold start."""
        row = {**self._about("steps", name, case), "width": case.width, "height": case.height}
        row |= {"frames": self._subject.frames, "dtype": self._subject.dtype}
        began = time.monotonic()
        try:
            with seconds_heard() as heard, self._lineup.running(name) as spent:
                gpu_device.forget_peak(self._subject.device)
                patcher = self._lineup.patcher(name)
                first = self._runs.run(patcher, case, SAMPLED)
                peak_mb = gpu_device.peak_mb(self._subject.device)
            with self._lineup.running(name) as settling:
                self._runs.run(patcher, case, WARM_UP if CONTENDERS[name].has_graphs else SAMPLED)
            with self._lineup.running(name) as again:
                run = self._runs.run(patcher, case, SAMPLED)
                # Eager is compared with a second run of itself, which shows what differs from run to run.
                reference = expected or self._runs.run(patcher, case, SAMPLED)
        except Exception as error:
            torch.cuda.empty_cache()
            return {**row, "failed": one_line(error)}, None, []
        taken = time.monotonic() - began
        # Ours compile at their first case alone; core's node may at any.
        self._seconds[name] = taken if name == CORE else taken - max(first.seconds - run.seconds, 0)
        answered = {
            "answer_diff": difference(run.answer, reference.answer),
            "tolerance": tolerance(self._subject.dtype),
        }
        row |= {
            **_sum(_sum(spent, settling), again),
            **answered,
            "first_image_s": round(first.seconds, 3),
        }
        earlier = self._earlier.get((case, name))
        if earlier is not None:
            row = {**_sum(row, earlier), "first_image_s": earlier["first_image_s"]}
        # Of ours, all but the first find what a contender before them has compiled.
        is_alone = name in (EAGER, CORE) or self._begun <= {EAGER, CORE}
        if not is_alone or name in self._begun or case != self._cases[0]:
            return row, run, []
        self._begun.add(name)
        starts = [
            {
                **self._about("cold", name, case),
                **{"start": start, "first_image_s": round(seconds, 3), "peak_mb": peak_mb},
                **{**answered, **counted, "ran_as": ran_as(name, counted["replays"], SAMPLED)},
                **({"kinds_s": _rounded(heard[0]), "stages_s": _rounded(heard[1])} if start == COLD else {}),
            }
            for start, seconds, counted in ((COLD, first.seconds, spent), (WARM, run.seconds, again))
        ]
        return row, run, starts

    def _turn(self, case: Case, name: str, done: Turns) -> str | None:
        """One timed run; the reason if it failed."""
        steps = 1 + (MADE_TO_SKIP if CONTENDERS[name].skips else TIMED)
        gpu_device.forget_peak(self._subject.device)
        try:
            with self._lineup.running(name) as spent:
                run = self._runs.run(self._lineup.patcher(name), case, steps)
        except Exception as error:
            torch.cuda.empty_cache()
            return one_line(error)
        done.runs.append(run)
        done.replays += spent["replays"]
        done.expected_calls += steps
        # Captured calls stay in memory whoever runs, also eagerly.
        peak_mb = gpu_device.peak_mb(self._subject.device, self._lineup.kept_bytes())
        graphs = self._lineup.graph_bytes(name)
        done.row = {**_sum(done.row, spent), "peak_mb": peak_mb, "graphs_mb": None if graphs is None else _mb(graphs)}
        if CONTENDERS[name].skips:
            told = records.deep_cache()
            done.row |= {"full_steps": told.full_steps, "skipped_steps": told.skipped_steps, "image_s": run.seconds}
        return None

    def _result(self, name: str, done: Turns, flops: int, eager_ms: float | None) -> Row:
        caches = CONTENDERS[name].skips
        # Skipped and full steps differ by design: their mean is what a run pays.
        seconds = (statistics.mean if caches else statistics.median)(done.steps)
        return {
            **done.row,
            "step_ms": round(seconds * 1e3, 3),
            "eager_ms": eager_ms and round(eager_ms, 3),
            "host_ms": _least(run.host_ms for run in done.runs),
            "device_ms": _least(run.device_ms for run in done.runs),
            "steps_per_s": round(1 / seconds, 3),
            "steps_timed": len(done.steps),
            "replays": done.replays,
            "ran_as": ran_as(name, done.replays, done.expected_calls),
            "tflop_a_step": round(flops / 1e12, 8),
            "share_of_matrix": None if caches else round(flops / seconds / self._matrix_flops, 4),
        }

    def profile(self) -> Iterator[Row]:
        """The longest kernels of a contender's step, a row each, and one row for the others together.

        Without a GPU the rows are of operators.
        """
        self._load()
        case = self._cases[0]
        for name in (name for name in self._names if not CONTENDERS[name].skips):
            if not self._budget.fits():
                yield skipped("profile", self._model, str(case), name)
                continue
            place = self._about("profile", name, case)
            try:
                with self._lineup.running(name):
                    patcher = self._lineup.patcher(name)
                    self._runs.run(patcher, case, WARM_UP if CONTENDERS[name].has_graphs else SAMPLED)
                    found = gpu_device.kernels(lambda p=patcher: self._runs.run(p, case, SAMPLED), self._subject.device)
            except Exception as error:
                yield {**place, "failed": one_line(error)}
                continue
            total = sum(microseconds for _, _, microseconds in found)
            if not total:
                yield skipped("profile", self._model, str(case), name, "the profiler saw no kernel")
                continue
            if others := found[SHOWN:]:
                found[SHOWN:] = [("others", *(sum(other[part] for other in others) for part in (1, 2)))]
            for kernel, count, microseconds in found:
                calls, kernel_ms = round(count / SAMPLED, 1), round(microseconds / SAMPLED / 1e3, 4)
                share = round(microseconds / total, 4)
                yield {**place, "kernel": kernel[:NAME_LENGTH], "calls": calls, "kernel_ms": kernel_ms, "share": share}

    def sizes40(self) -> Iterator[Row]:
        """Forty sizes in a row with CUDA graphs, under a budget that does not hold them all.

        A row for each size, in order, with the memory that is held after its image.
        """
        if CAPTURED not in self._names:
            return
        self._load()
        cache = self._lineup.cache
        cache.set_budget(max_bytes=FORTY_BYTES)
        evictions = cache.statistics()["evictions"]
        try:
            for number, (width, height) in enumerate(forty_sizes(), 1):
                case = Case(width, height, 1)
                if not self._budget.fits():
                    yield skipped("sizes40", self._model, f"sizes {number} to 40", CAPTURED)
                    return
                row = {"part": "sizes40", "model": self._model, "number": number}
                row |= {"size": case.size, "contender": CAPTURED}
                try:
                    with self._lineup.running(CAPTURED) as spent:
                        seconds = self._runs.run(self._lineup.patcher(CAPTURED), case, FORTY_STEPS).seconds
                except Exception as error:
                    yield {**row, "failed": one_line(error)}
                    return
                known = cache.statistics()
                yield {
                    **row,
                    "image_s": round(seconds, 3),
                    "cache_mb": _mb(known["bytes"]),
                    "budget_mb": FORTY_BYTES >> 20,
                    "graphs_mb": _mb(self._lineup.graph_bytes(CAPTURED) or 0),
                    "held_mb": gpu_device.held_mb(self._subject.device),
                    "evictions": known["evictions"] - evictions,
                    # Replays begin with the fifth call of a kind, and a run of a known size has nothing else.
                    "ran_as": ran_as(CAPTURED, spent["replays"], 1),
                    **spent,
                }
        finally:
            cache.set_budget(max_bytes=CACHE_BYTES)

    def session(self) -> Iterator[Row]:
        """How long each contender makes a person wait beyond the steps themselves: a row for each prompt, eager first.

        Each contender starts with nothing compiled. Prompts left after its time or a failure are reported as left out.
        """
        self.free()
        eager: dict[str, Any] = {}
        given = in_session(self._subject.has_control_net, QUICK_SESSION if self._quick else SESSION)
        for contender in (name for name in COMPILING if name in self._names):
            if not self._budget.fits():
                yield skipped("session", self._model, "all prompts", contender)
                continue
            lineup = Lineup(self._work / "session" / contender, self._limit, self._backend)
            measured = None
            for number, step in enumerate(given, 1):
                has_eager = contender == EAGER or step.name in eager
                if not has_eager or (contender != EAGER and not self._budget.fits()):
                    why = "no time left" if has_eager else "eager has no image of them"
                    yield skipped("session", self._model, f"prompts {number} to {len(given)}", contender, why)
                    break
                row = {"part": "session", "model": self._model}
                try:
                    measured = measured or TimedSession(self._subject, contender, self._quick, self._limit, lineup)
                    yield {**row, **measured.twice(step, eager)}
                except Exception as error:
                    yield {**row, "step": step.name, "contender": contender, "failed": one_line(error)}
                    break
            measured = lineup = None
            gc.collect()
            torch.cuda.empty_cache()

    def free(self) -> None:
        """Let go of the model and of everything compiled of it in this process."""
        self._runs = self._lineup = None
        free()

    def _load(self) -> None:
        """The model and its contenders, which steps, profile and sizes40 share."""
        if self._runs is None:
            runs, folder = Runs(self._subject), self._work / "steps"
            self._runs = runs
            self._lineup = Lineup(folder, self._limit, self._backend, runs.model, capturer=self._capturer)

    def _about(self, part: str, contender: str, case: Case) -> Row:
        place = {"part": part, "model": self._model, "size": case.size, "batch": case.batch}
        return {**place, "contender": contender}


class TimedSession(Session):
    """One contender's run through the prompts, each sampled twice; its stall is what the first takes longer."""

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
            "tolerance": tolerance(row["dtype"]),
            "steady_s": round(steady, 3),
            "stall_s": round(max(row["first_image_s"] - steady, 0), 3),
            **spent,
        }


def _sum(one: Row, other: Row) -> Row:
    """The first row, with the counts of both."""
    counts = ("compilations", "graph_breaks", "uncompiled", "captures")
    return {
        **one,
        **{name: one[name] + other[name] for name in counts},
        "gave_up": one["gave_up"] or other["gave_up"],
        "reasons": list(dict.fromkeys([*one["reasons"], *other["reasons"]])),
    }


def _rounded(seconds: Counter[str]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in seconds.most_common()}


def _least(milliseconds: Iterable[float | None]) -> float | None:
    return min((round(value, 3) for value in milliseconds if value is not None), default=None)


def _mb(number: int) -> float:
    return round(number / 2**20, 1)
