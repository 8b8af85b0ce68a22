"""The Accel Report node."""

from comfy_api.latest import io, ui

from ..accel.hosts.comfyui.server.report import write_report
from ..accel.hosts.comfyui.versions import make_input, schema


class AccelReport(io.ComfyNode):
    """What was accelerated, skipped and saved, and what to change if nothing was."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelReport",
            display_name="Accel: Report",
            category="accel/tools",
            description=(
                "Says what your last image gained: what was compiled, loaded and skipped, how much time that saved, "
                "and what to change first. Connect the image so that the report is made after it. Runs each time the "
                "workflow does."
            ),
            search_aliases=["statistics", "benchmark", "speed", "PSNR", "why slow", "diagnose"],
            is_output_node=True,
            not_idempotent=True,
            inputs=[
                make_input(
                    io.AnyType,
                    "anything",
                    optional=True,
                    tooltip=("Optional. The report is made after this: the image of VAE Decode, say, or the model."),
                ),
                make_input(
                    io.Image,
                    "image",
                    optional=True,
                    tooltip="Optional. An image to compare with the reference, pixel by pixel.",
                ),
                make_input(
                    io.Image,
                    "reference",
                    optional=True,
                    tooltip=(
                        "Optional. The same image made without this pack's nodes: the report says how close the two "
                        "are (PSNR; above 40 dB is hard to see, 30 dB is visible side by side)."
                    ),
                ),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
            outputs=[io.String.Output(display_name="report", tooltip="The report, as text.")],
        )

    @classmethod
    def fingerprint_inputs(cls, anything=None, image=None, reference=None) -> float:
        return float("nan")  # never equal to itself: the node runs every time

    @classmethod
    def execute(cls, anything=None, image=None, reference=None) -> io.NodeOutput:
        text = write_report(image, reference, cls.hidden.prompt if cls.hidden else None)
        return io.NodeOutput(text, ui=ui.PreviewText(text))
