"""The Plain VAE node."""

from comfy_api.latest import io

from ..accel.hosts.comfyui.versions import make_input, schema
from ..accel.hosts.comfyui.views import make_uncompiled_vae


class AccelVAESkipCompile(io.ComfyNode):
    """VAE in, VAE out: the same VAE, never compiled."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelVAESkipCompile",
            display_name="Accel: Plain VAE",
            category="accel",
            description=(
                "Keeps the VAE from being compiled, whatever else in the workflow compiles it. It runs once per image,"
                " so compiling it rarely pays off, and a new image size would wait for the compiler."
            ),
            search_aliases=["vae skip compile", "onediff vae"],
            inputs=[make_input(io.Vae, "vae", tooltip="The VAE to use. It is not changed itself.")],
            outputs=[io.Vae.Output("VAE", tooltip="The VAE, for VAE Decode or VAE Encode.")],
        )

    @classmethod
    def execute(cls, vae) -> io.NodeOutput:
        return io.NodeOutput(make_uncompiled_vae(vae))
