"""The graph cache as rows of JSON, for pages."""

from __future__ import annotations

from typing import Any

from ..cache.entry import Entry
from ..cache.graph_cache import GraphCache


def cache_table(cache: GraphCache, rows: int | None = None) -> dict[str, Any]:
    """{"table", "rows_total"}: a row per entry, the most recently used last.

    rows: at most so many of the latest; None gives all. "rows_total" is how many there are.
    """
    entries = list(cache.entries())
    last = entries if rows is None else entries[max(len(entries) - rows, 0) :]
    return {"rows_total": len(entries), "table": [_row(entry) for entry in last]}


def _row(entry: Entry) -> dict[str, Any]:
    """One entry as JSON, with the readable fields of its key. last_used: Unix seconds. used_at: the newest first.

    source: of its graphs: "compiled", "disk", or "captured" for calls of a whole model.
    """
    failure = entry.failure  # read once: another thread may clear it
    sizes, inputs = getattr(entry.key, "sizes", None), getattr(entry.key, "inputs", ())
    return {
        "id": entry.id,
        "name": entry.name,
        "model": entry.uses[-1].model if entry.uses else None,
        "graphs": len(entry.graphs),
        "hits": entry.calls,
        "seconds": entry.seconds,
        "probe_seconds": entry.probe_seconds,
        "bytes": entry.nbytes,
        "last_used": entry.last_used,
        "failure": None if failure is None else str(failure),
        "failure_reason": None if failure is None else failure.as_json(),
        "used_at": [
            {"latent": list(use.latent), "batch": use.batch, "context": use.context} for use in reversed(entry.uses)
        ],
        "source": "captured" if entry.is_capture else "disk" if entry.was_loaded else "compiled",
        "sizes": "any" if sizes is None else [list(shape) for shape in sizes],
        "dtype": str(inputs[0].dtype).removeprefix("torch.") if inputs else None,
        "device": str(inputs[0].device) if inputs else None,
        "backend": getattr(entry.key, "backend", None),
    }
