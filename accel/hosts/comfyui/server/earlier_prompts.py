"""Prompts that earlier builds made, or scripts of that time: what our nodes no longer have is left out of them."""

from __future__ import annotations

import functools
from typing import Any

from ....core.events import log

_PACK = __package__.removesuffix(".accel.hosts.comfyui.server")


def leave_out_gone_inputs(posted: Any) -> Any:
    """The body of a POST /prompt, before core validates it; inputs that our nodes don't have are taken out of it.

    Core ignores values that a node has no input for, but hands links to them to the node, which would fail.
    """
    import nodes

    graph = posted.get("prompt") if isinstance(posted, dict) else None
    for node in graph.values() if isinstance(graph, dict) else ():
        name = node.get("class_type") if isinstance(node, dict) else None
        of_node = nodes.NODE_CLASS_MAPPINGS.get(name) if isinstance(name, str) else None
        # Others' nodes may take inputs that they do not name.
        if of_node is None or not of_node.__module__.startswith(f"{_PACK}."):
            continue
        groups = of_node.INPUT_TYPES()
        known = {each for group in ("required", "optional") for each in groups.get(group, ())}
        gone = [each for each in node.get("inputs", ()) if each not in known]
        for each in gone:
            del node["inputs"][each]
        if gone:
            _say_once(name, ", ".join(gone))
    return posted


@functools.cache
def _say_once(name: str, gone: str) -> None:
    log.warning("%s is used with inputs that it no longer has, which are ignored: %s", name, gone)
