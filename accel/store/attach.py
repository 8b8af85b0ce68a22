"""The process' cache gets its store, whatever the host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ..cache.graph_cache import GraphCache, shared
from . import location
from .graph_store import GraphStore

log = logging.getLogger("accel")


def attach(cache: GraphCache, find_home: Callable[[], Path | None]) -> None:
    """Give the process' own cache its store, once; a cache of somebody's own keeps what it has.

    find_home: tells the folder for the secret and the graphs, which may not exist yet; None where there is none.
    Touches no disk: the store reads and writes when the first block is looked for.
    """
    if cache is not shared or cache.store is not None:
        return
    home = find_home()
    try:
        folder = location.folder(home)
    except OSError as error:
        log.warning("No compiled graph is kept: %s", error)
        return
    if folder is not None:
        cache.store = GraphStore(folder, location.secret(home), lambda: location.max_bytes(home))
