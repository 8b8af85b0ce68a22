"""The DeepCache node."""

from comfy_api.latest import io

from ..accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from ..accel.hosts.comfyui.versions import make_input, schema
from ..accel.step_cache.config import BALANCED, FAST, DeepCacheSettings

QUALITIES = {"Balanced": BALANCED, "Fast": FAST, "50 dB": 50.0, "45 dB": 45.0, "30 dB": 30.0}
"""Choices of `quality`, each with the dB that it plans for."""


class AccelDeepCache(io.ComfyNode):
    """MODEL in, MODEL out: the same model, which is not called in some steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelDeepCache",
            display_name="Accel: DeepCache (step cache)",
            category="accel",
            description=(
                "Calls the model only in the steps that matter and extrapolates its result in the others: up to half "
                "of the steps from 20 on, and few or none below about 10 (Turbo, Lightning, LCM). The image changes. "
                "Works with any model, size and sampler, and with ControlNets."
            ),
            search_aliases=["deep cache", "step cache", "teacache", "easycache", "skip steps", "TaylorSeer"],
            inputs=[
                make_input(io.Model, "model", tooltip="The model to speed up. It is not changed itself."),
                make_input(
                    io.Combo,
                    "quality",
                    options=list(QUALITIES),
                    default=next(iter(QUALITIES)),
                    optional=True,
                    tooltip=(
                        "How close to stay to the image without this node: Balanced plans for 40 dB (PSNR of the "
                        "latent), Fast for 35. More dB skip less. An estimate, not a promise."
                    ),
                ),
                make_input(
                    io.Float,
                    "start_percent",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "Start skipping here; every step before it runs in full. 0 = after the first three steps and "
                        "the first tenth. Raise it to keep the composition closer to the image without this node."
                    ),
                ),
                make_input(
                    io.Float,
                    "end_percent",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "Stop skipping here; every step after it runs in full. 1 = to the last step, which is always "
                        "full. Lower it to keep fine detail closer to the image without this node."
                    ),
                ),
            ],
            outputs=[io.Model.Output(display_name="MODEL", tooltip="The model with DeepCache, for a sampler.")],
        )

    @classmethod
    def validate_inputs(cls, quality="Balanced") -> bool | str:
        if quality in QUALITIES:
            return True
        return f"DeepCache: quality is {quality!r}; it must be one of: {', '.join(QUALITIES)}."

    @classmethod
    def execute(cls, model, quality="Balanced", **others) -> io.NodeOutput:
        settings = DeepCacheSettings(QUALITIES[quality], **others)
        return io.NodeOutput(apply_deep_cache(model, settings, made_by="AccelDeepCache"))
