"""The DeepCache node."""

from comfy_api.latest import io
from typing_extensions import override

from ..accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from ..accel.hosts.comfyui.versions import check_options, make_input, schema
from ..accel.step_cache.config import BETWEEN, POLICIES, DeepCacheSettings

DEFAULTS = DeepCacheSettings()


class AccelDeepCache(io.ComfyNode):
    """MODEL in, MODEL out: the same model with its deep layers skipped on some steps."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelDeepCache",
            display_name="DeepCache",
            category="accel",
            description=(
                "Computes the deep part of the model only when it has changed enough and forecasts it in between: at "
                "30 steps about half of the work, at a few steps none is left out. The image changes a little. Works "
                "at any size and with any sampler, with SD1.5, SDXL and other UNets and with Flux, SD3, Wan, "
                "Qwen-Image and other transformers."
            ),
            search_aliases=["deep cache", "speed up", "faster sampling", "skip steps", "TaylorSeer"],
            inputs=[
                make_input(io.Model, "model", tooltip="The model to speed up. It is not changed itself."),
                make_input(
                    io.Int,
                    "interval",
                    default=DEFAULTS.interval,
                    min=1,
                    max=100,
                    tooltip=(
                        "At most every how many steps the whole model is computed. 1 = off; a higher number is faster "
                        "and changes the image more."
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
                        "model, 1 = least and fastest, higher = more exact and slower (SD1.5 up to 11, SDXL up to 8, "
                        "Flux up to 28; beyond it the message names the range)."
                    ),
                ),
                make_input(
                    io.Float,
                    "start_percent",
                    default=DEFAULTS.start_percent,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "From where on in the sampling steps are skipped; every step before it is computed in full. "
                        "0 = from the beginning. Raise it to keep the composition closer to the image without this "
                        "node."
                    ),
                ),
                make_input(
                    io.Float,
                    "end_percent",
                    default=DEFAULTS.end_percent,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "Up to where in the sampling steps are skipped; every step after it is computed in full. "
                        "1 = to the end. Lower it to keep fine detail closer to the image without this node."
                    ),
                ),
                make_input(
                    io.Combo,
                    "schedule",
                    options=list(POLICIES),
                    default=DEFAULTS.schedule,
                    optional=True,
                    tooltip=(
                        "adaptive: the whole model is computed when it matters, as soon as more would change than "
                        "threshold allows, and after interval steps at the latest. uniform: every interval steps, "
                        "whatever changes; the same speed always, the image at risk at few steps."
                    ),
                ),
                make_input(
                    io.Float,
                    "threshold",
                    default=DEFAULTS.threshold,
                    min=0.0,
                    max=1.0,
                    step=0.005,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "Of the adaptive schedule: how much change it lets pass before the whole model is computed "
                        "again. Higher = faster and less exact; 0 = nothing is skipped. Without effect on uniform."
                    ),
                ),
                make_input(
                    io.Combo,
                    "between",
                    display_name="between refreshes",
                    options=list(BETWEEN),
                    default=DEFAULTS.between,
                    optional=True,
                    tooltip=(
                        "What the steps in between use for the part that is not computed. forecast: what it would give "
                        "now if it went on changing as it did. hold: what it gave last time, which takes a little less "
                        "memory."
                    ),
                ),
            ],
            outputs=[io.Model.Output(display_name="MODEL", tooltip="The model with DeepCache, for a sampler.")],
        )

    @classmethod
    def validate_inputs(cls, schedule=None, between=None) -> bool | str:
        return check_options(schedule=(schedule, list(POLICIES)), between=(between, BETWEEN))

    @classmethod
    @override
    def execute(
        cls,
        model,
        interval: int,
        depth: int,
        start_percent: float = DEFAULTS.start_percent,
        end_percent: float = DEFAULTS.end_percent,
        schedule: str = DEFAULTS.schedule,
        threshold: float = DEFAULTS.threshold,
        between: str = DEFAULTS.between,
    ) -> io.NodeOutput:
        settings = DeepCacheSettings(interval, depth, start_percent, end_percent, schedule, threshold, between)
        return io.NodeOutput(apply_deep_cache(model, settings))
