"""The Snap Size and Snap Image nodes, the Resolution Snap node, which does both, and the Restore Size node."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker

from ..accel.hosts.comfyui.sizes.model_sizes import SAFE_FOR_ANY_UNET
from ..accel.hosts.comfyui.sizes.snapping import (
    DEFAULT_FAMILY,
    FROM_MODEL,
    LARGEST,
    MULTIPLES,
    SMALLEST,
    TRAINED_FOR,
    Snapped,
    restore_image,
    snap_inputs,
)
from ..accel.hosts.comfyui.versions import make_input, schema
from ..accel.sizing.fit import ANCHORS, HOW
from ..accel.sizing.resolution import MODES, Size

RESTORE = io.Custom("ACCEL_RESTORE")


def _sides() -> list[Any]:
    """The inputs width and height."""
    return [
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
    ]


def _rule(advanced: bool) -> list[Any]:
    """The inputs multiple, mode, keep_aspect and max_megapixels."""
    return [
        make_input(
            io.Combo,
            "multiple",
            options=list(MULTIPLES),
            default=FROM_MODEL,
            advanced=advanced,
            tooltip=(
                'Round both sides to a multiple of this many pixels. "from model" asks the connected model (64 for'
                f" SD1.5, 32 for SDXL, 16 for Flux), or takes {SAFE_FOR_ANY_UNET}, which suits all of these."
                ' "trained sizes" takes the nearest size the model was trained at.'
            ),
        ),
        make_input(
            io.Combo,
            "mode",
            options=list(MODES),
            default="nearest",
            advanced=advanced,
            tooltip="Which way a side may move: to the nearest multiple, only up, or only down.",
        ),
        make_input(
            io.Boolean,
            "keep_aspect",
            default=False,
            advanced=advanced,
            tooltip=(
                "Off: round each side by itself, as little as possible. On: move a side one multiple further where"
                " that keeps the aspect ratio better."
            ),
        ),
        make_input(
            io.Float,
            "max_megapixels",
            default=0.0,
            min=0.0,
            max=256.0,
            step=0.01,
            advanced=advanced,
            tooltip=(
                "Shrink larger sizes to at most this many pixels, in units of 1024 × 1024, with the aspect ratio kept."
                " 0 = no limit."
            ),
        ),
    ]


def _batch_size() -> Any:
    return make_input(io.Int, "batch_size", default=1, min=1, max=4096, tooltip="How many images to make in one go.")


def _model() -> Any:
    return make_input(
        io.Model,
        "model",
        optional=True,
        tooltip=(
            'Optional. Decides what "from model" means, and the latent\'s channels and scale. Without it the latent is'
            " that of SD1.5 and SDXL, which ComfyUI's samplers adapt."
        ),
    )


def _how() -> list[Any]:
    """The inputs how, anchor and fill."""
    return [
        make_input(
            io.Combo,
            "how",
            options=list(HOW),
            default=HOW[0],
            optional=True,
            tooltip=(
                "resize: stretch. pad: add a border, copied from the edge, mirrored or of one colour; Restore Size"
                " crops it off losslessly. crop: cut off what is too much."
            ),
        ),
        make_input(
            io.Combo,
            "anchor",
            options=list(ANCHORS),
            default=ANCHORS[0],
            optional=True,
            advanced=True,
            tooltip="Where the image stays when it is padded, and which part of it is kept when it is cropped.",
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
    ]


def _trained_for() -> Any:
    return make_input(
        io.Combo,
        "trained_for",
        options=list(TRAINED_FOR),
        default=FROM_MODEL,
        optional=True,
        advanced=True,
        tooltip=(
            'Whose sizes "trained sizes" takes. "from model" asks the connected model; with none connected it is'
            f" {DEFAULT_FAMILY}."
        ),
    )


def _image() -> Any:
    return make_input(io.Image, "image", optional=True, tooltip="An image to bring to a size that the model supports.")


def _latent() -> Any:
    return make_input(
        io.Latent,
        "latent",
        optional=True,
        tooltip="A latent, with its noise mask, in place of an image. Connect one of the two, not both.",
    )


_WIDTH = io.Int.Output(display_name="width", tooltip="The snapped width, in pixels.")
_HEIGHT = io.Int.Output(display_name="height", tooltip="The snapped height, in pixels.")
_RESTORE = RESTORE.Output(display_name="restore", tooltip="What was changed, for Restore Size at the end of the graph.")


def _image_or_blocker(snapped: Snapped) -> Any:
    missing = ExecutionBlocker("This output gives an image only if one is connected to the node's image input.")
    return missing if snapped.image is None else snapped.image


class AccelSnapSize(io.ComfyNode):
    """Any size in; an empty latent, width and height at the nearest size that the model supports out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelSnapSize",
            display_name="Accel: Snap Size",
            category="accel/size",
            description=(
                "An empty latent at the nearest size that the model supports. A size that is right already is kept."
                " Restore Size brings the image to exactly the size you typed."
            ),
            search_aliases=["empty latent", "round resolution", "divisible by 64", "resolution snap", "bucket"],
            inputs=[*_sides(), _batch_size(), _model(), *_rule(advanced=True), _trained_for()],
            outputs=[
                io.Latent.Output(display_name="LATENT", tooltip="An empty latent of this size, for the sampler."),
                _WIDTH,
                _HEIGHT,
                _RESTORE,
            ],
        )

    @classmethod
    def execute(cls, width, height, **inputs) -> io.NodeOutput:
        snapped = snap_inputs(Size(width, height), **inputs)
        size = snapped.size
        return io.NodeOutput(snapped.latent, size.width, size.height, snapped.restore, ui=ui.PreviewText(snapped.text))


