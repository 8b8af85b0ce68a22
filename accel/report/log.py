"""How much our logger says, and every event of the engine as a debug line. Nobody else's logger is touched."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from ..cache.entry import id_of
from ..cache.graph_cache import shared
from ..core.events import log, subscribe
from ..core.settings import DEBUG, NORMAL, QUIET

VARIABLE = "ACCEL_DEBUG"

_LEVELS = {QUIET: logging.ERROR, NORMAL: logging.NOTSET, DEBUG: logging.DEBUG}
"""NOTSET: the level of the program around us."""

_KEYED = {"graph_hit": "hit", "graph_loaded": "loaded", "compile_start": "miss, compiling", "compile_end": "compiled"}

_has_begun = False
"""Whether compiling was announced in this run."""

_lock = threading.Lock()
_unsubscribe: Callable[[], None] | None = None


def set_verbosity(verbosity: str) -> None:
    """quiet: only errors. normal: whatever the program logs. debug: also every event, with keys and reasons."""
    global _unsubscribe
    with _lock:
        log.setLevel(_LEVELS[verbosity])
        if verbosity == DEBUG and _unsubscribe is None:
            _unsubscribe = subscribe(_log_event)
        elif verbosity != DEBUG and _unsubscribe is not None:
            _unsubscribe()
            _unsubscribe = None


def from_environment() -> str | None:
    """The verbosity that ACCEL_DEBUG requests, whatever the settings are; None where it is not set, or off."""
    return DEBUG if os.environ.get(VARIABLE, "").strip().lower() not in ("", "0", "off", "false", "no") else None


def obey_environment() -> None:
    """Debug where ACCEL_DEBUG requests it; on standard error in a program that has no log handlers of its own."""
    if from_environment() is None:
        return
    with _lock:
        if not any(isinstance(handler, _OwnHandler) for handler in log.handlers):
            log.addHandler(_OwnHandler())
    set_verbosity(DEBUG)


class _OwnHandler(logging.StreamHandler):
    """Silent once the program logs by itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def _log_compiling(name: str, data: dict[str, Any]) -> None:
    """What a person at a console sees of minutes of compiling: a line when it begins in a run, and one a kind."""
    global _has_begun
    if name == "run_start":
        _has_begun = False
    elif name in ("compile_stage", "compile_end") and not _has_begun:  # not where a compiler is missing
        _has_begun = True
        log.info("Compiling this model's blocks, once for every size. This image takes longer; later ones do not.")
    if name == "compile_end":
        log.info("Compiled %s in %.1f s.", data["name"], data["seconds"])


def _log_event(name: str, data: dict[str, Any]) -> None:
    key = data.get("key")
    seconds = f" in {data['seconds']:.3f} s" if isinstance(data.get("seconds"), float) else ""
    if name == "compile_failed":
        log.debug("%s %s: not compiled%s: %s", data["name"], id_of(key), seconds, data["reason"])
    elif name in _KEYED:
        why = f": {why_missed(key, shared.keys(), data['graphs'])}" if name == "compile_start" else ""
        log.debug("%s %s: %s%s%s", data["name"], id_of(key), _KEYED[name], seconds, why)
        if name != "graph_hit":
            log.debug("key %s: %r", id_of(key), key)
    else:
        log.debug("%s: %s", name, ", ".join(f"{field} {value}" for field, value in data.items() if field != "lease"))


def why_missed(key: Hashable, others: Iterable[Hashable], graphs: int) -> str:
    """How a `GraphKey` differs from the nearest one in the cache, in words. graphs: how many there are under it."""
    if not is_dataclass(key):
        return "nothing is known under this key"
    alike = [other for other in others if type(other) is type(key) and other != key and _name(other) == _name(key)]
    if not alike:
        return "its graphs do not fit this call" if graphs else "it is the first of its kind"
    differences = min((_differences(key, other) for other in alike), key=len)
    return f"the nearest of {len(alike)} others of this name differs in {'; '.join(differences)}"


def _name(key: Any) -> str:
    return getattr(getattr(key, "kind", None), "name", "")


def _differences(key: Any, other: Any) -> list[str]:
    """The fields in which two keys differ, with the first two values of a pair of equally long tuples that differ."""
    found = []
    for field in fields(key):
        one, two = getattr(key, field.name), getattr(other, field.name)
        if one == two:
            continue
        if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two):
            place = next(index for index, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1])
            values = f"{_short(two[place])} there, {_short(one[place])} here"
            found.append(f"{field.name}[{place}] ({values})")
        else:
            found.append(field.name)
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


subscribe(_log_compiling)
