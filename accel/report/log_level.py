"""How much our own logger says; nobody else's is touched."""

from __future__ import annotations

import logging
import os
import threading

from ..core.events import log
from ..core.settings import DEBUG, NORMAL, QUIET
from . import debug_log

VARIABLE = "ACCEL_DEBUG"

_LEVELS = {QUIET: logging.ERROR, NORMAL: logging.NOTSET, DEBUG: logging.DEBUG}
"""NOTSET: as the program around us has it."""

_lock = threading.Lock()
_own_handler: logging.Handler | None = None


def set_verbosity(verbosity: str) -> None:
    """quiet: errors alone. normal: what the program logs of anybody. debug: everything that happened to a graph."""
    with _lock:
        log.setLevel(_LEVELS[verbosity])
        debug_log.listen(verbosity == DEBUG)
        _let_through(verbosity == DEBUG)


def from_environment() -> str | None:
    """What ACCEL_DEBUG asks for, whatever the preferences say; None where it is not set, or 0."""
    return DEBUG if os.environ.get(VARIABLE, "").strip() not in ("", "0") else None


def _let_through(is_debug: bool) -> None:
    """Have a handler of our own for the lines that nobody else's lets through."""
    global _own_handler
    if _own_handler is not None:
        log.removeHandler(_own_handler)
        _own_handler = None
    lowest = min((handler.level for handler in _handlers()), default=logging.CRITICAL + 1)
    if is_debug and lowest > logging.DEBUG:
        _own_handler = logging.StreamHandler()
        _own_handler.addFilter(lambda record: record.levelno < lowest)
        _own_handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(_own_handler)


def _handlers() -> list[logging.Handler]:
    """All that hear our logger."""
    found, logger = [], log
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    return found
