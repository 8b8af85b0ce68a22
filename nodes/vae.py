"""The Accelerate VAE node."""

from comfy_api.latest import io

from ..accel.core.compile_settings import CompileSettings
from ..accel.hosts.comfyui.models.vae import vae_view
from ..accel.hosts.comfyui.versions import make_input, schema
from ..accel.sizing.vae import AUTO, DEFAULT_AFTER, POLICIES, SKIP, VaePolicy


class AccelVAESkipCompile(io.ComfyNode):
    """VAE in, VAE out: never compiled, or with its blocks compiled once for all sizes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelVAESkipCompile",
            display_name="Accelerate VAE (torch compile)",
            category="accel",
            description=(
                "Chooses whether the VAE is compiled. It runs once per image, so compiling it rarely pays off: the "
                "default leaves it alone, whatever else in the workflow compiles."
            ),
            search_aliases=["vae skip compile", "vae compile", "faster vae", "onediff vae"],
            inputs=[
                make_input(io.Vae, "vae", tooltip="The VAE to use. It is not changed itself."),
                make_input(
                    io.Combo,
                    "policy",
                    options=list(POLICIES),
                    default=SKIP,
                    tooltip=(
                        "skip: compile nothing. auto: compile the decoder once enough images of one size have come, "
                        "unless memory is short or compiled is slower. compile decoder, compile both: compile at the "
                        "first use, for every size and tile."
                    ),
                ),
                make_input(
                    io.Int,
                    "after",
                    default=DEFAULT_AFTER,
                    min=1,
                    max=10000,
                    optional=True,
                    advanced=True,
                    tooltip=("For auto: compile after this many decodes of one size."),
                ),
                make_input(
                    io.Boolean,
                    "free_memory_on_new_size",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "When the size changes, give GPU memory that PyTorch keeps unused back to the system if it is "
                        "more than the new size needs. Helps where another program needs it; costs a moment."
                    ),
                ),
            ],
            outputs=[io.Vae.Output("VAE", tooltip="The VAE, for VAE Decode or VAE Encode.")],
        )

    @classmethod
    def execute(cls, vae, policy, after=DEFAULT_AFTER, free_memory_on_new_size=False) -> io.NodeOutput:
        settings = CompileSettings(measured=policy == AUTO)
        rules = VaePolicy(policy, after, free_memory_on_new_size)
        return io.NodeOutput(vae_view(vae, rules, settings, made_by="AccelVAESkipCompile"))
