"""The Accelerate ControlNet node."""

from comfy_api.latest import io

from ..accel.hosts.comfyui.models.controlnet import accelerate_control
from ..accel.hosts.comfyui.versions import make_input, schema
from .compile_inputs import how_to_compile, settings


class AccelControlNet(io.ComfyNode):
    """CONTROL_NET in, CONTROL_NET out: the same ControlNet with its repeated blocks compiled, each kind once."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelControlNet",
            display_name="Accelerate ControlNet (torch compile)",
            category="accel",
            description=(
                "Compiles ControlNets, Control-LoRAs and T2I-Adapters once for every size, batch, strength and step "
                "range. Place it between the ControlNet's loader and Apply ControlNet. For the model itself use Speed "
                "Up or Accelerate Model."
            ),
            search_aliases=["controlnet", "t2i adapter", "control lora", "compile", "speed up", "onediff controlnet"],
            not_idempotent=True,  # else core hands a second node with equal inputs what the first made, with its id
            inputs=[
                make_input(
                    io.ControlNet,
                    "control_net",
                    tooltip=(
                        "The ControlNet, Control-LoRA, T2I-Adapter or union ControlNet to make faster. "
                        "It is not changed itself."
                    ),
                ),
                *how_to_compile(),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[io.ControlNet.Output("CONTROL_NET", tooltip="The accelerated ControlNet, for Apply ControlNet.")],
        )

    @classmethod
    def execute(cls, control_net, **compiling) -> io.NodeOutput:
        node_id = cls.hidden.unique_id if cls.hidden else None  # not looked up: several may lead to one sampler
        return io.NodeOutput(accelerate_control(control_net, settings(**compiling), node_id=node_id))
