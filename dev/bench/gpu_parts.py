"""The parts of `bench gpu` on one model, row by row: steps with first images, kernels, forty sizes.

Import it after `inprocess.boot` and `pack.load`.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import comfy.model_management
import psutil
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.errors import one_line
from comfy_accel.accel.core.fallbacks import fallbacks, rows_of
from comfy_accel.accel.cuda_graphs.pool import CapturePool
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.step_cache.config import QUALITIES
from kit import made_up_device
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .compilations import RecompileLimit, compiling_into, read_counts, seconds_heard
from .full_size import FULL, Run, Runs, make_small, wait_for
from .gpu_page import CAPTURED, CONTENDERS, CORE, EAGER, list_forty_sizes
from .report import Row
from .session import node
from .session_plan import TOLERANCE, Case

ROUNDS, TIMED = 2, 6
"""Turns that a contender takes with eager at a case, and timed steps of a turn: twelve in all."""

SAMPLED, MADE_TO_SKIP = 3, 30
"""Steps of a first image and of one that is compared with the eager one; of a run in which steps are skipped."""

WARM_UP = 16
"""Steps after which calls are replayed, probes of compiled blocks included."""

MOSTLY = 0.9
"""Share of a contender's model calls that must be replays for it to count as CUDA graphs."""

SHOWN, NAME_LENGTH = 25, 90
"""Kernels of a contender that get a row each, and characters of their names: those of C++ templates have hundreds."""

CACHE_BYTES = 24 << 30
"""Graph cache of one contender, where a part sets no other."""

FORTY_BYTES, FORTY_STEPS = 6 << 30, 6
"""Budget of the forty sizes, and steps of each: enough for a model call to be captured and replayed."""


