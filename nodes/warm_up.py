"""The Warm Up Graphs node."""

from comfy_api.latest import io

from ..accel.cache.graph_cache import shared
from ..accel.core.sentences import count_nouns
from ..accel.hosts.comfyui.models.warm_up import parse_numbers, parse_sizes, warm_up
from ..accel.hosts.comfyui.versions import make_input, schema


class AccelWarmUpGraphs(io.ComfyNode):
    """MODEL in, the same MODEL out, after sampling and discarding a step at each size."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AccelWarmUpGraphs",
            display_name="Accel: Warm Up Graphs",
            category="accel/tools",
            description=(
                "Compiles ahead of time so your first image doesn't wait: samples one step at each size and throws it "
                'away. With "any size" one size compiles everything; with "exact size" list all of them.'
            ),
            search_aliases=["warmup", "precompile", "compile", "graphs"],
            inputs=[
                make_input(
                    io.Model,
                    "model",
                    tooltip="The model to warm up, from Speed Up, Accelerate Model or a node after them.",
                ),
                make_input(
                    io.Conditioning,
                    "conditioning",
                    tooltip="Any prompt for this model, from CLIP Text Encode; its words do not matter.",
                ),
                make_input(
                    io.String,
                    "sizes",
                    default="1024x1024",
                    multiline=True,
                    tooltip=(
                        "Sizes in pixels, width x height, with commas or line breaks between them: 1024x1024, 720x960."
                    ),
                ),
                make_input(io.String, "batches", default="1", tooltip="Batch sizes, with commas between them: 1, 4."),
                make_input(
                    io.String,
                    "prompt_lengths",
                    default="",
                    optional=True,
                    advanced=True,
                    tooltip="Prompt lengths in tokens: 77, 154. Empty takes the length of the prompt given.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL", tooltip="The model given; connect it to the sampler."),
                io.String.Output(display_name="report", tooltip="What was run and compiled, in one sentence."),
            ],
        )

    @classmethod
    def validate_inputs(cls, sizes=None, batches=None, prompt_lengths=None) -> bool | str:
        try:
            parsed = _parse_runs(sizes or "", batches or "", prompt_lengths or "")
            if sizes is not None and not parsed[0]:  # None is linked
                return "Give at least one size: width x height in pixels, as in 1024x1024."
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, model, conditioning, sizes, batches, prompt_lengths="") -> io.NodeOutput:
        before = shared.statistics()["compilations"]
        runs, seconds = warm_up(model, conditioning, *_parse_runs(sizes, batches, prompt_lengths))
        compiled = shared.statistics()["compilations"] - before
        text = f"{count_nouns(runs, 'run')} in {seconds:.1f} s, {count_nouns(compiled, 'graph')} compiled."
        return io.NodeOutput(model, text)


def _parse_runs(sizes: str, batches: str, prompt_lengths: str) -> tuple:
    """The three lists, from text. Raises ValueError: one is invalid."""
    return parse_sizes(sizes), parse_numbers(batches, "batches"), parse_numbers(prompt_lengths, "prompt lengths")
