"""The graph cache's entries as numbers and rows: for the report, the panel and the bench."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from .entry import Entry


def totals(entries: Sequence[Entry]) -> dict[str, Any]:
    """Sums over the entries. Seconds, bytes, counts."""
    return {
        "entries": len(entries),
        "graphs": sum(len(entry.graphs) for entry in entries),
        "hits": sum(entry.calls for entry in entries),
        "probe_seconds": sum(entry.probe_seconds for entry in entries),
        "bytes": sum(entry.nbytes for entry in entries),
    }


def table(entries: Sequence[Entry], rows: int | None, text: str) -> dict[str, Any]:
    """{"table", "rows_total"}: the last `rows` of the entries with this text in their name or model, ignoring case."""
    text = text.casefold()
    chosen = [entry for entry in entries if not text or text in _names(entry)]
    last = chosen if rows is None else chosen[max(len(chosen) - rows, 0) :]
    return {"rows_total": len(chosen), "table": [row(entry) for entry in last]}


def row(entry: Entry) -> dict[str, Any]:
    """One entry as JSON. last_used: Unix seconds. used_at: of the latest runs, the newest first.

    source: of its graphs: "compiled", "disk", or "captured" for calls of a whole model.
    """
    failure = entry.failure  # read once: another thread may clear it
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
        **_of_key(entry.key),
    }


def _of_key(key: Hashable) -> dict[str, Any]:
    """The readable fields of a `GraphKey` or a `CaptureKey`."""
    sizes = getattr(key, "sizes", None)
    inputs = getattr(key, "inputs", ())
    return {
        "sizes": "any" if sizes is None else [list(shape) for shape in sizes],
        "dtype": str(inputs[0].dtype).removeprefix("torch.") if inputs else None,
        "device": str(inputs[0].device) if inputs else None,
        "backend": getattr(key, "backend", None),
    }


def _names(entry: Entry) -> str:
    return " ".join((entry.name, *(use.model for use in entry.uses))).casefold()
