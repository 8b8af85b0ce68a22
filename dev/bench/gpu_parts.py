"""The parts of `bench gpu` on one model, row by row: steps with first images, kernels, attention, sizes.

Import it after `inprocess.boot` and `pack.load`.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.ops
import torch
from comfy_accel.accel.core.errors import one_line
from comfy_accel.accel.hosts.comfyui import tracing
from comfy_accel.accel.report.run_record import records
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import gpu_device
from .compilations import RecompileLimit, seconds_heard
from .gpu_cases import (
    CAPTURED,
    COLD,
    COMPILED,
    CONTENDERS,
    CORE,
    EAGER,
    MADE_TO_SKIP,
    SAMPLED,
    WARM,
    Case,
    TimeBudget,
    cases,
    forty_sizes,
    skipped,
)
from .gpu_contenders import CACHE_BYTES, Lineup, ran_as
from .gpu_models import FULL, QUICK, Run, Runs, difference, free, shallow, tolerance
from .report import Row

ROUNDS, TIMED = 2, 6
"""Turns that a contender takes with eager at a case, and timed steps of a turn: twelve in all."""

WARM_UP = 16
"""Steps after which calls are replayed, probes of compiled blocks included."""

SHOWN, NAME_LENGTH = 25, 90
"""Kernels of a contender that get a row each, and characters of their names: those of C++ templates have hundreds."""

FORTY_BYTES, FORTY_STEPS = 6 << 30, 6
"""Budget of the forty sizes, and steps of each: enough for a model call to be captured and replayed."""


@dataclass
class Turns:
    """What one contender has done at one case so far. row: its row, as far as that is known."""

    row: Row = field(default_factory=dict)
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
        self._model, self._budget, self._limit, self._work = model, budget, limit, work
        self._is_quick = options.quick
        self._subject = (QUICK if options.quick else FULL)[model]
        self._names = options.contenders
        self._cases = cases(options.sizes, options.batches)
        self._backend = "eager" if options.quick else "inductor"
        self._matrix_flops, self._capturer = matrix_flops, capturer
        self._runs: Runs | None = None
        self._lineup: Lineup | None = None
        self._seconds: dict[str, float] = {}
        """What a contender took at its last case, without what it waited for a compiler."""
        self._begun: set[str] = set()
        """Contenders whose cold start is known."""

    def rows(self, part: str) -> Iterator[Row]:
        """The part's; where it fails as a whole, as for memory, a row that says so, and the next one goes on."""
        try:
            yield from getattr(self, part)()
            return
        except Exception as error:
            failed = one_line(error)
        self.free()  # the error held it
        yield {**self._about(part, EAGER, self._cases[0]), "failed": failed}

    def steps(self) -> Iterator[Row]:
        """Seconds a step and the output of every contender at each case, in turns with eager, which comes first.

        And the first image of those that find nothing compiled, cold and once more: rows of the part "cold".
        """
        self._load()
        for case in self._cases:
            expected: Run | None = None
            for name in self._names:
                fits = self._budget.fits(self._seconds.get(name, 0))
                if not fits or (name != EAGER and expected is None):
                    why = "eager has no image of it" if fits else "no time left"
                    yield skipped("steps", self._model, str(case), name, why)
                    continue
                began = time.monotonic()
                row, run, starts = self._warmed(case, name, expected)
                yield from starts
                if run is None:
                    yield row
                    continue
                yield self._timed(case, name, row)
                # Ours compile at their first case alone; core's node may at any.
                compiling = 0.0 if name == CORE else max(row["first_image_s"] - run.seconds, 0.0)
                self._seconds[name] = time.monotonic() - began - compiling
                expected = expected or run

    def _warmed(self, case: Case, name: str, expected: Run | None) -> tuple[Row, Run | None, list[Row]]:
        """The contender's row so far, a warm run of it (None where it failed), and rows of a cold start."""
        row = {**self._about("steps", name, case), "width": case.width, "height": case.height}
        row |= {"frames": self._subject.frames, "dtype": self._subject.dtype}
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
        answered = {
            "answer_diff": difference(run.answer, reference.answer),
            "tolerance": tolerance(self._subject.dtype),
        }
        row |= {**_sum(_sum(spent, settling), again), **answered, "first_image_s": round(first.seconds, 3)}
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

    def _timed(self, case: Case, name: str, row: Row) -> Row:
        """The contender's whole row, once it has taken its turns with eager."""
        own = Turns(row)
        eager = own if name == EAGER else Turns()
        for _ in range(ROUNDS):
            for contender, turns in {EAGER: eager, name: own}.items():
                try:
                    self._turn(case, contender, turns)
                except Exception as error:
                    torch.cuda.empty_cache()
                    return {**row, "failed": one_line(error)}
        with torch.inference_mode():
            flops = self._runs.flops(case)
        return self._result(name, own, flops, statistics.median(eager.steps) * 1e3)

    def _turn(self, case: Case, name: str, turns: Turns) -> None:
        """One timed run."""
        steps = 1 + (MADE_TO_SKIP if CONTENDERS[name].skips else TIMED)
        gpu_device.forget_peak(self._subject.device)
        with self._lineup.running(name) as spent:
            run = self._runs.run(self._lineup.patcher(name), case, steps)
        turns.runs.append(run)
        turns.replays += spent["replays"]
        turns.expected_calls += steps
        # Captured calls stay in memory whoever runs, also eagerly.
        peak_mb = gpu_device.peak_mb(self._subject.device, self._lineup.kept_bytes())
        graphs = self._lineup.graph_bytes(name)
        turns.row = {**_sum(turns.row, spent), "peak_mb": peak_mb, "graphs_mb": None if graphs is None else _mb(graphs)}
        if CONTENDERS[name].skips:
            told = records.deep_cache()
            turns.row |= {"full_steps": told.full_steps, "skipped_steps": told.skipped_steps, "image_s": run.seconds}

    def _result(self, name: str, turns: Turns, flops: int, eager_ms: float) -> Row:
        caches = CONTENDERS[name].skips
        # Skipped and full steps differ by design: their mean is what a run pays.
        seconds = (statistics.mean if caches else statistics.median)(turns.steps)
        return {
            **turns.row,
            "step_ms": round(seconds * 1e3, 3),
            "eager_ms": round(eager_ms, 3),
            "host_ms": _least(run.host_ms for run in turns.runs),
            "device_ms": _least(run.device_ms for run in turns.runs),
            "steps_per_s": round(1 / seconds, 3),
            "steps_timed": len(turns.steps),
            "replays": turns.replays,
            "ran_as": ran_as(name, turns.replays, turns.expected_calls),
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

    def attention(self) -> Iterator[Row]:
        """Which kernel this core takes for the model's longest attention, and what torch's others take for it."""
        if not self._budget.fits():
            yield skipped("attention", self._model, "the longest attention", EAGER)
            return
        self.free()
        case, own = self._cases[0], functional.scaled_dot_product_attention
        runs = Runs(self._subject if self._is_quick else shallow(self._model, layers=1))
        with torch.inference_mode():
            with mock.patch.object(functional, own.__name__, side_effect=own) as seen:
                runs.run(runs.model, case, 1)
            args, options = max(seen.call_args_list, key=lambda call: call.args[0].numel() * call.args[1].shape[-2])
            seen.reset_mock()
            shape = list(args[0].shape)
            tflop = 4 * math.prod(shape) * args[1].shape[-2] / 1e12
            for backend in (None, "FLASH_ATTENTION", "CUDNN_ATTENTION"):
                row = {**self._about("attention", EAGER, case), "q": shape, "chosen_by": backend or "this core"}
                call = functools.partial(_attend, backend, *args, **options)
                try:
                    seconds = gpu_device.seconds_of(call, self._subject.device)
                    longest = gpu_device.kernels(call, self._subject.device)[:1]
                except RuntimeError as error:
                    yield {**row, "without": one_line(error)}
                    continue
                kernel = longest[0][0][:NAME_LENGTH] if longest else "the profiler saw none"
                yield {**row, "kernel": kernel, "attention_ms": seconds * 1e3, "tflops": tflop / seconds}

    def rope(self) -> Iterator[Row]:
        """Steps in compiled blocks with comfy-kitchen's rotary embedding traced, as ours do it, and as its operator."""
        has_kitchen = "comfy_kitchen" in sys.modules
        if not has_kitchen or not self._budget.fits():
            why = "no time left" if has_kitchen else "this core has no comfy-kitchen"
            yield skipped("rope", self._model, "rotary embedding", COMPILED, why)
            return
        case = self._cases[0]
        for names in (tracing._TRACED, ()):
            self.free()
            runs = Runs(self._subject if self._is_quick else shallow(self._model, layers=4))
            lineup = Lineup(self._work / f"rope-{len(names)}", self._limit, self._backend, runs.model)
            with mock.patch.object(tracing, "_TRACED", names), lineup.running(COMPILED) as spent:
                runs.run(lineup.patcher(COMPILED), case, SAMPLED)
                run = runs.run(lineup.patcher(COMPILED), case, 1 + TIMED)
            yield {
                **self._about("rope", COMPILED, case),
                **{"embedding": "traced" if names else "operator", "step_ms": statistics.median(run.steps) * 1e3},
                **{"host_ms": run.host_ms, "device_ms": run.device_ms, **spent},
            }

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


def _attend(backend: str | None, *args: Any, **options: Any) -> Any:
    """Attention with a backend of torch's, by name; None: as core calls it."""
    if backend is None:
        return comfy.ops.scaled_dot_product_attention(*args, **options)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return functional.scaled_dot_product_attention(*args, **options)


def _sum(one: Row, other: Row) -> Row:
    """The first row, with the counts of both; the other's where the first has none."""
    if "compilations" not in one:
        return {**one, **other}
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
