"""The VAE Skip Compile node."""

from comfy_api.latest import io

from ..accel.block_runner import CompileSettings
from ..accel.hosts.comfyui.vae import compile_decoder, skip_compile
from ..accel.hosts.comfyui.versions import check_options, make_input, schema

POLICIES = SKIP, COMPILE_DECODER = ("skip", "compile decoder")


class AccelVAESkipCompile(io.ComfyNode):
    """VAE in, VAE out: kept out of compiling, or with its decoder's blocks compiled once for all sizes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelVAESkipCompile",
            display_name="VAE Skip Compile",
            category="accel",
            description=(
                "Decides whether the VAE is compiled. It runs once per image, so compiling it rarely pays back: "
                "skip keeps it out, whatever else in the workflow compiles."
            ),
            search_aliases=["vae", "compile", "skip compile", "onediff vae"],
            inputs=[
                make_input(io.Vae, "vae", tooltip="The VAE to use. It is not changed itself."),
                make_input(
                    io.Combo,
                    "policy",
                    options=list(POLICIES),
                    default=SKIP,
                    tooltip=(
                        "skip: nothing in this VAE is compiled. compile decoder: the decoder's blocks are compiled "
                        "once and then serve every size and tile; worth it for long batches."
                    ),
                ),
            ],
            outputs=[io.Vae.Output("VAE", tooltip="The VAE, for VAE Decode or VAE Encode.")],
        )

    @classmethod
    def validate_inputs(cls, policy=None) -> bool | str:
        return check_options(policy=(policy, POLICIES))

    @classmethod
    def execute(cls, vae, policy) -> io.NodeOutput:
        if policy == COMPILE_DECODER:
            return io.NodeOutput(compile_decoder(vae, CompileSettings()))
        return io.NodeOutput(skip_compile(vae))
