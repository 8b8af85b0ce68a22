"""Resolution Snap: a size that the model takes without rounding, and an empty latent of it."""

from __future__ import annotations

import math

import comfy.model_management
import torch
from comfy_api.latest import io

from ..accel.hosts.comfyui.model_sizes import SAFE_FOR_ANY_UNET, LatentLayout, latent_layout, model_multiple
from ..accel.hosts.comfyui.versions import check_options, make_input, schema
from ..accel.resolution import MODES, snap

FROM_MODEL = "from model"
MULTIPLES = (FROM_MODEL, "8", "16", "32", "64")
SMALLEST, LARGEST = 16, 16384  # pixels; as core's Empty Latent Image


def range_error(**sides: int | None) -> str | None:
    """One sentence on the first side that is out of range; None if all are fine. None stands for a linked side."""
    for name, side in sides.items():
        if side is not None and not SMALLEST <= side <= LARGEST:
            return f"{name} is {side}; it must be from {SMALLEST} to {LARGEST} pixels."
    return None


class AccelResolutionSnap(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelResolutionSnap",
            display_name="Resolution Snap",
            category="accel",
            description=(
                "Takes the size you want and gives the nearest one that the model runs at without rounding,"
                " with an empty latent of it. A size that is right already is not touched."
            ),
            search_aliases=["empty latent", "round resolution", "divisible by 64", "size", "bucket"],
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
                    io.Combo,
                    "multiple",
                    options=list(MULTIPLES),
                    default=FROM_MODEL,
                    tooltip=(
                        'Both sides become multiples of this many pixels. "from model" asks the connected model'
                        f" (64 for SD1.5, 32 for SDXL, 16 for Flux); with none connected it is {SAFE_FOR_ANY_UNET},"
                        " which suits every one of these."
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
            ],
            outputs=[
                io.Int.Output(display_name="width", tooltip="The snapped width, in pixels."),
                io.Int.Output(display_name="height", tooltip="The snapped height, in pixels."),
                io.Latent.Output(display_name="latent", tooltip="An empty latent of exactly this size."),
            ],
        )

    @classmethod
    def validate_inputs(cls, width=None, height=None, multiple=None, mode=None) -> bool | str:
        error = range_error(width=width, height=height)
        return error or check_options(multiple=(multiple, MULTIPLES), mode=(mode, MODES))

    @classmethod
    def execute(
        cls, width, height, multiple, mode, keep_aspect, max_megapixels, batch_size, model=None
    ) -> io.NodeOutput:
        error = range_error(width=width, height=height)  # linked sides have no value before this
        if error:
            raise ValueError(error)
        layout = latent_layout(model) if model is not None else LatentLayout()
        if multiple == FROM_MODEL:
            step = model_multiple(model) if model is not None else SAFE_FOR_ANY_UNET
        else:
            step = math.lcm(int(multiple), layout.scale)  # so that the latent has exactly this width and height
        size = snap(width, height, step, mode, keep_aspect, max_megapixels)
        samples = torch.zeros(layout.shape(size, batch_size), device=comfy.model_management.intermediate_device())
        # Later cores rescale an empty latent for the model that samples it, if they know its scale.
        latent = {"samples": samples, "downscale_ratio_spacial": layout.scale}
        return io.NodeOutput(size.width, size.height, latent)