class Lineup:
    """All contenders on one ModelPatcher.

    `CAPTURED` has a GraphCache of its own. The others of ours share one, as in ComfyUI; they find the kernels that
    inductor wrote to disk for `CAPTURED`.

    folder: where inductor keeps its files. backend: inductor, or eager to count graphs alone. capturer: instead of
    CUDA's.
    """

    def __init__(self, folder: Path, limit: RecompileLimit, backend: str, model: Any, capturer: Any = None):
        self._folder, self._limit, self._backend, self._model = folder, limit, backend, model
        self._made: dict[str, Any] = {}
        self._gave_up: set[str] = set()
        self._network = type(model.model.diffusion_model).__name__
        """Captured calls are listed under this name."""
        self.blocks_cache = GraphCache(max_bytes=CACHE_BYTES)
        self.cache = GraphCache(max_bytes=CACHE_BYTES)
        if capturer is not None:
            self.cache.captures, self.blocks_cache.captures = CapturePool(capturer), CapturePool(capturer)

    def find_patcher(self, name: str) -> Any:
        """The contender's ModelPatcher, which its node, or nodes, give; made once."""
        if name not in self._made:
            self._made[name] = self._apply(name)
        return self._made[name]

    def _apply(self, name: str) -> Any:
        if name in (EAGER, CORE):
            return node(name, self._backend)(self._model)
        contender = CONTENDERS[name]
        settings = CompileSettings(backend=self._backend, measured=contender.quality is not None)
        model = accelerate(self._model, settings, self._find_cache(name), graphs=contender.has_graphs)
        return apply_deep_cache(model, QUALITIES[contender.quality]) if contender.skips else model

    @contextmanager
    def running(self, name: str) -> Iterator[Row]:
        """While the contender runs, inductor keeps its files in the contender's own folder.

        Yields a row that is filled at the end: compilations and graph breaks as torch counts them, whether torch ever
        reached its recompile limit with this contender, block calls that ours ran uncompiled, graphs captured and
        replayed, and the reasons why no more of them.
        """
        self._limit.heard = name in self._gave_up
        before, fell_back, (captures, replays) = read_counts(), fallbacks.counts(), self._count_graphs(name)
        row: Row = {}
        try:
            # In inference mode, as ComfyUI runs every node.
            with compiling_into(self._folder / (name if name in (EAGER, CORE) else "ours")), torch.inference_mode():
                yield row
        finally:
            if self._limit.heard:
                self._gave_up.add(name)
            spent, now = read_counts().since(before), self._count_graphs(name)
            fallen = rows_of(fallbacks.subtract(fell_back))
            row.update(
                compilations=spent.graphs,
                graph_breaks=spent.breaks,
                gave_up=self._limit.heard,
                uncompiled=sum(row["calls"] for row in fallen if row["block"] != self._network),
                captures=now[0] - captures,
                replays=now[1] - replays,
                reasons=list(dict.fromkeys(row["reason"] for row in fallen)),
            )

    def count_kept_bytes(self) -> int:
        """Bytes of tensors that captured calls keep alive, whichever contender runs."""
        if not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "native":
            return 0
        segments = torch.cuda.memory_snapshot(include_traces=False)
        private = sum(segment["active_size"] for segment in segments if segment["segment_pool_id"] != (0, 0))
        pools = filter(None, (self.cache.captures, self.blocks_cache.captures))
        return private + sum(member.buffer_bytes for pool in pools for member in pool.members)

    def count_graph_mb(self, name: str) -> float | None:
        """Memory that captured calls hold, MB; None for a contender that captures none."""
        pool = self._find_cache(name).captures
        return None if pool is None or not CONTENDERS[name].has_graphs else _to_mb(pool.nbytes)

    def _find_cache(self, name: str) -> GraphCache:
        return self.cache if name == CAPTURED else self.blocks_cache

    def _count_graphs(self, name: str) -> tuple[int, int]:
        """Calls captured and replayed so far."""
        if not CONTENDERS[name].has_graphs:
            return 0, 0
        cache = self._find_cache(name)
        calls = sum(entry.calls for entry in cache.entries() if entry.name == f"{self._network} call")
        return cache.statistics()["captures"], calls


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

    A contender that fails is out, with a row that says why; the others go on. fits: whether something that takes so
    many seconds still has time. work: a folder for compiled files. matrix_tflops: as `describe` measured. capturer:
    instead of CUDA's.
    """

    def __init__(
        self,
        model: str,
        options: argparse.Namespace,
        fits: Callable[[float], bool],
        limit: RecompileLimit,
        work: Path,
        matrix_tflops: float,
        capturer: Any = None,
    ):
        self._model, self._fits, self._limit, self._work = model, fits, limit, work
        self._subject = make_small(model) if options.quick else FULL[model]
        self._names = options.contenders
        self._cases = [Case(*size, batch) for batch in options.batches for size in options.sizes]
        self._backend = "eager" if options.quick else "inductor"
        self._flags, self._matrix_tflops, self._capturer = options.flags, matrix_tflops, capturer
        # On the made-up device there are no values to compare.
        self._tolerance = None if made_up_device.is_here() else TOLERANCE[self._subject.dtype]
        self._runs: Runs | None = None
        self._lineup: Lineup | None = None
        self._seconds: dict[str, float] = {}
        """What a contender took at its last case, without what it waited for a compiler."""
        self._begun: set[str] = set()
        """Contenders whose cold start is known."""

    def measure(self, part: str) -> Iterator[Row]:
        """The part's rows; where it fails as a whole, as for memory, a row that says so, and the next one goes on."""
        try:
            if self._runs is None:
                self._runs = Runs(self._subject)
                model, capturer = self._runs.model, self._capturer
                self._lineup = Lineup(self._work, self._limit, self._backend, model, capturer)
            yield from getattr(self, part)()
            return
        except Exception as error:
            failed = one_line(error)
        self.free()  # the error held it
        yield {**self._name_place(part, EAGER, self._cases[0]), "failed": failed}

    def steps(self) -> Iterator[Row]:
        """Seconds a step and the output of every contender at each case, in turns with eager, which comes first.

        And the first image of those that find nothing compiled, cold and once more: rows of the part "cold".
        """
        for case in self._cases:
            expected: Run | None = None
            for name in self._names:
                fits = self._fits(self._seconds.get(name, 0))
                if not fits or (name != EAGER and expected is None):
                    why = "eager has no image of it" if fits else "no time left"
                    yield {**self._name_place("steps", name, case), "why": why}
                    continue
                began = time.monotonic()
                row, run, starts = self._warm_up(case, name, expected)
                yield from starts
                if run is None:
                    yield row
                    continue
                yield self._time(case, name, row)
                # Ours compile at their first case alone; core's node may at any.
                compiling = 0.0 if name == CORE else max(row["first_image_s"] - run.seconds, 0.0)
                self._seconds[name] = time.monotonic() - began - compiling
                expected = expected or run

    def _warm_up(self, case: Case, name: str, expected: Run | None) -> tuple[Row, Run | None, list[Row]]:
        """The contender's row so far, a warm run of it (None where it failed), and rows of a cold start."""
        row = {**self._name_place("steps", name, case), "frames": self._subject.frames, "dtype": self._subject.dtype}
        try:
            with seconds_heard() as heard, self._lineup.running(name) as spent:
                self._forget_peak()
                patcher = self._lineup.find_patcher(name)
                first = self._runs.run(patcher, case, SAMPLED)
                peak_mb = self._read_peak_mb()
            with self._lineup.running(name) as settling:
                self._runs.run(patcher, case, WARM_UP if CONTENDERS[name].has_graphs else SAMPLED)
            with self._lineup.running(name) as again:
                run = self._runs.run(patcher, case, SAMPLED)
                # Eager is compared with a second run of itself, which shows what differs from run to run.
                reference = expected or self._runs.run(patcher, case, SAMPLED)
        except Exception as error:
            torch.cuda.empty_cache()
            return {**row, "failed": one_line(error)}, None, []
        compared = {"answer_diff": _compare(run.answer, reference.answer), "tolerance": self._tolerance}
        row |= {**_sum(_sum(spent, settling), again), **compared, "first_image_s": round(first.seconds, 3)}
        # Of ours, all but the first find what a contender before them has compiled.
        is_alone = name in (EAGER, CORE) or self._begun <= {EAGER, CORE}
        if not is_alone or name in self._begun or case != self._cases[0]:
            return row, run, []
        self._begun.add(name)
        cold, warm = (
            {
                **self._name_place("cold", name, case),
                **{"start": start, "first_image_s": round(seconds, 3), "peak_mb": peak_mb},
                **{**compared, **counted, "ran_as": _say_what_ran(name, counted["replays"], SAMPLED)},
            }
            for start, seconds, counted in (("cold", first.seconds, spent), ("warm", run.seconds, again))
        )
        kinds, stages = heard
        return row, run, [{**cold, "kinds_s": _round(kinds), "stages_s": _round(stages)}, warm]

    def _time(self, case: Case, name: str, row: Row) -> Row:
        """The contender's whole row, once it has taken its turns with eager."""
        own = Turns(row)
        eager = own if name == EAGER else Turns()
        for _ in range(ROUNDS):
            for contender, turns in {EAGER: eager, name: own}.items():
                try:
                    self._take_turn(case, contender, turns)
                except Exception as error:
                    torch.cuda.empty_cache()
                    return {**row, "failed": one_line(error)}
        with torch.inference_mode():
            flops = self._runs.count_flops(case)
        skips = CONTENDERS[name].skips
        # Skipped and full steps differ by design: their mean is what a run pays.
        seconds = (statistics.mean if skips else statistics.median)(own.steps)
        return {
            **own.row,
            "step_ms": round(seconds * 1e3, 3),
            "eager_ms": round(statistics.median(eager.steps) * 1e3, 3),
            "host_ms": _find_least(run.host_ms for run in own.runs),
            "device_ms": _find_least(run.device_ms for run in own.runs),
            "steps_per_s": round(1 / seconds, 3),
            "steps_timed": len(own.steps),
            "replays": own.replays,
            "ran_as": _say_what_ran(name, own.replays, own.expected_calls),
            "tflop_a_step": round(flops / 1e12, 8),
            "share_of_matrix": None if skips else round(flops / seconds / self._matrix_tflops / 1e12, 4),
        }

    def _take_turn(self, case: Case, name: str, turns: Turns) -> None:
        """One timed run."""
        steps = 1 + (MADE_TO_SKIP if CONTENDERS[name].skips else TIMED)
        self._forget_peak()
        with self._lineup.running(name) as spent:
            run = self._runs.run(self._lineup.find_patcher(name), case, steps)
        turns.runs.append(run)
        turns.replays += spent["replays"]
        turns.expected_calls += steps
        # Captured calls stay in memory whoever runs, also eagerly.
        peak_mb, graphs_mb = self._read_peak_mb(self._lineup.count_kept_bytes()), self._lineup.count_graph_mb(name)
        turns.row = {**_sum(turns.row, spent), "peak_mb": peak_mb, "graphs_mb": graphs_mb}
        if CONTENDERS[name].skips:
            told = records.last().skipping
            turns.row |= {"full_steps": told.full_steps, "skipped_steps": told.skipped_steps, "image_s": run.seconds}

    def profile(self) -> Iterator[Row]:
        """The longest kernels of a contender's step, a row each, and one row for the others together.

        Without a GPU the rows are of operators.
        """
        case = self._cases[0]
        for name in (name for name in self._names if not CONTENDERS[name].skips):
            place = self._name_place("profile", name, case)
            if not self._fits(0):
                yield {**place, "why": "no time left"}
                continue
            try:
                with self._lineup.running(name):
                    patcher = self._lineup.find_patcher(name)
                    self._runs.run(patcher, case, WARM_UP if CONTENDERS[name].has_graphs else SAMPLED)
                    found = self._list_kernels(lambda p=patcher: self._runs.run(p, case, SAMPLED))
            except Exception as error:
                yield {**place, "failed": one_line(error)}
                continue
            total = sum(microseconds for _, _, microseconds in found)
            if not total:
                yield {**place, "why": "the profiler saw no kernel"}
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
        cache = self._lineup.cache
        cache.set_budget(max_bytes=FORTY_BYTES)
        evictions = cache.statistics()["evictions"]
        try:
            for number, case in enumerate(list_forty_sizes(), 1):
                row = {**self._name_place("sizes40", CAPTURED, case), "number": number}
                if not self._fits(0):
                    yield {**row, "why": "no time left"}
                    return
                try:
                    with self._lineup.running(CAPTURED) as spent:
                        run = self._runs.run(self._lineup.find_patcher(CAPTURED), case, FORTY_STEPS)
                except Exception as error:
                    yield {**row, "failed": one_line(error)}
                    return
                known, is_cuda = cache.statistics(), self._runs.device.type == "cuda"
                held = torch.cuda.memory_reserved() if is_cuda else psutil.Process().memory_info().rss
                yield {
                    **row,
                    "image_s": round(run.seconds, 3),
                    "cache_mb": _to_mb(known["bytes"]),
                    "budget_mb": FORTY_BYTES >> 20,
                    "graphs_mb": self._lineup.count_graph_mb(CAPTURED),
                    "held_mb": round(held / 2**20),
                    "evictions": known["evictions"] - evictions,
                    # Replays begin with the fifth call of a kind, and a run of a known size has nothing else.
                    "ran_as": _say_what_ran(CAPTURED, spent["replays"], 1),
                    **spent,
                }
        finally:
            cache.set_budget(max_bytes=CACHE_BYTES)

    def free(self) -> None:
        """Let go of the model and of everything that was compiled in this process."""
        self._runs = self._lineup = None
        torch._dynamo.reset()
        comfy.model_management.unload_all_models()
        gc.collect()
        torch.cuda.empty_cache()

    def _name_place(self, part: str, contender: str, case: Case) -> Row:
        place = {"part": part, "model": self._model, "flags": self._flags, "size": case.size, "batch": case.batch}
        return {**place, "contender": contender}

    def _forget_peak(self) -> None:
        if self._runs.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _read_peak_mb(self, kept: int = 0) -> float | None:
        """Most that tensors held since `_forget_peak`, MB; None without a GPU. kept: bytes to leave out."""
        is_cuda = self._runs.device.type == "cuda"
        return round((torch.cuda.max_memory_allocated() - kept) / 2**20) if is_cuda else None

    def _list_kernels(self, call: Callable[[], Any]) -> list[tuple[str, int, float]]:
        """(name, calls, microseconds) of each kernel in a call, the longest first; of operators without a GPU."""
        is_cuda = self._runs.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU], acc_events=True) as seen:
            call()
            wait_for(self._runs.device)
        found = [
            (event.key, event.count, event.self_device_time_total if is_cuda else event.self_cpu_time_total)
            for event in seen.key_averages()
            if not is_cuda or event.device_type == DeviceType.CUDA
        ]
        return sorted(found, key=lambda kernel: -kernel[2])


