"""The Resolution Restore node."""

from comfy_api.latest import io, ui

from ..accel.hosts.comfyui.sizes.snapping import restore_image
from ..accel.hosts.comfyui.versions import make_input, schema
from .resolution import RESTORE


class AccelResolutionRestore(io.ComfyNode):
    """IMAGE and restore record in, IMAGE of the size asked for out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelResolutionRestore",
            display_name="Accel: Restore Size",
            category="accel/size",
            description=(
                "Undoes Snap Size and Snap Image: brings an image to exactly the size you asked for, by cropping the"
                " border or resizing."
            ),
            search_aliases=["unpad", "uncrop", "original size", "exact size", "resize back"],
            inputs=[
                make_input(io.Image, "image", tooltip="The image, from VAE Decode or whatever comes after it."),
                make_input(
                    RESTORE,
                    "restore",
                    tooltip="The record of what was changed, from Snap Size or Snap Image.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[io.Image.Output(display_name="IMAGE", tooltip="The image at the size you asked for.")],
        )

    @classmethod
    def execute(cls, image, restore) -> io.NodeOutput:
        restored, text = restore_image(image, restore)
        return io.NodeOutput(restored, ui=ui.PreviewText(text))
