"""The Accelerate Model node."""

from comfy_api.latest import io

from ..accel.hosts.comfyui.models.accelerate import accelerate
from ..accel.hosts.comfyui.versions import make_input, schema
from .compile_inputs import how_to_compile, settings

GRAPHS = ("off", "auto")


class AccelModel(io.ComfyNode):
    """MODEL in, MODEL out: the same model with its repeated blocks compiled, each kind once."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelModel",
            display_name="Accelerate Model (torch compile)",
            category="accel",
            description=(
                "Compiles each block type of the model once, during the first image. Changing size, batch, prompt "
                "length or LoRA never recompiles. Place it after the loaders and LoRAs, before the sampler."
            ),
            search_aliases=["torch.compile", "onediff"],
            inputs=[
                make_input(io.Model, "model", tooltip="The model to make faster. It is not changed itself."),
                *how_to_compile(),
                make_input(
                    io.Combo,
                    "graphs",
                    options=list(GRAPHS),
                    default=GRAPHS[0],
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "auto: replay whole model calls as CUDA graphs (NVIDIA; turn them on in the Accel tab). Most "
                        "gain at small sizes; takes GPU memory."
                    ),
                ),
            ],
            outputs=[io.Model.Output("MODEL", tooltip="The accelerated model, for a sampler or further model nodes.")],
        )

    @classmethod
    def execute(cls, model, graphs=GRAPHS[0], **compiling) -> io.NodeOutput:
        has_graphs = graphs != GRAPHS[0]
        return io.NodeOutput(accelerate(model, settings(**compiling), made_by="AccelModel", graphs=has_graphs))
