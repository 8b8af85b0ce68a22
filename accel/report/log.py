"""How much our logger says, and every event of the engine as a debug line. Nobody else's logger is touched."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from ..cache.entry import id_of
from ..core.events import log, subscribe
from ..core.settings import DEBUG, NORMAL, QUIET

VARIABLE = "ACCEL_DEBUG"

_LEVELS = {QUIET: logging.ERROR, NORMAL: logging.NOTSET, DEBUG: logging.DEBUG}
"""NOTSET: the level of the program around us."""

_has_begun = False  # whether compiling was announced in this run
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


def add_name(record: logging.LogRecord) -> bool:
    """A filter of our logger, where a program's handlers do not show whose a line is: it begins with "Accel: "."""
    record.msg = f"Accel: {record.msg}"
    return True


def read_environment() -> str | None:
    """The verbosity that ACCEL_DEBUG requests, whatever the settings are; None where it is not set, or off."""
    return DEBUG if os.environ.get(VARIABLE, "").strip().lower() not in ("", "0", "off", "false", "no") else None


def obey_environment() -> None:
    """Debug where ACCEL_DEBUG requests it; on standard error in a program that has no log handlers of its own."""
    if read_environment() is None:
        return
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
    set_verbosity(DEBUG)


def _log_compiling(name: str, data: dict[str, Any]) -> None:
    """What a person at a console sees of minutes of compiling: a line when it begins in a run, and one a kind."""
    global _has_begun
    if name == "run_start":
        _has_begun = False
    elif name in ("compile_stage", "compile_end") and not _has_begun:  # not where a compiler is missing
        _has_begun = True
        log.info("Compiling this model's blocks, once for every size. This image takes longer; later ones do not.")
    if name == "compile_end":
        said = "Traced %s in %.1f s; its code is made beside." if data.get("pending") else "Compiled %s in %.1f s."
        log.info(said, data["name"], data["seconds"])


def _log_event(name: str, data: dict[str, Any]) -> None:
    """An event, with its graph's key by its id; the key itself once, where a graph is made or loaded."""
    key = data.get("key")
    values = {"key": id_of(key)} if key is not None else {}
    values |= {field: value for field, value in data.items() if field not in ("lease", "key")}
    log.debug("%s: %s", name, ", ".join(f"{field} {value}" for field, value in values.items()))
    if name in ("compile_start", "graph_loaded"):
        log.debug("key %s: %r", id_of(key), key)


subscribe(_log_compiling)
