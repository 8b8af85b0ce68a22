"""The Clear Graph Cache node."""

from comfy_api.latest import io

from ..accel.core.sentences import count_nouns
from ..accel.hosts.comfyui.server.panel import clear
from ..accel.hosts.comfyui.versions import make_input, schema


class AccelClearGraphCache(io.ComfyNode):
    """Drops every compiled graph of this process; anything connected passes through."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelClearGraphCache",
            display_name="Accel: Clear Graph Cache",
            category="accel/tools",
            description=(
                "Clears all compiled graphs from memory. The next image loads or compiles them again, and blocks that "
                "could not be compiled are retried. Runs each time the workflow does."
            ),
            search_aliases=["free memory", "reset", "compile cache", "graphs"],
            is_output_node=True,
            not_idempotent=True,
            inputs=[
                make_input(
                    io.AnyType,
                    "anything",
                    optional=True,
                    tooltip="Optional. Connect something to clear the cache after it is made; it comes out unchanged.",
                ),
            ],
            outputs=[
                io.AnyType.Output(display_name="anything", tooltip="What was connected, unchanged."),
                io.String.Output(display_name="report", tooltip="How many graphs were dropped."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, anything=None) -> float:
        return float("nan")  # never equal to itself: the node runs every time

    @classmethod
    def execute(cls, anything=None) -> io.NodeOutput:
        cleared = clear()
        text = (
            f"{count_nouns(cleared['dropped'], 'compiled graph')} dropped, {cleared['bytes'] / 2**20:.1f} MB of code."
        )
        return io.NodeOutput(anything, text)
