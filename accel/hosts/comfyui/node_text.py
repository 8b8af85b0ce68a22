"""One line of text on a node in the page, as core's own nodes show their progress."""

from __future__ import annotations

import sys


def show(text: str, node_id: str | None) -> None:
    """Show `text` on the node; without a running server, or outside of a graph (None), do nothing."""
    # Where it runs it is loaded; importing it would start half of one.
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if server is not None and node_id is not None:
        server.send_progress_text(text, node_id)
