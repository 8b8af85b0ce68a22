"""The Resolution Snap and Restore Size nodes."""

from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker

from ..accel.hosts.comfyui.sizes.snapping import LARGEST, SMALLEST, resize_image, snap_inputs
from ..accel.hosts.comfyui.versions import make_input, schema
from ..accel.sizing.resolution import Size

RESTORE = io.Custom("ACCEL_RESTORE")


class AccelResolutionSnap(io.ComfyNode):
    """A size, an IMAGE or a LATENT in; the same at a size that the model supports, and how to undo it, out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelResolutionSnap",
            display_name="Accel: Resolution Snap",
            category="accel/size",
            description=(
                "Any size in, the nearest one that the model supports out: an empty latent, or an image or latent that"
                " you connect. A size that is right already is kept. Restore Size brings the result to exactly the size"
                " you asked for."
            ),
            search_aliases=["empty latent", "round resolution", "divisible by 64", "resize image", "bucket"],
            inputs=[
                make_input(
                    io.Int,
                    "width",
                    default=1024,
                    min=SMALLEST,
                    max=LARGEST,
                    step=1,
                    tooltip="The width you want, in pixels. Any number; it need not be a multiple of anything.",
                ),
                make_input(
                    io.Int,
                    "height",
                    default=1024,
                    min=SMALLEST,
                    max=LARGEST,
                    step=1,
                    tooltip="The height you want, in pixels.",
                ),
                make_input(
                    io.Int, "batch_size", default=1, min=1, max=4096, tooltip="How many images to make in one go."
                ),
                make_input(
                    io.Model,
                    "model",
                    optional=True,
                    tooltip=(
                        "Optional. Decides the multiple (64 for SD1.5, 32 for SDXL, 16 for Flux), and the latent's"
                        " channels and scale. Without it the multiple is 64 and the latent that of SD1.5 and SDXL,"
                        " which ComfyUI's samplers adapt."
                    ),
                ),
                make_input(
                    io.Image,
                    "image",
                    optional=True,
                    tooltip="Optional. An image to bring to a size that the model supports, in place of width and"
                    " height.",
                ),
                make_input(
                    io.Latent,
                    "latent",
                    optional=True,
                    tooltip="A latent, with its noise mask, in place of an image. Connect one of the two, not both.",
                ),
            ],
            outputs=[
                io.Int.Output(display_name="width", tooltip="The snapped width, in pixels."),
                io.Int.Output(display_name="height", tooltip="The snapped height, in pixels."),
                io.Latent.Output(
                    display_name="latent",
                    tooltip="The latent given, snapped; an empty one of exactly this size where none is connected.",
                ),
                io.Image.Output(display_name="image", tooltip="The image given, snapped. Needs an image."),
                RESTORE.Output(display_name="restore", tooltip="The size you asked for, for Restore Size at the end."),
            ],
        )

    @classmethod
    def execute(cls, width, height, **inputs) -> io.NodeOutput:
        snapped = snap_inputs(Size(width, height), **inputs)
        size, image, text = snapped.size, snapped.image, ui.PreviewText(snapped.text)
        if image is None:
            image = ExecutionBlocker("This output gives an image only if one is connected to the node's image input.")
        return io.NodeOutput(size.width, size.height, snapped.latent, image, snapped.asked, ui=text)


class AccelResolutionRestore(io.ComfyNode):
    """IMAGE and the size that was asked for in, IMAGE of that size out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelResolutionRestore",
            display_name="Accel: Restore Size",
            category="accel/size",
            description="Undoes Resolution Snap: resizes an image to exactly the size you asked for.",
            search_aliases=["original size", "exact size", "resize back"],
            inputs=[
                make_input(io.Image, "image", tooltip="The image, from VAE Decode or whatever comes after it."),
                make_input(RESTORE, "restore", tooltip="The size you asked for, from Resolution Snap."),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[io.Image.Output(display_name="IMAGE", tooltip="The image at the size you asked for.")],
        )

    @classmethod
    def execute(cls, image, restore) -> io.NodeOutput:
        before, restored = Size(image.shape[2], image.shape[1]), resize_image(image, restore)
        text = f"{restore}, as it was" if before == restore else f"{before} → {restore}"
        return io.NodeOutput(restored, ui=ui.PreviewText(text))
