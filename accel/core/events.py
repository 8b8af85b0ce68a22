"""Events of the engine, for the log, the progress bar, the web panel and benchmarks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger("accel")

Listener = Callable[[str, dict[str, Any]], object]

_lock = threading.Lock()
_listeners: tuple[Listener, ...] = ()


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener(name, data)` for every event until the returned function is called. Listeners run on the emitting
    thread, often inside a sampling step, so they must be quick."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)

    def unsubscribe() -> None:
        global _listeners
        with _lock:
            _listeners = tuple(known for known in _listeners if known is not listener)

    return unsubscribe


def emit(name: str, /, **data: Any) -> None:
    """Call every listener; one that raises is logged and does not stop the others."""
    for listener in _listeners:
        try:
            listener(name, data)
        except Exception:
            log.exception("a listener failed on the event %s", name)
