"""The Accelerate Model node."""

from comfy_api.latest import io

from ..accel.block_runner import CompileSettings
from ..accel.compilers import BACKENDS
from ..accel.graph_cache import DEFAULT_MAX_BYTES, shared
from ..accel.hosts.comfyui.accelerate import accelerate
from ..accel.hosts.comfyui.versions import check_options, make_input, schema

SHAPES = ANY_SIZE, EXACT_SIZE = ("any size", "exact size")
ON_TROUBLE = RUN_EAGERLY, STOP = ("run eagerly", "stop with the reason")


class AccelModel(io.ComfyNode):
    """MODEL in, MODEL out: the same model with its repeated blocks compiled, each kind once."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelModel",
            display_name="Accelerate Model",
            category="accel",
            description=(
                "Compiles each kind of repeated block of the model once, during the first image, and uses it for "
                "every size, batch, prompt length and LoRA after that. Place it after the loaders and LoRAs, "
                "before the sampler."
            ),
            search_aliases=["compile", "torch.compile", "speed up", "faster", "onediff"],
            inputs=[
                make_input(io.Model, "model", tooltip="The model to make faster. It is not changed itself."),
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
                    io.Int,
                    "min_repetitions",
                    default=1,
                    min=1,
                    max=100,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "Kinds of blocks that occur fewer times in the model than this stay uncompiled. "
                        "A higher number shortens the first image and gives a little less speed."
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
                make_input(
                    io.Int,
                    "cache_mb",
                    default=DEFAULT_MAX_BYTES >> 20,
                    min=0,
                    max=1 << 20,
                    step=64,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "How much memory compiled graphs may keep, in MB, for all models of this ComfyUI together: the "
                        "node that ran last decides. What was used longest ago goes first; what one image needs beyond "
                        "it runs uncompiled; 0 compiles nothing."
                    ),
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[io.Model.Output("MODEL", tooltip="The accelerated model, for a sampler or further model nodes.")],
        )

    @classmethod
    def validate_inputs(cls, shapes=None, backend=None, on_trouble=None) -> bool | str:
        return check_options(shapes=(shapes, SHAPES), backend=(backend, BACKENDS), on_trouble=(on_trouble, ON_TROUBLE))

    @classmethod
    def execute(
        cls, model, shapes, backend, on_trouble, min_repetitions=1, check_gain=True, cache_mb=DEFAULT_MAX_BYTES >> 20
    ) -> io.NodeOutput:
        settings = CompileSettings(
            backend=backend,
            any_size=shapes == ANY_SIZE,
            stop_on_trouble=on_trouble == STOP,
            min_repetitions=min_repetitions,
            measured=check_gain and backend == BACKENDS[0],  # what is not compiled can gain nothing
        )
        shared.set_budget(max_bytes=cache_mb << 20)
        return io.NodeOutput(accelerate(model, settings, node_id=cls.hidden.unique_id if cls.hidden else None))
