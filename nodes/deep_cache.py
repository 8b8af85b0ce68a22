"""The DeepCache node."""

from comfy_api.latest import io

from ..accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from ..accel.hosts.comfyui.versions import make_input, schema
from ..accel.step_cache.config import BETWEEN, POLICIES, DeepCacheSettings
from .hidden import node_id

DEFAULTS = DeepCacheSettings()

TARGETS = {"off": None, "50 dB (same picture)": 50.0, "40 dB (hard to see)": 40.0, "32 dB (small changes)": 32.0}
"""Choices of `quality`, each with what it asks for."""


class AccelDeepCache(io.ComfyNode):
    """MODEL in, MODEL out: the same model with its deep layers skipped on some steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelDeepCache",
            display_name="Accel: DeepCache (faster, step cache)",
            category="accel",
            description=(
                "Runs the full model only on the steps that matter and extrapolates the rest: about half of the work "
                "at 30 steps, little effect below about 10 steps (Turbo, Lightning, LCM). The image changes a little. "
                "Works at any size, with any sampler, and with UNets (SD1.5, SDXL) and transformers (Flux, SD3, Wan, "
                "Qwen-Image)."
            ),
            search_aliases=[
                "deep cache",
                "speed up",
                "step cache",
                "teacache",
                "easycache",
                "faster sampling",
                "skip steps",
                "TaylorSeer",
            ],
            inputs=[
                make_input(io.Model, "model", tooltip="The model to speed up. It is not changed itself."),
                make_input(
                    io.Int,
                    "interval",
                    default=DEFAULTS.interval,
                    min=1,
                    max=100,
                    tooltip=(
                        "Run the full model at least once every this many steps. 1 = off; higher is faster and "
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
                        "How much of the model still runs on the steps in between. 0 = automatic: nothing, or the "
                        "outermost layers of a UNet where the sampler adds noise. 1 and up = so many layers, which is "
                        "slower (SD1.5 up to 11, SDXL up to 8, Flux up to 28)."
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
                        "Start skipping here; every step before it runs in full. 0 = from the beginning. Raise it to "
                        "keep the composition closer to the image without this node."
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
                        "Stop skipping here; every step after it runs in full. 1 = to the end. Lower it to keep fine "
                        "detail closer to the image without this node."
                    ),
                ),
                make_input(
                    io.Combo,
                    "schedule",
                    options=list(POLICIES),
                    default=DEFAULTS.schedule,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "adaptive: run the full model as soon as more would change than threshold allows, and after "
                        "interval steps at the latest. uniform: every interval steps, whatever changes; always the "
                        "same speed, riskier at few steps."
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
                        "For the adaptive schedule: how much may change before the full model runs again. Higher = "
                        "faster and less exact; 0 = skip nothing."
                    ),
                ),
                make_input(
                    io.Combo,
                    "between",
                    options=list(BETWEEN),
                    default=DEFAULTS.between,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "What the steps in between use for the part that is skipped. forecast: extrapolate its last "
                        "results. hold: repeat its last result, which takes a little less memory."
                    ),
                ),
                make_input(
                    io.Combo,
                    "quality",
                    options=list(TARGETS),
                    default="off",
                    optional=True,
                    tooltip=(
                        "How close to the image without this node (PSNR of the latent). The run measures what skipping "
                        "costs and skips as much as this allows; schedule and threshold are then not used. off: skip "
                        "by interval and schedule."
                    ),
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[io.Model.Output(display_name="MODEL", tooltip="The model with DeepCache, for a sampler.")],
        )

    @classmethod
    def execute(cls, model, interval, depth, quality="off", **others) -> io.NodeOutput:
        settings = DeepCacheSettings(interval, depth, **others, quality=TARGETS[quality])
        return io.NodeOutput(apply_deep_cache(model, settings, node_id(cls)))
