"""The page's settings, applied and kept: the cache's budget, the store's size, the log's verbosity.

The server is the source of truth: ComfyUI's own settings file is not read, since any page or request may change it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...cache.graph_cache import shared
from ...core import settings
from ...core.events import log
from ...core.settings import Settings
from ...report import log as report_log
from ...store import location

HOME = "__accel"
"""In ComfyUI's user folder. Names that begin so are no user's: core serves nothing from there."""

NAMES = tuple(asdict(Settings()))

_lock = threading.Lock()
_current: Settings | None = None
_for_captures = 0


def find_running_home() -> Path:
    """Where this ComfyUI keeps what outlives it, settings and graphs; it may not exist yet."""
    import folder_paths

    return Path(folder_paths.get_user_directory()) / HOME


def make_room_for_captures(nbytes: int) -> None:
    """Raise the default budget by so many bytes for captured graphs, which take as much memory as a model's call; a
    budget that somebody set stays."""
    global _for_captures
    with _lock:
        if nbytes > _for_captures:
            _for_captures = nbytes
            _set_budget(_current or Settings())


def current() -> Settings:
    """The settings in force; the first call reads and applies them. Damaged settings count as the defaults."""
    global _current
    with _lock:
        if _current is None:
            try:
                _current = settings.read(find_running_home())
            except OSError as error:
                log.warning("Could not read the settings of the graph cache: %s", error)
                _current = Settings()
            _set_budget(_current)
            if _choose_verbosity(_current) != settings.NORMAL:  # otherwise our logger keeps the level that others set
                report_log.set_verbosity(_choose_verbosity(_current))
        return _current


def change(requested: dict[str, Any]) -> None:
    """Apply and keep these of `NAMES`. Raises ValueError for an invalid one, and then changes nothing; OSError where
    they cannot be kept, and then they are in force until ComfyUI ends."""
    global _current
    unknown = sorted(set(requested) - set(NAMES))
    if unknown:
        raise ValueError(f"There is no setting {unknown[0][:80]!r}; the settings are {', '.join(NAMES)}.")
    if "store_mb" in requested and os.environ.get(location.LIMIT_VARIABLE, "").strip().isdecimal():
        raise ValueError(f"store_mb is set by {location.LIMIT_VARIABLE}, so it cannot be changed here.")
    current()
    with _lock:
        before = _current or Settings()
        _current = now = replace(before, **requested)
        _set_budget(now)
        report_log.set_verbosity(_choose_verbosity(now))
        try:
            settings.write(find_running_home(), now)
        except OSError:
            _current = replace(now, cuda_graphs=before.cuda_graphs)  # which counts from the next start on, if kept
            raise


def state() -> dict[str, Any]:
    """All of `NAMES`, as JSON. store_mb: None where nothing is saved on disk, or the setting cannot be read."""
    is_saved = shared.store is not None or not location.is_off()
    try:
        store_mb = location.max_bytes(find_running_home()) >> 20 if is_saved else None
    except OSError:
        store_mb = None
    return {**asdict(current()), "store_mb": store_mb}


def _set_budget(chosen: Settings) -> None:
    extra = _for_captures if chosen.max_mb == Settings.max_mb else 0
    shared.set_budget(chosen.max_entries, (chosen.max_mb << 20) + extra)


def _choose_verbosity(chosen: Settings) -> str:
    return report_log.read_environment() or chosen.verbosity
