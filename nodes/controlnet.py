"""The Accelerate ControlNet node."""

from comfy_api.latest import io

from ..accel.block_runner import CompileSettings
from ..accel.compilers import BACKENDS
from ..accel.hosts.comfyui.controlnet import accelerate_control
from ..accel.hosts.comfyui.versions import check_options, make_input, schema
from .accelerate_model import ANY_SIZE, ON_TROUBLE, RUN_EAGERLY, SHAPES, STOP


class AccelControlNet(io.ComfyNode):
    """CONTROL_NET in, CONTROL_NET out: the same ControlNet with its repeated blocks compiled, each kind once."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelControlNet",
            display_name="Accelerate ControlNet",
            category="accel",
            description=(
                "Compiles each kind of repeated block of a ControlNet once, the first time it runs, and uses it for "
                "every size, batch, strength and step range after that. Place it between the ControlNet's loader "
                "and Apply ControlNet. The model has a node of its own, Accelerate Model."
            ),
            search_aliases=["controlnet", "t2i adapter", "control lora", "compile", "speed up", "onediff controlnet"],
            inputs=[
                make_input(
                    io.ControlNet,
                    "control_net",
                    tooltip=(
                        "The ControlNet, Control-LoRA, T2I-Adapter or union ControlNet to make faster. "
                        "It is not changed itself."
                    ),
                ),
                make_input(
                    io.Combo,
                    "shapes",
                    options=list(SHAPES),
                    default=ANY_SIZE,
                    tooltip=(
                        "any size: compile once, then every image size and batch runs without compiling again. "
                        "exact size: compile anew for each size; only worth it when one size is all you use."
                    ),
                ),
                make_input(
                    io.Combo,
                    "backend",
                    options=list(BACKENDS),
                    default=BACKENDS[0],
                    tooltip=(
                        "inductor: torch's compiler, the fast one. eager: capture the blocks without compiling "
                        "them, to find out whether a problem comes from the compiler."
                    ),
                ),
                make_input(
                    io.Combo,
                    "on_trouble",
                    options=list(ON_TROUBLE),
                    default=RUN_EAGERLY,
                    advanced=True,
                    tooltip=(
                        "What happens when a block cannot be compiled. run eagerly: it runs as without this node and "
                        "the log says why. stop with the reason: the prompt ends with the reason."
                    ),
                ),
                make_input(
                    io.Boolean,
                    "check_gain",
                    default=True,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "Run a few calls of each compiled kind both ways, again where images are twice as large or "
                        "half, and leave it uncompiled at sizes where that is faster on this machine, or everywhere "
                        "if the result is another."
                    ),
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[io.ControlNet.Output("CONTROL_NET", tooltip="The accelerated ControlNet, for Apply ControlNet.")],
        )

    @classmethod
    def validate_inputs(cls, shapes=None, backend=None, on_trouble=None) -> bool | str:
        return check_options(shapes=(shapes, SHAPES), backend=(backend, BACKENDS), on_trouble=(on_trouble, ON_TROUBLE))

    @classmethod
    def execute(cls, control_net, shapes, backend, on_trouble, check_gain=True) -> io.NodeOutput:
        settings = CompileSettings(
            backend=backend,
            any_size=shapes == ANY_SIZE,
            stop_on_trouble=on_trouble == STOP,
            measured=check_gain and backend == BACKENDS[0],  # what is not compiled can gain nothing
        )
        node_id = cls.hidden.unique_id if cls.hidden else None
        return io.NodeOutput(accelerate_control(control_net, settings, node_id=node_id))
