"""Where the graphs of pipelines are kept: where ComfyUI keeps its own, or else in a folder of this person."""

from __future__ import annotations

import sys

from ..graph_cache import GraphCache
from ..store_attach import attach as attach_at
from ..store_home import of_this_person


def attach(cache: GraphCache) -> None:
    """Give the process' cache its store, unless it has one. Touches no disk."""
    if f"{__package__}.comfyui.graph_store" in sys.modules:  # this engine is a running ComfyUI's
        from .comfyui import graph_store

        graph_store.attach(cache)
    else:
        attach_at(cache, of_this_person)
