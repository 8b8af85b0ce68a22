"""What the panel shows and does: the engine's state as JSON, and the changes that a page may request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .... import __version__
from ....cache.entry import Entry
from ....cache.graph_cache import GraphCache, shared
from ....core.events import emit, log
from ....core.fallbacks import fallbacks
from ....core.reasons import Reason
from ....report.run_record import records
from ... import doctor
from .. import preferences
from ..hints import find_hints
from . import allocator

DEFAULT_ROWS, MOST_ROWS = 200, 5000


def state(rows: int = DEFAULT_ROWS) -> dict[str, Any]:
    """All that the panel shows, as JSON; the cache's table with so many rows, the most recently used entry first."""
    settings = preferences.state()
    cache = {**shared.statistics(), **cache_table(shared, rows)}
    cache["table"].reverse()
    last, store, limit = records.last(), None, settings["store_mb"]
    if shared.store is not None:
        store = {**shared.store.statistics(), "limit_bytes": None if limit is None else limit << 20}
    return {
        "graph_cache": {**cache, "fallbacks": fallbacks.rows()},
        "graph_store": store,
        "compiling": records.get_compilation(),
        "last_run": last and last.to_json(),
        "settings": settings,
        "machine": [*describe(doctor.parts), *describe(find_hints)],
        "cuda_graphs": allocator.to_json(),
        "version": __version__,
    }


def cache_table(cache: GraphCache, rows: int | None = None) -> dict[str, Any]:
    """{"table", "rows_total"}: a row for each of the last used entries, at most `rows`; how many there are."""
    entries = list(cache.entries())
    last = entries if rows is None else entries[max(len(entries) - rows, 0) :]
    return {"rows_total": len(entries), "table": [_make_row(entry) for entry in last]}


def _make_row(entry: Entry) -> dict[str, Any]:
    """One entry as JSON. last_used: Unix seconds. used_at: the newest first. source: "compiled", "disk", or "captured"
    for calls of a whole model."""
    failure = entry.failure  # read once: another thread may clear it
    sizes, inputs = getattr(entry.key, "sizes", None), getattr(entry.key, "inputs", ())
    return {
        "id": entry.id,
        "name": entry.name,
        "model": entry.uses[-1].model if entry.uses else None,
        "graphs": len(entry.graphs),
        "hits": entry.calls,
        "seconds": entry.seconds,
        "bytes": entry.nbytes,
        "last_used": entry.last_used,
        "failure_reason": None if failure is None else failure.to_json(),
        "used_at": [
            {"latent": list(use.latent), "batch": use.batch, "context": use.context} for use in reversed(entry.uses)
        ],
        "source": "captured" if entry.is_capture else "disk" if entry.was_loaded else "compiled",
        "sizes": "any" if sizes is None else [list(shape) for shape in sizes],
        "dtype": str(inputs[0].dtype).removeprefix("torch.") if inputs else None,
        "device": str(inputs[0].device) if inputs else None,
        "backend": getattr(entry.key, "backend", None),
    }


def describe(ask: Callable[[], Iterable[tuple[str, Reason]]]) -> list[dict[str, Any]]:
    """What is said of the machine, {"name", "code", "fields", "reason"} each; empty where it cannot be asked."""
    try:
        return [{"name": name, **said.to_json()} for name, said in ask()]
    except Exception as error:  # of a driver, or another pack's attention
        log.debug("what this machine accelerates is not known: %s", error)
        return []


def evict(entry_id: str) -> dict[str, int]:
    """Evict one entry of the cache: {"dropped", "bytes"}."""
    for entry in shared.entries():
        freed = entry.nbytes
        if entry.id == entry_id and shared.evict(entry.key):
            emit("cache_changed")
            return {"dropped": 1, "bytes": freed}
    return {"dropped": 0, "bytes": 0}


def clear() -> dict[str, int]:
    """Evict all graphs of this process, not those saved on disk: {"dropped", "bytes"}."""
    freed = shared.statistics()["bytes"]
    dropped = shared.clear()
    fallbacks.clear()
    emit("cache_changed")
    return {"dropped": dropped, "bytes": freed}
