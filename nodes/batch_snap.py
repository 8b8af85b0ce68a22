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
                'For Accelerate Model with shapes on "exact size", which compiles again for each batch: fills a batch'
                " up to the next of a few sizes, so that these are all there is to compile. Off until you turn it on,"
                ' since with "any size" every batch shares what is compiled, and the images added cost their time.'
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
                        'Off: nothing is changed. On: the batch is filled up; only worth it with "exact size" in'
                        " Accelerate Model."
                    ),
                ),
                make_input(
                    io.String,
                    "sizes",
                    default="1, 2, 4, 8",
                    tooltip="The batches to fill up to, with commas between them. A larger batch stays as it is.",
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
                    display_name="restore", tooltip="How many were asked for, for Restore Size after VAE Decode."
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
