"""Where ComfyUI keeps the graphs that outlive it: in its user folder, where no request over HTTP reaches."""

from __future__ import annotations

from pathlib import Path

from ...cache.graph_cache import GraphCache
from ...store import attach as store_attach
from ...store import home as store_home


def home() -> Path:
    """The folder for the secret and the graphs; it may not exist yet."""
    import folder_paths

    return Path(folder_paths.get_user_directory()) / store_home.NAME


def attach(cache: GraphCache) -> None:
    """Give the process' own cache its store, once; a cache of somebody's own keeps what it has."""
    store_attach.attach(cache, home)
