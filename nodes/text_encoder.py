"""The Text Encoder node."""

from comfy_api.latest import io

from ..accel.hosts.comfyui.text_encoder import accelerate_clip
from ..accel.hosts.comfyui.versions import make_input, schema
from .compile_inputs import how_to_compile, settings


class AccelTextEncoder(io.ComfyNode):
    """CLIP in, CLIP out: the same text encoders with their repeated blocks compiled, each kind once."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelTextEncoder",
            display_name="Accel: Text Encoder (torch compile)",
            category="accel",
            description=(
                "Compiles text encoders (CLIP, T5, Qwen, Gemma, Mistral and others) once for every prompt and LoRA. "
                "They run once per new prompt, so it can only pay off where prompts change often and encoding takes "
                "seconds. Place it after the loaders and LoRAs, before CLIP Text Encode."
            ),
            search_aliases=["clip compile", "faster clip", "t5", "qwen", "gemma", "prompt", "torch.compile"],
            inputs=[
                make_input(io.Clip, "clip", tooltip="The text encoders to make faster. They are not changed."),
                *how_to_compile(),
            ],
            outputs=[io.Clip.Output("CLIP", tooltip="The accelerated text encoders, for CLIP Text Encode.")],
        )

    @classmethod
    def execute(cls, clip, **compiling) -> io.NodeOutput:
        return io.NodeOutput(accelerate_clip(clip, settings(**compiling), made_by="AccelTextEncoder"))