def describe(device: torch.device) -> Row:
    """name, driver, torch, and the rate of square matrix products: tflops, dtype, side.

    cuda: None without a GPU, and on the made-up device.
    """
    is_gpu = device.type == "cuda"
    dtype, side = (torch.float16, 8192) if is_gpu else (torch.float32, 512)
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    for count in (2, 10):  # two to warm up
        wait_for(device)
        started = time.perf_counter()
        for _ in range(count):
            one @ other
        wait_for(device)
    seconds = (time.perf_counter() - started) / count
    return {
        "name": torch.cuda.get_device_name(device) if is_gpu else "CPU",
        "driver": _ask_driver() if is_gpu else None,
        "cuda": torch.version.cuda if is_gpu and not made_up_device.is_here() else None,
        "torch": torch.__version__,
        "matrix_tflops": round(2 * side**3 / seconds / 1e12, 4),
        "matrix_dtype": str(dtype).removeprefix("torch."),
        "matrix_side": side,
    }


def _ask_driver() -> str | None:
    try:
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(ask, capture_output=True, text=True, timeout=30).stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return None


def _compare(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a fraction of the largest expected value; infinite where a value is not finite."""
    value = ((actual - expected).abs().max() / expected.abs().max()).item()
    return value if math.isfinite(value) else math.inf


def _say_what_ran(name: str, replays: int, calls: int) -> str:
    """What a contender with graphs really ran as, by the replays among its model calls; the label of any other."""
    if not CONTENDERS[name].has_graphs:
        return CONTENDERS[name].label
    if not replays:
        return "compiled blocks"
    return "CUDA graphs" if replays >= MOSTLY * calls else "CUDA graphs in part"


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


def _round(seconds: Counter[str]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in seconds.most_common()}


def _find_least(milliseconds: Iterable[float | None]) -> float | None:
    return min((round(value, 3) for value in milliseconds if value is not None), default=None)


def _to_mb(number: int) -> float:
    return round(number / 2**20, 1)