class AccelSnapImage(io.ComfyNode):
    """An IMAGE or a LATENT in; the same at a size that the model supports, and how to undo it, out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelSnapImage",
            display_name="Accel: Snap Image",
            category="accel/size",
            description=(
                "Resizes, pads or crops an image or a latent to the nearest size that the model supports. A size that"
                " is right already is kept. Restore Size brings the result back to the original size."
            ),
            search_aliases=["resize image", "pad image", "crop image", "divisible by 64", "resolution snap"],
            inputs=[_image(), _latent(), _model(), *_how(), *_rule(advanced=True), _trained_for()],
            outputs=[
                io.Image.Output(display_name="IMAGE", tooltip="The image given, snapped. Needs an image."),
                io.Latent.Output(
                    display_name="LATENT", tooltip="The latent given, snapped; with an image an empty one of its size."
                ),
                _WIDTH,
                _HEIGHT,
                _RESTORE,
            ],
        )

    @classmethod
    def execute(cls, image=None, latent=None, **inputs) -> io.NodeOutput:
        if image is None and latent is None:
            raise ValueError("Connect an image or a latent. For an empty latent use Snap Size.")
        snapped = snap_inputs(Size(0, 0), image=image, latent=latent, **inputs)
        return io.NodeOutput(
            _image_or_blocker(snapped),
            snapped.latent,
            snapped.size.width,
            snapped.size.height,
            snapped.restore,
            ui=ui.PreviewText(snapped.text),
        )


class AccelResolutionSnap(io.ComfyNode):
    """A size, an IMAGE or a LATENT in; the same at a size that the model supports, and how to undo it, out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelResolutionSnap",
            display_name="Accel: Resolution Snap",
            category="accel/size",
            description=(
                "Brings a size, an image or a latent to the nearest size that the model supports. New workflows use"
                " Snap Size or Snap Image, which do the same with fewer inputs."
            ),
            is_deprecated=True,
            inputs=[
                *_sides(),
                *_rule(advanced=False),
                _batch_size(),
                _model(),
                _image(),
                _latent(),
                *_how(),
                _trained_for(),
            ],
            outputs=[
                _WIDTH,
                _HEIGHT,
                io.Latent.Output(
                    display_name="latent",
                    tooltip="The latent given, snapped; an empty one of exactly this size where none is connected.",
                ),
                io.Image.Output(display_name="image", tooltip="The image given, snapped. Needs an image."),
                _RESTORE,
            ],
        )

    @classmethod
    def execute(cls, width, height, **inputs) -> io.NodeOutput:
        snapped = snap_inputs(Size(width, height), **inputs)
        return io.NodeOutput(
            snapped.size.width,
            snapped.size.height,
            snapped.latent,
            _image_or_blocker(snapped),
            snapped.restore,
            ui=ui.PreviewText(snapped.text),
        )


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
