"""Where the graphs of pipelines are kept: where ComfyUI keeps its own, or else in a folder of this person."""

from __future__ import annotations

import sys

from ...cache.graph_cache import GraphCache
from ...store.attach import attach as attach_at
from ...store.home import of_this_person


def attach(cache: GraphCache) -> None:
    """Give the process' cache its store, unless it has one. Touches no disk."""
    if f"{__package__.rpartition('.')[0]}.comfyui.store" in sys.modules:  # this engine is a running ComfyUI's
        from ..comfyui import store

        store.attach(cache)
    else:
        attach_at(cache, of_this_person)
