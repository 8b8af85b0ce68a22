"""The part "steps" of `bench gpu`: at every case, every contender's seconds a step, in turns, and its output.

Import it after `inprocess.boot` and `pack.load`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from comfy_accel.accel.core.errors import one_line
from comfy_accel.accel.hosts.comfyui.models.deep_cache import last_run

from . import gpu_device
from .gpu_cases import (
    BLOCKS,
    CAPTURED,
    COLD,
    COMPILED,
    CONTENDERS,
    CORE,
    EAGER,
    MADE_TO_SKIP,
    SAMPLED,
    SHIPPED,
    WARM,
    Case,
    TimeBudget,
    skipped,
)
from .gpu_contenders import Lineup, ran_as
from .gpu_models import Subject
from .gpu_runs import Run, Runs, decibels, difference, tolerance
from .report import Row

ROUNDS = 2
"""Turns that every contender takes at a case."""

TIMED = 6
"""Steps of a turn after its first; with `ROUNDS` turns, twelve."""

WARM_UP = 16
"""Steps after which calls are replayed, probes of compiled blocks included."""


@dataclass
class _Turns:
    """What one contender has done at one case so far."""

    row: Row
    expected_calls: int = 0
    steps: list[float] = field(default_factory=list)
    replays: int = 0


class Steps:
    """Measures the contenders of one lineup, case by case.

    begun: those whose first image here had nothing compiled to find; `answer`: eager's at the first case, in a file.
    """

    def __init__(
        self,
        model: str,
        runs: Runs,
        lineup: Lineup,
        subject: Subject,
        budget: TimeBudget,
        matrix_flops: float,
        answer: Path,
    ):
        self._model, self._runs, self._lineup, self._budget = model, runs, lineup, budget
        self._dtype, self._tolerance = subject.dtype, tolerance(subject.dtype)
        self._matrix_flops, self._frames, self._device = matrix_flops, subject.frames, subject.device
        self._answer = answer
        self._seconds: dict[str, float] = {}
        self._earlier: dict[tuple[Case, str], Row] = {}
        self._first: Case | None = None
        self.begun: dict[str, Case] = {}

    def case(self, case: Case, names: Sequence[str]) -> Iterator[Row]:
        """A row for each contender, eager first, or one that says why it was skipped.

        A contender that fails is out at this case, with a row that says so; the others go on.
        """
        expected: Run | None = None
        turns: dict[str, _Turns] = {}
        reserve = sum(self._seconds.get(f"turn {name}", 0) for name in names) * ROUNDS
        for name in names:
            fits = self._budget.fits(self._seconds.get(name, 0) + reserve)
            if not fits or (name != EAGER and expected is None):  # nobody to compare with
                if (case, name) not in self._earlier:
                    yield skipped("steps", self._model, str(case), name)
                continue
            row, run, first = self._warmed(case, name, expected)
            yield from first
            if run is None:
                yield row
            else:
                turns[name] = _Turns(row)
            if name == EAGER:
                expected = run
        if not turns:
            return
        for _ in range(ROUNDS):
            for name in list(turns):
                started = time.monotonic()
                failure = self._turn(case, name, turns[name])
                self._seconds[f"turn {name}"] = time.monotonic() - started
                if failure is not None:
                    yield {**turns.pop(name).row, "failed": failure}
        with torch.inference_mode():
            flops = self._runs.flops(case)
        eager_ms = statistics.median(turns[EAGER].steps) * 1e3 if EAGER in turns else None
        for name, done in turns.items():
            row = self._earlier[case, name] = self._result(name, done, flops, eager_ms)
            yield row

    def _warmed(self, case: Case, name: str, expected: Run | None) -> tuple[Row, Run | None, list[Row]]:
        """The contender's row so far, a warm run of it (None where it failed), and rows of a cold start."""
        place = {"model": self._model, "size": case.size, "batch": case.batch, "contender": name}
        row = {
            **{"part": "steps", **place, "width": case.width, "height": case.height},
            **{"frames": self._frames, "dtype": self._dtype},
        }
        began = time.monotonic()
        is_cold = self._is_cold(case, name)
        try:
            with self._lineup.running(name) as spent:
                gpu_device.forget_peak(self._device)
                patcher = self._lineup.patcher(name)
                first = self._runs.run(patcher, case, SAMPLED)
                cold = {**place, "first_image_s": round(first.seconds, 3), "peak_mb": gpu_device.peak_mb(self._device)}
            with self._lineup.running(name) as settling:
                self._runs.run(patcher, case, WARM_UP if CONTENDERS[name].has_graphs or name == SHIPPED else SAMPLED)
            with self._lineup.running(name) as again:
                run = self._runs.run(patcher, case, SAMPLED)
                # Eager is compared with itself: what differs from run to run.
                reference = expected or self._runs.run(patcher, case, SAMPLED)
        except Exception as error:
            torch.cuda.empty_cache()
            return {**row, "failed": one_line(error)}, None, []
        taken = time.monotonic() - began
        # Ours compile at their first case alone; core's may at any.
        self._seconds[name] = taken if name in (CORE, BLOCKS) else taken - max(first.seconds - run.seconds, 0)
        row |= {
            **_sum(_sum(spent, settling), again),
            "first_image_s": round(first.seconds, 3),
            "answer_diff": difference(run.answer, reference.answer),
            "image_diff": difference(run.image, reference.image),
            "psnr_db": decibels(run.image, reference.image) if CONTENDERS[name].caches else None,
            "tolerance": self._tolerance,
        }
        earlier = self._earlier.get((case, name))
        if earlier is not None:
            row = {**_sum(row, earlier), "first_image_s": earlier["first_image_s"]}
        if not is_cold:
            return row, run, []
        self.begun[name] = case
        if name == EAGER:
            torch.save(run.answer, self._answer)
        warm = {**cold, "first_image_s": round(run.seconds, 3)}
        labels = {"part": "cold", "loaded": 0, "held_mb": None, "answer_diff": row["answer_diff"]}
        labels["tolerance"] = self._tolerance
        return (
            row,
            run,
            [
                {**labels, "start": start, **of_run, **counted, "ran_as": ran_as(name, counted["replays"], SAMPLED)}
                for start, of_run, counted in ((COLD, cold, spent), (WARM, warm, again))
            ],
        )

    def _is_cold(self, case: Case, name: str) -> bool:
        """Whether this is the contender's first image, and nobody has compiled anything that it finds."""
        self._first = self._first or case
        alone = name in (EAGER, CAPTURED, CORE, BLOCKS) or (name == COMPILED and CAPTURED not in self.begun)
        return alone and case == self._first and name not in self.begun

    def _turn(self, case: Case, name: str, done: _Turns) -> str | None:
        """One timed run; the reason where it failed."""
        caches = CONTENDERS[name].caches
        steps = 1 + (MADE_TO_SKIP if caches else TIMED)
        gpu_device.forget_peak(self._device)
        try:
            with self._lineup.running(name) as spent:
                run = self._runs.run(self._lineup.patcher(name), case, steps)
        except Exception as error:
            torch.cuda.empty_cache()
            return one_line(error)
        done.steps += run.steps
        done.replays += spent["replays"]
        done.expected_calls += steps
        row = done.row = _sum(done.row, spent)
        # Calls that are recorded are there whoever runs, also eagerly.
        row["peak_mb"] = gpu_device.peak_mb(self._device, self._lineup.kept_bytes())
        row["graphs_mb"] = _mb(self._lineup.graph_bytes(name))
        if CONTENDERS[name].interval:
            row |= last_run()
        return None

    def _result(self, name: str, done: _Turns, flops: int, eager_ms: float | None) -> Row:
        caches = CONTENDERS[name].caches
        # Steps that skip and steps that do not are unlike by design: their mean is what a run pays.
        seconds = (statistics.mean if caches else statistics.median)(done.steps)
        rate = self._matrix_flops
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
            "share_of_matrix": None if caches else round(flops / seconds / rate, 4),
        }


def _sum(one: Row, other: Row) -> Row:
    """The first row, with what was counted in the other too."""
    counts = ("compilations", "graph_breaks", "uncompiled", "captures")
    return {
        **one,
        **{name: one[name] + other[name] for name in counts},
        "gave_up": one["gave_up"] or other["gave_up"],
        "reasons": list(dict.fromkeys([*one["reasons"], *other["reasons"]])),
    }


def _mb(number: int | None) -> float | None:
    return None if number is None else round(number / 2**20, 1)
