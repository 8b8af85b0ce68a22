"""The DeepCache node."""

from comfy_api.latest import io
from typing_extensions import override

from ..accel.deep_cache import DeepCacheSettings
from ..accel.hosts.comfyui.deep_cache import apply_deep_cache
from ..accel.hosts.comfyui.versions import make_input, schema


class AccelDeepCache(io.ComfyNode):
    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelDeepCache",
            display_name="DeepCache",
            category="accel",
            description=(
                "Computes the deep part of the model only every few steps and reuses it in between: at the defaults "
                "about half of the work. The image changes a little. Works at any size with SD1.5, SDXL and other "
                "UNet models; any other model passes through unchanged."
            ),
            search_aliases=["deep cache", "speed up", "faster sampling", "skip steps"],
            inputs=[
                make_input(io.Model, "model", tooltip="The model to speed up. It is not changed itself."),
                make_input(
                    io.Int,
                    "interval",
                    default=3,
                    min=1,
                    max=100,
                    tooltip=(
                        "Every how many steps the whole model is computed. 1 = off; a higher number is faster and "
                        "changes the image more."
                    ),
                ),
                make_input(
                    io.Int,
                    "depth",
                    default=0,
                    min=0,
                    max=100,
                    advanced=True,
                    tooltip=(
                        "How much of the model is still computed on the steps in between: 0 = chosen to suit the "
                        "model, 1 = least and fastest, higher = more exact and slower (SD1.5 up to 11, SDXL up to 8)."
                    ),
                ),
            ],
            outputs=[io.Model.Output(display_name="MODEL", tooltip="The model with DeepCache, for a sampler.")],
        )

    @classmethod
    @override
    def execute(cls, model, interval: int, depth: int) -> io.NodeOutput:
        return io.NodeOutput(apply_deep_cache(model, DeepCacheSettings(interval, depth)))
