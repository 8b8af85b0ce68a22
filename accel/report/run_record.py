"""Records of the last sampling run, assembled from events. They reference no tensor and no model."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.events import emit, subscribe
from ..core.fallbacks import fallbacks
from ..core.reasons import Reason
from .account import compute_skip_saving
from .facts import line_of
from .run import Run

_MOST_REASONS = 50  # reasons kept per run
_COUNTED = {
    "compile_end": ("compile_seconds", "compilations"),
    "compile_failed": ("compile_seconds", None),
    "graph_loaded": ("load_seconds", "loaded"),
    "capture_end": ("capture_seconds", "captures"),
    "capture_failed": ("capture_seconds", None),
    "survey": ("survey_seconds", None),
}
"""Event → the facts of a `Run` that hold its seconds and its count."""

_DISTURBING = frozenset((*_COUNTED, "probe_end", "dry_run_end"))


@dataclass
class _Open:
    """A run in progress. owner: wrappers of one owner describe the same run."""

    owner: Hashable
    run: Run
    fallbacks_before: dict[tuple[str, Reason], int] = field(default_factory=fallbacks.counts)
    began: float = field(default_factory=time.perf_counter)
    depth: int = 1
    disturbed: list[float] = field(default_factory=list)
    left: Counter[tuple[str, Reason]] = field(default_factory=Counter)
    """Blocks that nobody tried to compile, by class and reason."""

    def hear(self, name: str, data: dict[str, Any]) -> None:
        run = self.run
        if name in _DISTURBING:
            self.disturbed.append(time.perf_counter())
        if name in _COUNTED:
            seconds, number = _COUNTED[name]
            vars(run)[seconds] += data["seconds"]
            if number is not None:
                vars(run)[number] += 1
        if name == "compile_end":
            run.is_beside |= data.get("pending", False)
        elif name == "run_calls":
            run.totals = data["totals"]
        elif name == "graphs_would_give":
            run.graphs_would_give = data["times"]
        elif name == "survey":
            run.blocks, run.kinds = data["blocks"], data["kinds"]
            self.left |= Counter(data["left"])
        elif name == "sampling" and not run.prepare_seconds:
            run.prepare_seconds = max(0.0, time.perf_counter() - self.began - sum(run.paid.values()))

    def end(self, failed: bool, loaded_share: float | None, steps_done: int | None) -> bool:
        """Note that one of its wrappers has ended; True if the run has too. steps_done: of one that was interrupted."""
        self.depth -= 1
        run = self.run
        run.failed, run.loaded_share = run.failed or failed, loaded_share
        run.steps_done = steps_done if run.failed else run.steps
        run.seconds, run.finished = time.perf_counter() - self.began, time.time()
        if self.depth:
            return False
        # A block that nobody tried to compile is called as often as another; its survey has noted the first call.
        calls = run.totals.compiled_calls + run.totals.eager_calls
        each = max(round(calls / run.blocks) if run.blocks else run.steps or 1, 1)
        run.totals = replace(run.totals, eager_calls=run.totals.eager_calls + self.left.total() * each)
        left = Counter({why: blocks * (each - 1) for why, blocks in self.left.items()})
        run.fallbacks = dict((Counter(fallbacks.subtract(self.fallbacks_before)) + left).most_common(_MOST_REASONS))
        return True


class RunRecords:
    """The last run, with all samplings of its prompt, and what is being compiled now. A run belongs to the thread that
    emits its `run_start`, and so does every event of that thread up to its `run_end`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all runs."""
        with self._lock:
            self._last: Run | None = None
            self._by_node: dict[str, Run] = {}  # of the last one, what each of its nodes took part in
            self._open: dict[int, list[_Open]] = {}
            self._compiling: dict[int, tuple[float, dict[str, Any]]] = {}  # by thread: since when, and what
            self._owed: dict[str, float] = defaultdict(float)

    def last(self) -> Run | None:
        """The run that ended last; None before the first."""
        with self._lock:
            return self._last

    def get_compilation(self) -> dict[str, Any] | None:
        """The latest compilation in progress: {"name", "number", "of", "node", "stage", "seconds"}, with a stage of
        `generated_code.STAGES`, or beside the image with the seconds "left"; None where there is none."""
        with self._lock:
            began, what = max(self._compiling.values(), key=lambda one: one[0], default=(0.0, None))
        return what and {**what, "seconds": time.perf_counter() - began}

    def hear(self, name: str, data: dict[str, Any]) -> None:
        """A listener for `events.subscribe`."""
        thread = threading.get_ident()
        act = getattr(self, f"_on_{name}", None)
        with self._lock:
            opened = self._open.get(thread)
            now = opened[-1] if opened else None
            if now is not None:
                now.hear(name, data)
            over = None if act is None else act(thread, now, data)
        if over is not None:
            emit("run_over", run=over)  # outside of the lock: listeners read these records

    def _on_run_start(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        facts = {name: value for name, value in data.items() if name != "owner"}
        if now is not None and now.owner == data["owner"]:
            now.depth += 1
            vars(now.run).update(facts)
        else:
            self._open.setdefault(thread, []).append(_Open(data["owner"], Run(**facts)))

    def _on_run_end(self, thread: int, now: _Open | None, data: dict[str, Any]) -> Run | None:
        if now is None or now.owner != data["owner"]:
            return None
        if not now.end(data["failed"], data.get("loaded_share"), data.get("steps_done")):
            return None
        self._open[thread].pop()
        self._compiling.pop(thread, None)  # what is made beside goes on, and is told of by the next run
        if not self._open[thread]:
            del self._open[thread]
        run = now.run
        account = run.account((run.compiling or {}).get("node"))
        self._owed[run.model] += account.paid - (account.saved or 0.0)
        run.owed = {run.model: self._owed[run.model]}
        is_next = run.prompt is not None and self._last is not None and self._last.prompt == run.prompt
        before = self._by_node if is_next else {}
        wholes = {node: before[node].merge(run) if node in before else run for node in run.nodes}
        self._by_node = {**before, **wholes}
        run.lines = {node: line for node, whole in wholes.items() if (line := line_of(whole, node))}
        self._last = self._last.merge(run) if is_next else run
        return run

    def _on_deep_cache_run(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        if now is not None:
            saved = compute_skip_saving(data["skipping"].steps_taken, data["began"], now.disturbed)
            now.run.skipping = replace(data["skipping"], by_skipping=saved)

    def _on_warmed_up(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        if self._last is not None:
            self._last.prompt = None  # the image that follows in this prompt is a run of its own

    def _on_compiling(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        began, _ = self._compiling.get(thread, (time.perf_counter(), None))
        self._compiling[thread] = began, data

    def _on_compile_end(self, thread: int, now: _Open | None, data: dict[str, Any]) -> None:
        self._compiling.pop(thread, None)

    _on_compile_failed = _on_code_ready = _on_compile_end


records = RunRecords()
"""The records of this process. Subscribed at import: events are few, and none concerns a single call of a block."""

subscribe(records.hear)
