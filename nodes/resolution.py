"""The Resolution Snap node."""

from __future__ import annotations

from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker

from ..accel.hosts.comfyui.progress import show_text
from ..accel.hosts.comfyui.sizes.model_sizes import SAFE_FOR_ANY_UNET
from ..accel.hosts.comfyui.sizes.snapping import (
    DEFAULT_FAMILY,
    FROM_MODEL,
    LARGEST,
    MULTIPLES,
    SMALLEST,
    TRAINED_FOR,
    Rule,
    range_error,
    snap_inputs,
)
from ..accel.hosts.comfyui.versions import check_options, make_input, schema
from ..accel.sizing.fit import ANCHORS, HOW
from ..accel.sizing.resolution import MODES, Size

RESTORE = io.Custom("ACCEL_RESTORE")


class AccelResolutionSnap(io.ComfyNode):
    """A size, an IMAGE or a LATENT in; the same at a size that the model takes, and how to undo it, out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelResolutionSnap",
            display_name="Resolution Snap",
            category="accel",
            description=(
                "Takes the size you want, an image or a latent, and gives the nearest one that the model runs at"
                " without rounding. A size that is right already is not touched. Resolution Restore brings the result"
                " to exactly the size you wanted."
            ),
            search_aliases=["empty latent", "round resolution", "divisible by 64", "size", "bucket", "pad", "crop"],
            inputs=[
                make_input(
                    io.Int,
                    "width",
                    default=1024,
                    min=SMALLEST,
                    max=LARGEST,
                    step=1,
                    tooltip=(
                        "The width you want, in pixels. Any number; it need not be a multiple of anything. An image or"
                        " a latent that is connected brings its own."
                    ),
                ),
                make_input(
                    io.Int,
                    "height",
                    default=1024,
                    min=SMALLEST,
                    max=LARGEST,
                    step=1,
                    tooltip="The height you want, in pixels. An image or a latent that is connected brings its own.",
                ),
                make_input(
                    io.Combo,
                    "multiple",
                    options=list(MULTIPLES),
                    default=FROM_MODEL,
                    tooltip=(
                        'Both sides become multiples of this many pixels. "from model" asks the connected model'
                        f" (64 for SD1.5, 32 for SDXL, 16 for Flux); with none connected it is {SAFE_FOR_ANY_UNET},"
                        ' which suits every one of these. "trained sizes" takes the nearest size that the model was'
                        ' trained at. "already compiled" takes the nearest size that Accelerate Model has compiled'
                        ' with shapes on "exact size".'
                    ),
                ),
                make_input(
                    io.Combo,
                    "mode",
                    options=list(MODES),
                    default="nearest",
                    tooltip="Which way a side may move: to the nearest multiple, only up, or only down.",
                ),
                make_input(
                    io.Boolean,
                    "keep_aspect",
                    default=False,
                    tooltip=(
                        "Off: each side is rounded by itself and moves as little as possible. On: sides may move one"
                        " multiple further where that comes closer to the aspect ratio you asked for."
                    ),
                ),
                make_input(
                    io.Float,
                    "max_megapixels",
                    default=0.0,
                    min=0.0,
                    max=256.0,
                    step=0.01,
                    tooltip=(
                        "The result never has more pixels than this, in units of 1024 × 1024; a larger size is shrunk"
                        " with its aspect ratio kept. 0 is no limit."
                    ),
                ),
                make_input(
                    io.Int,
                    "batch_size",
                    default=1,
                    min=1,
                    max=4096,
                    tooltip="The number of empty latents, that is of images made in one go.",
                ),
                make_input(
                    io.Model,
                    "model",
                    optional=True,
                    tooltip=(
                        'Optional. Decides what "from model" means, and the latent\'s channels and scale.'
                        " Without it the latent is that of SD1.5 and SDXL, whose channels ComfyUI's samplers adapt."
                    ),
                ),
                make_input(
                    io.Image,
                    "image",
                    optional=True,
                    tooltip="Optional. An image to snap, in place of width and height.",
                ),
                make_input(
                    io.Latent,
                    "latent",
                    optional=True,
                    tooltip=(
                        "Optional. A latent to snap, with its noise mask, in place of width and height. Connect an"
                        " image or a latent, not both."
                    ),
                ),
                make_input(
                    io.Combo,
                    "how",
                    options=list(HOW),
                    default=HOW[0],
                    optional=True,
                    tooltip=(
                        "resize: stretch. pad: add a border, copied from the edge, mirrored or of one colour; nothing"
                        " of the image is lost, no side gets smaller, and Resolution Restore gives back every pixel."
                        " crop: cut off what is too much; nothing is stretched."
                    ),
                ),
                make_input(
                    io.Combo,
                    "anchor",
                    options=list(ANCHORS),
                    default=ANCHORS[0],
                    optional=True,
                    advanced=True,
                    tooltip="Where the image stays when it is padded, and which part of it when it is cropped.",
                ),
                make_input(
                    io.Float,
                    "fill",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip='The brightness of the border of "pad constant": 0 = black, 0.5 = grey, 1 = white.',
                ),
                make_input(
                    io.Combo,
                    "trained_for",
                    options=list(TRAINED_FOR),
                    default=FROM_MODEL,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        'Whose sizes "trained sizes" takes. "from model" asks the connected model; with none connected'
                        f" it is {DEFAULT_FAMILY}."
                    ),
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[
                io.Int.Output(display_name="width", tooltip="The snapped width, in pixels."),
                io.Int.Output(display_name="height", tooltip="The snapped height, in pixels."),
                io.Latent.Output(
                    display_name="latent",
                    tooltip="The latent given, snapped; an empty one of exactly this size where none is connected.",
                ),
                io.Image.Output(display_name="image", tooltip="The image given, snapped. Needs an image."),
                RESTORE.Output(
                    display_name="restore", tooltip="What was changed, for Resolution Restore at the end of the graph."
                ),
            ],
        )

    @classmethod
    def validate_inputs(
        cls, width=None, height=None, multiple=None, mode=None, how=None, anchor=None, trained_for=None
    ) -> bool | str:
        error = range_error(width=width, height=height)
        return error or check_options(
            multiple=(multiple, MULTIPLES),
            mode=(mode, MODES),
            how=(how, HOW),
            anchor=(anchor, ANCHORS),
            trained_for=(trained_for, TRAINED_FOR),
        )

    @classmethod
    def execute(
        cls,
        width,
        height,
        multiple,
        mode,
        keep_aspect,
        max_megapixels,
        batch_size,
        model=None,
        image=None,
        latent=None,
        how=HOW[0],
        anchor=ANCHORS[0],
        fill=0.0,
        trained_for=FROM_MODEL,
    ) -> io.NodeOutput:
        rule = Rule(multiple, mode, keep_aspect, max_megapixels, trained_for, how.startswith("pad"))
        snapped = snap_inputs(Size(width, height), rule, model, image, latent, batch_size, how, anchor, fill)
        show_text(snapped.text, cls.hidden.unique_id if cls.hidden else None)
        no_image = ExecutionBlocker("Resolution Snap gives an image only if one is connected to its image input.")
        return io.NodeOutput(
            snapped.size.width,
            snapped.size.height,
            snapped.latent,
            no_image if snapped.image is None else snapped.image,
            snapped.restore,
            ui=ui.PreviewText(snapped.text),
        )
