"""The Speed Up node: everything that this pack does for a model, by one choice."""

from comfy_api.latest import io

from ..accel.core.compile_settings import CompileSettings
from ..accel.hosts.comfyui.models.accelerate import accelerate
from ..accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from ..accel.hosts.comfyui.running_prompt import is_missing_input
from ..accel.hosts.comfyui.versions import make_input, schema
from ..accel.hosts.comfyui.views import make_uncompiled_vae
from ..accel.step_cache.config import QUALITIES


class AccelSpeedUp(io.ComfyNode):
    """MODEL in, MODEL out, and a VAE beside it: compiled, captured, and with steps skipped as far as allowed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelSpeedUp",
            display_name="Accel: Speed Up (torch compile)",
            category="accel",
            description=(
                "Makes the model faster: compiles it once for every size, batch and LoRA, and can skip work that "
                "barely changes between steps. Place it after the loaders and LoRAs, before the sampler. After each "
                "image the node says what it gained."
            ),
            search_aliases=(
                "faster, fast, slow, speed up, optimize, accelerate, performance, compile, torch compile, tensorrt, "
                "turbo, cuda graph, teacache, wavespeed, first block cache, easycache, deepcache, sage, sageattention"
            ).split(", "),
            inputs=[
                make_input(io.Model, "model", tooltip="The model to speed up. It is not changed itself."),
                make_input(
                    io.Combo,
                    "quality",
                    options=list(QUALITIES),
                    default=next(iter(QUALITIES)),
                    tooltip=(
                        "Exact: same image, up to rounding. Balanced: also skips steps, hard to see (40 dB). Fast: "
                        "skips more, small changes (35 dB). Few are skipped below 10 steps."
                    ),
                ),
                make_input(
                    io.Vae,
                    "vae",
                    optional=True,
                    tooltip="Optional. Handed on, and kept from being compiled, as by Plain VAE.",
                ),
            ],
            outputs=[
                io.Model.Output("MODEL", tooltip="The faster model, for a sampler or further model nodes."),
                io.Vae.Output("VAE", tooltip="The VAE given, for VAE Decode."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs) -> bool:
        """What was made where nobody reads the VAE output is not for a prompt that does, and has no VAE."""
        return is_missing_input("vae", used_output=1)

    @classmethod
    def execute(cls, model, quality, vae=None) -> io.NodeOutput:
        if is_missing_input("vae", used_output=1):  # said before sampling, on this node: VAE Decode is not to blame
            raise ValueError("Speed Up has no VAE for its VAE output: connect one to its input vae.")
        settings = CompileSettings(measured=True, beside=True)
        faster = accelerate(model, settings, made_by="AccelSpeedUp", graphs=True, quality=quality)
        caching = QUALITIES[quality]
        if caching is not None:
            faster = apply_deep_cache(faster, caching, made_by="AccelSpeedUp", quality=quality)
        return io.NodeOutput(faster, None if vae is None else make_uncompiled_vae(vae))
