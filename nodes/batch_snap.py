"""Batch Snap: a batch filled up to a size that graphs exist for."""

from comfy_api.latest import io, ui

from ..accel.hosts.comfyui.models.warm_up import parse_numbers
from ..accel.hosts.comfyui.node_text import show
from ..accel.hosts.comfyui.sizes.batch import pad_batch
from ..accel.hosts.comfyui.versions import make_input, schema
from ..accel.sizing.fit import Restore
from .resolution import RESTORE

LARGEST = 4096
"""Images; as core's Empty Latent Image."""


def parse(sizes: str) -> list[int]:
    """The node's batches; ValueError with one sentence on what is wrong in them."""
    numbers = parse_numbers(sizes, "batch sizes", LARGEST)
    if not numbers:
        raise ValueError(f"sizes is empty; write whole numbers from 1 to {LARGEST}, with commas between them: 1, 2, 4.")
    return numbers


class AccelBatchSnap(io.ComfyNode):
    """LATENT in, LATENT and a record out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelBatchSnap",
            display_name="Batch Snap",
            category="accel",
            description=(
                'For Accelerate Model with shapes on "exact size", which compiles anew for each batch: fills a batch up'
                " to the next of a few sizes, so that these are all there is to compile. Off until you turn it on,"
                ' since with "any size" every batch shares what is compiled, and the images added cost their time.'
            ),
            search_aliases=["batch size", "pad batch", "exact size"],
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
                    tooltip="Optional. The record of Resolution Snap, so that one Resolution Restore undoes both.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[
                io.Latent.Output(display_name="LATENT", tooltip="The batch, for the sampler."),
                RESTORE.Output(
                    display_name="restore", tooltip="How many were asked for, for Resolution Restore after VAE Decode."
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, sizes=None) -> bool | str:
        try:
            if sizes is not None:
                parse(sizes)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, latent, enabled, sizes, restore=None) -> io.NodeOutput:
        before = Restore() if restore is None else restore
        padded, reason = pad_batch(latent, parse(sizes)) if enabled else (latent, "turned off")
        count, made = latent["samples"].shape[0], padded["samples"].shape[0]
        text = f"{count} → {made} images" if made != count else f"{count} images, unchanged"
        text = f"{text}: {reason}" if reason else text
        show(text, cls.hidden.unique_id if cls.hidden else None)
        # Of a batch that was filled up before, still only the images asked for at first are wanted.
        asked = before.batch[0] if before.batch is not None and before.batch[1] == count else count
        record = Restore(before.fit, (asked, made) if made != asked else None)
        return io.NodeOutput(padded, record, ui=ui.PreviewText(text))
