"""What ComfyUI tells a node of the workflow it is in."""

from comfy_api.latest import io


def node_id(node: type[io.ComfyNode]) -> str | None:
    """The running node's id in its workflow; None where it is called by hand."""
    return node.hidden.unique_id if node.hidden else None
