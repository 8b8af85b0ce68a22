"""Where ComfyUI keeps the graphs that outlive it: in its user folder, where no request over HTTP reaches."""

from __future__ import annotations

import logging
from pathlib import Path

from ... import store_home, store_location
from ...graph_cache import GraphCache, shared
from ...graph_store import GraphStore

log = logging.getLogger("accel")


def home() -> Path:
    """The folder for the secret and the graphs; it may not exist yet."""
    import folder_paths

    return Path(folder_paths.get_user_directory()) / store_home.NAME


def attach(cache: GraphCache) -> None:
    """Give the process' own cache its store, once; a cache of somebody's own keeps what it has.

    Touches no disk: the store reads and writes when the first block is looked for.
    """
    if cache is not shared or cache.store is not None:
        return
    try:
        folder = store_location.folder(home())
    except OSError as error:
        log.warning("No compiled graph is kept: %s", error)
        return
    if folder is not None:
        cache.store = GraphStore(folder, store_location.secret(home()), lambda: store_location.max_bytes(home()))
