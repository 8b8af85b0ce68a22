"""The Accelerate Model node."""

from comfy_api.latest import io

from ..accel.hosts.comfyui.models.accelerate import accelerate
from ..accel.hosts.comfyui.preferences import FROM_SETTINGS, set_node_budget
from ..accel.hosts.comfyui.versions import check_options, make_input, schema
from .compile_inputs import check, check_gain_input, how_to_compile, settings

GRAPHS = ("off", "auto")


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
                *how_to_compile(),
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
                check_gain_input(),
                make_input(
                    io.Int,
                    "cache_mb",
                    default=FROM_SETTINGS,
                    min=FROM_SETTINGS,
                    max=1 << 20,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "How much memory compiled graphs may keep, in MB, for all models of this ComfyUI together. "
                        "-1 = as ComfyUI's settings say (Accel); any other number counts until another node runs. What "
                        "was used longest ago goes first; what one image needs beyond it runs uncompiled; 0 compiles "
                        "nothing."
                    ),
                ),
                make_input(
                    io.Combo,
                    "graphs",
                    options=list(GRAPHS),
                    default=GRAPHS[0],
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "auto: on NVIDIA cards capture the work of a whole model call once for each size (a CUDA "
                        "graph) and replay it, which saves the time between kernels, most of it at small sizes. "
                        "Wants ComfyUI started with --disable-cuda-malloc. Takes GPU memory, which ComfyUI gets "
                        "back when it needs it; what cannot be captured runs as with off. off is the default as "
                        "long as this is untested on real cards."
                    ),
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[io.Model.Output("MODEL", tooltip="The accelerated model, for a sampler or further model nodes.")],
        )

    @classmethod
    def validate_inputs(cls, shapes=None, backend=None, on_trouble=None, graphs=None) -> bool | str:
        valid = check(shapes, backend, on_trouble)
        return check_options(graphs=(graphs, GRAPHS)) if valid is True else valid

    @classmethod
    def execute(
        cls,
        model,
        shapes,
        backend,
        on_trouble,
        min_repetitions=1,
        check_gain=True,
        cache_mb=FROM_SETTINGS,
        graphs=GRAPHS[0],
    ) -> io.NodeOutput:
        compiling = settings(shapes, backend, on_trouble, check_gain, min_repetitions)
        set_node_budget(cache_mb)
        node_id = cls.hidden.unique_id if cls.hidden else None
        return io.NodeOutput(accelerate(model, compiling, node_id=node_id, graphs=graphs != GRAPHS[0]))
