"""The Batch Snap node."""

from comfy_api.latest import io, ui

from ..accel.hosts.comfyui.sizes.batch import parse_batches, snap_batch
from ..accel.hosts.comfyui.versions import make_input, schema
from .resolution import RESTORE


class AccelBatchSnap(io.ComfyNode):
    """LATENT in, LATENT of a batch size that graphs exist for and a restore record out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelBatchSnap",
            display_name="Accel: Snap Batch",
            category="accel/size",
            description=(
                'Pads a batch to 1, 2, 4 or 8, so that Accelerate Model with shapes on "exact size" compiles for these'
                ' only. Off until you turn it on: with "any size" there is nothing to gain, and added images cost time.'
            ),
            search_aliases=["batch size", "pad batch", "exact size"],
            is_experimental=True,
            inputs=[
                make_input(io.Latent, "latent", tooltip="The batch of latents, on its way to the sampler."),
                make_input(
                    io.Boolean,
                    "enabled",
                    default=False,
                    tooltip=(
                        'Off: nothing is changed. On: the batch is padded; only worth it with "exact size" in'
                        " Accelerate Model."
                    ),
                ),
                make_input(
                    io.String,
                    "sizes",
                    default="1, 2, 4, 8",
                    tooltip="The batch sizes to pad to, with commas between them. Larger batches stay as they are.",
                ),
                make_input(
                    RESTORE,
                    "restore",
                    optional=True,
                    tooltip="Optional. The record of Snap Size or Snap Image, so that one Restore Size undoes both.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[
                io.Latent.Output(display_name="LATENT", tooltip="The batch, for the sampler."),
                RESTORE.Output(
                    display_name="restore", tooltip="How many images you asked for, for Restore Size after VAE Decode."
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, sizes=None) -> bool | str:
        try:
            if sizes is not None:
                parse_batches(sizes)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, latent, enabled, sizes, restore=None) -> io.NodeOutput:
        padded, record, text = snap_batch(latent, parse_batches(sizes), restore, enabled)
        return io.NodeOutput(padded, record, ui=ui.PreviewText(text))
