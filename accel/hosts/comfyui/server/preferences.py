"""The cache's budget, the store's size and the log's verbosity: what the page's settings say, kept and put into force.

The server is the truth: ComfyUI's own settings file is not read, since any page or request may change it.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import asdict, replace
from typing import Any

from ....cache.graph_cache import shared
from ....core import settings
from ....core.settings import Settings
from ....report import log_level
from ....store import location
from ..home import running_home

log = logging.getLogger("accel")

NAMES = ("max_mb", "max_entries", "store_mb", "verbosity")

FROM_SETTINGS = -1
"""In a node's cache_mb: as many MB as the settings say."""

_lock = threading.Lock()
_current: Settings | None = None
_node_mb = FROM_SETTINGS
_for_recordings = 0


def make_room_for_recordings(nbytes: int) -> None:
    """Calls are recorded from now on: the budget is larger by so many bytes, as long as nobody has set one.

    A recording takes what one call of a whole model does, where compiled blocks take a few MB.
    """
    global _for_recordings
    with _lock:
        if nbytes > _for_recordings:
            _for_recordings = nbytes
            _set_budget(_current or Settings())


def set_node_budget(cache_mb: int) -> None:
    """A node asks for so many MB, or for what the settings say; it decides until another one or the settings do.

    Touches no disk: where the settings have not been read yet, they are when the first model runs.
    """
    global _node_mb
    with _lock:
        _node_mb = cache_mb
        _set_budget(_current or Settings())


def current() -> Settings:
    """Those in force; the first call reads them and puts them into force. Damaged ones count as none."""
    global _current
    with _lock:
        if _current is None:
            try:
                _current = settings.read(running_home())
            except OSError as error:
                log.warning("The settings of the graph cache are not read: %s", error)
                _current = Settings()
            _set_budget(_current)
            if _verbosity(_current) != settings.NORMAL:  # whoever else set our logger's level is left alone
                log_level.set_verbosity(_verbosity(_current))
        return _current


def change(wanted: dict[str, Any]) -> None:
    """Put these of `NAMES` into force and keep them.

    Raises:
        ValueError: one is unknown or out of range; the message says what would be right, and nothing is changed.
        OSError: they cannot be kept; they are in force until ComfyUI ends.
    """
    global _current, _node_mb
    unknown = sorted(set(wanted) - set(NAMES))
    if unknown:
        raise ValueError(f"{unknown[0][:80]!r} is not known here: there are {', '.join(NAMES)}.")
    now = replace(current(), **wanted)
    if "store_mb" in wanted and os.environ.get(location.LIMIT_VARIABLE, "").strip().isdecimal():
        raise ValueError(f"store_mb is given by {location.LIMIT_VARIABLE}, and only that changes it.")
    with _lock:
        _current = now
        if "max_mb" in wanted:
            _node_mb = FROM_SETTINGS
        _set_budget(now)
        log_level.set_verbosity(_verbosity(now))
        kept = settings.read(running_home())  # the command may have changed the store's limit meanwhile
        changed = replace(kept, **wanted)
        if changed != kept:
            settings.write(running_home(), changed)


def state() -> dict[str, Any]:
    """All of `NAMES`, as JSON. store_mb: None where nothing is kept on disk, or its size cannot be read."""
    return {**asdict(current()), "store_mb": store_mb()}


def store_mb() -> int | None:
    """What saved graphs may take on the disk, MB."""
    if shared.store is None and os.environ.get(location.VARIABLE, "").strip().lower() == location.OFF:
        return None
    try:
        return location.max_bytes(running_home()) >> 20
    except OSError:
        return None


def _set_budget(wanted: Settings) -> None:
    is_default = _node_mb == FROM_SETTINGS and wanted.max_mb == Settings.max_mb
    max_mb = wanted.max_mb if _node_mb == FROM_SETTINGS else _node_mb
    shared.set_budget(wanted.max_entries, (max_mb << 20) + (_for_recordings if is_default else 0))


def _verbosity(wanted: Settings) -> str:
    return log_level.from_environment() or wanted.verbosity
