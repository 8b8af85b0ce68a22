"""Records of the last sampling run, assembled from events, and the time that each saved.

They reference no tensor and no model.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..cache.entry import Lease
from ..compile.benchmark import Benchmark
from ..core.events import emit, subscribe
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason
from ..step_cache.run import FULL, HALF, SKIPPED
from .headline import headline, nodes_of
from .run import Run, Saving, together

_MOST_REASONS = 50
"""Kept of one run: for blocks that ran eagerly, and as many for those that nobody tried to compile."""

QUALITY_FACTS = ("target_db", "estimated_db", "probes", "skipped_work", "plan")
"""Of a DeepCache run with a quality target, as `DeepCacheRun.quality_facts` has them."""

_DISTURBING = frozenset(
    ("compile_end", "compile_failed", "graph_loaded", "probe_end", "dry_run_end", "capture_end", "capture_failed")
)


@dataclass
class _Open:
    """A run in progress. owner: wrappers of one owner describe the same run."""

    owner: Hashable
    run: Run
    began: float
    fallbacks_before: dict[tuple[str, Reason], int]
    depth: int = 1
    disturbed: list[float] = field(default_factory=list)


@dataclass
class _Compiling:
    name: str
    began: float
    number: int | None = None
    of: int | None = None
    node: str | None = None
    stage: str | None = None


class RunRecords:
    """The last run, DeepCache's last one, and what is being compiled now.

    All samplings of one prompt are one run, as long as no other prompt is sampled between them.

    A run belongs to the thread that emits its `run_start`, and so does every event of that thread up to its `run_end`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Run | None = None
        self._by_node: dict[str, Run] = {}  # of the last one, what each of its nodes took part in
        self._open: dict[int, list[_Open]] = {}
        self._compiling: dict[int, _Compiling] = {}
        self._deep_cache: dict[str, Any] | None = None
        self._compile_seconds: Counter[str] = Counter()

    def last(self) -> Run | None:
        """The run that ended last; None before the first."""
        with self._lock:
            return self._last

    def deep_cache(self) -> dict[str, Any] | None:
        """The last DeepCache run: full_steps, skipped_steps, steps, why_full, saved_seconds, saved_how.

        None before the first.
        """
        with self._lock:
            return None if self._deep_cache is None else dict(self._deep_cache)

    def compiling(self) -> dict[str, Any] | None:
        """The compilation in progress, the latest where threads compile at once; None where there is none.

        {"name", "number", "of", "node", "stage", "seconds"}; the stage is one of `generated_code.STAGES`.
        """
        with self._lock:
            now = max(self._compiling.values(), key=lambda one: one.began, default=None)
        if now is None:
            return None
        told = {name: value for name, value in vars(now).items() if name != "began"}
        return {**told, "seconds": time.perf_counter() - now.began}

    def clear(self) -> None:
        with self._lock:
            self._last = None
            self._by_node.clear()
            self._open.clear()
            self._compiling.clear()
            self._deep_cache = None
            self._compile_seconds.clear()

    def hear(self, name: str, data: dict[str, Any]) -> None:
        """A listener for `events.subscribe`."""
        thread = threading.get_ident()
        act = getattr(self, f"_on_{name}", None)
        over = None
        with self._lock:
            opened = self._open.get(thread)
            if opened and name in _DISTURBING:
                opened[-1].disturbed.append(time.perf_counter())
            if act is not None:
                over = act(thread, opened[-1] if opened else None, data)
        if over is not None:
            emit("run_over", run=over)  # outside of the lock: listeners read these records

    def _on_run_start(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        facts = {name: value for name, value in data.items() if name != "owner"}
        if now is not None and now.owner == data["owner"]:
            now.depth += 1
            vars(now.run).update(facts)
            return
        opened = _Open(data["owner"], Run(**facts), time.perf_counter(), fallbacks.counts())
        self._open.setdefault(thread, []).append(opened)

    def _on_run_end(self, thread: int, now: _Open | None, data: dict[str, Any]) -> Run | None:
        if now is None or now.owner != data["owner"]:
            return None
        now.depth -= 1
        now.run.failed = now.run.failed or data["failed"]
        now.run.loaded_share = data.get("loaded_share")
        if now.depth:
            return None
        self._open[thread].pop()
        if not self._open[thread]:
            del self._open[thread]
        run = now.run
        run.seconds, run.finished = time.perf_counter() - now.began, time.time()
        run.fallbacks = dict(list(fallbacks.since(now.fallbacks_before).items())[:_MOST_REASONS])
        self._compile_seconds[run.model] += run.compile_seconds
        run.compiled_seconds = {run.model: self._compile_seconds[run.model]}
        self._keep(run)
        return run

    def _keep(self, run: Run) -> None:
        is_next = run.prompt is not None and self._last is not None and self._last.prompt == run.prompt
        before = self._by_node if is_next else {}
        now = {node: before[node].with_next(run) if node in before else run for node in nodes_of(run)}
        self._by_node = {**before, **now}
        run.lines = {node: line for node, whole in now.items() if (line := headline(whole, node))}
        whole = self._last = self._last.with_next(run) if is_next else run
        if is_next and whole.steps_taken:
            steps = whole.steps_taken
            together = _skipping(steps.count(FULL), steps.count(SKIPPED), steps, whole.why_full, whole.by_skipping)
            self._deep_cache = {**(self._deep_cache or {}), **together}  # a quality is that of the last sampler

    def _on_run_calls(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        if now is None:
            return
        lease: Lease = data["lease"]
        run = now.run
        run.compiled_calls, run.eager_calls = lease.calls, data["eager_calls"]
        run.contexts, run.evicted = data["contexts"], data["evicted"]
        run.model_calls, run.replays = data["model_calls"], lease.replays
        run.by_compiling = by_compiling(lease.calls, lease.measured, (run.compiling or {}).get("check_gain", True))
        if run.is_traced and lease.calls:
            run.by_compiling = Saving(None, Reason("compiling_traced"))

    def _on_deep_cache_run(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        steps, began = data.get("steps", ""), data.get("began", ())
        if began:
            saved = by_skipping(steps, began, now.disturbed if now is not None else ())
        else:
            saved = Saving(None, Reason("skipping_untimed"))
        why_full = data.get("why_full")
        quality = {name: data.get(name) for name in QUALITY_FACTS}
        self._deep_cache = {
            **_skipping(data["full_steps"], data["skipped_steps"], steps, why_full, saved),
            **quality,
        }
        if now is not None:
            now.run.steps_taken, now.run.by_skipping, now.run.why_full = steps, saved, why_full
            now.run.target_db, now.run.estimated_db = quality["target_db"], quality["estimated_db"]
            now.run.skipped_work, now.run.plan = quality["skipped_work"], quality["plan"] or []

    def _on_sampling(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        if now is not None and not now.run.prepare_seconds:
            run = now.run
            busy = run.compile_seconds + run.load_seconds + run.capture_seconds
            run.prepare_seconds = max(0.0, time.perf_counter() - now.began - busy)

    def _on_warmed_up(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        if self._last is not None:
            self._last.prompt = None  # the image that follows in this prompt is a run of its own

    def _on_survey(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        if now is not None:
            now.run.blocks, now.run.kinds = data["blocks"], data["kinds"]
            counts = Counter(reason for _, reason in data["left_eager"])
            now.run.left_eager = dict(counts.most_common(_MOST_REASONS))

    def _on_graph_loaded(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        if now is not None:
            now.run.loaded += 1
            now.run.load_seconds += data["seconds"]

    def _on_compile_start(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        self._compiling[thread] = _Compiling(data["name"], time.perf_counter())

    def _on_compiling(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        known = self._compiling.get(thread)
        if known is not None:
            vars(known).update({name: data[name] for name in ("number", "of", "node", "stage")})

    def _on_compile_end(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        self._compiling.pop(thread, None)
        if now is not None:
            now.run.compilations += 1
            now.run.compile_seconds += data["seconds"]

    def _on_capture_end(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        if now is not None:
            now.run.captures += 1
            now.run.capture_seconds += data["seconds"]

    def _on_compile_failed(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        self._compiling.pop(thread, None)


def _skipping(full: int, skipped: int, steps: str, why_full: str | None, saved: Saving) -> dict[str, Any]:
    """What `RunRecords.deep_cache` tells."""
    counts = {"full_steps": full, "skipped_steps": skipped}
    return {**counts, "steps": steps, "why_full": why_full, **together([saved])}


def by_compiling(calls: int, measured: Mapping[Benchmark, int], is_measured: bool = True) -> Saving:
    """The time saved by compiled calls of blocks, against running the same blocks eagerly.

    calls: of compiled graphs. measured: those of them at sizes at which the graph was compared with its block.
    is_measured: whether graphs are compared at all.
    """
    known = [(benchmark.gain, count) for benchmark, count in measured.items() if benchmark.gain is not None]
    if not calls:
        return Saving(None, Reason("compiling_unused"))
    if not known:
        return Saving(None, Reason("compiling_unsure") if is_measured else Reason("compiling_unmeasured"))
    covered = sum(count for _, count in known)
    is_all = covered == calls
    how = Reason("compiling_saved") if is_all else Reason("compiling_saved_in_part", covered=covered, calls=calls)
    return Saving(sum(gain * count for gain, count in known), how)


def by_skipping(steps: str, began: Sequence[float], disturbed: Sequence[float] = ()) -> Saving:
    """The time saved by steps that were skipped, in whole or in half, against full ones.

    steps: FULL, HALF or SKIPPED for each step, in order. began: the start of each, in seconds of one clock. The first
        step and the last, whose end is unknown, are left out.
    disturbed: times at which something was compiled, loaded or compared; steps that contain one are left out.
    """
    if SKIPPED not in steps and HALF not in steps:
        return Saving(None, Reason("skipping_unused"))
    taken: dict[str, list[float]] = {FULL: [], SKIPPED: [], HALF: []}
    for index in range(1, min(len(steps), len(began)) - 1):
        start, end = began[index], began[index + 1]
        if not any(start <= moment <= end for moment in disturbed):
            taken[steps[index]].append(end - start)
    medians = {kind: statistics.median(times) for kind, times in taken.items() if times}
    if FULL not in medians or len(medians) == 1 or (SKIPPED in steps and SKIPPED not in medians):
        return Saving(None, Reason("skipping_unsure"))
    full = medians.pop(FULL)
    counts = {kind: steps.count(kind) for kind in medians}
    if HALF in medians:
        how = Reason("skipping_saved_halves", full=f"{full:.3g}", steps=sum(counts.values()), halves=counts[HALF])
    else:
        how = Reason("skipping_saved", steps=counts[SKIPPED], skipped=f"{medians[SKIPPED]:.3g}", full=f"{full:.3g}")
    return Saving(sum(counts[kind] * (full - median) for kind, median in medians.items()), how)


records = RunRecords()
"""Of this process. Subscribed from the start: events are few, and none is about a single call of a block."""

subscribe(records.hear)
