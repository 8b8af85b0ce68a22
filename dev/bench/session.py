"""A session of many sizes, batches, prompts, LoRAs and a ControlNet: what eager, core's compile node and ours pay.

ComfyUI's real samplers, on a small UNet of SD1.5's kind and a small Flux, each contender in a new process with an empty
compiler cache. Without a GPU the latents are scaled down with their parity kept (`session_plan.latent_side`).
Compilations are torch's own count of graphs.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from dev import Problem
from dev.tools import command, pack
from dev.tools.comfyui import has_accelerator, tree
from dev.tools.inprocess import boot

from . import child, report
from .compilations import RecompileLimit, empty_inductor_cache, read_counts
from .session_plan import SCALE, STEPS, TOLERANCE, TOTALS, Step, add_waiting, find_failure, latent_side, sum_up

MODELS = ("SD1.5 UNet", "Flux DiT")
CONTENDERS = ("ours", "core")
COLUMNS = (
    *("model", "step", "contender", "first_image_s", "compilations", "graph_breaks"),
    *("max_abs_diff", "relative_diff", "uncompiled"),
)
SAMPLER_STEPS = 3


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser("session", __doc__)
    parser.add_argument("--quick", action="store_true", help="a cheap backend, fewer sampler steps: counts, no speed")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="fp16", help="of the weights (default: fp16)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="beside eager")
    options = parser.parse_args(arguments)
    rows = []
    for model in MODELS:
        for contender in options.contenders:
            own = child.result_of(measure, [model, contender, options.dtype, options.quick], f"{model}, {contender}")
            has_eager = any(row["model"] == model for row in rows)
            rows += [row for row in own if row["contender"] == contender or not has_eager]
            if options.json:
                report.write(options.json, rows, tree())  # also of a run that is stopped
    print(f"\n{report.table([_readable(row) for row in rows], COLUMNS)}\n")
    print(report.table(sum_up(rows, "graph_breaks", "waiting_s")))
    print(f"relative_diff: from eager's image, of its largest value; tolerance {TOLERANCE[options.dtype]:.0e}.")
    print(TOTALS)
    print("waiting_s: by how much the images that compiled took longer than eager's.")
    report.finish(options.json, rows, find_failure(rows))
    if "ours" not in options.contenders:
        return
    print("Ours compiled in the first step of each model alone, broke no graph, and is within tolerance in every step.")


def measure(model: str, contender: str, dtype: str, quick: bool) -> list[report.Row]:
    """Eager's rows and the contender's of a session on one model, run in this process, with seconds of waiting."""
    boot(cpu=not has_accelerator())
    pack.load()
    import torch
    from kit import tiny_models

    if quick:
        torch.set_num_threads(1)  # Layers this small gain nothing from more, and lose a lot on a machine that is busy.
    (family,) = [each for each in (tiny_models.UNET_FAMILY, tiny_models.FLUX_FAMILY) if each.name == model]
    rows: list[report.Row] = []
    images: dict[str, Any] = {}
    with empty_inductor_cache(), RecompileLimit() as limit:
        for name in ("eager", contender):
            session = Session(family, name, dtype, quick, limit)
            for step in STEPS:
                rows.append(session.row(step, images))
                print(*_readable(rows[-1]).values(), sep="  ", file=sys.stderr, flush=True)
    _check_steps(model, images)
    return add_waiting(rows)


class Session:
    """One contender's run through the steps on one model. Nothing that it compiles helps the next contender.

    A contender's node is applied anew whenever the model that goes into it has changed, as ComfyUI does.
    """

    def __init__(self, family, contender: str, dtype: str, quick: bool, limit: RecompileLimit):
        import torch

        torch._dynamo.reset()
        limit.heard = False
        self._limit = limit
        self._family = family
        self._contender = contender
        self._dtype = dtype
        self._sampler_steps = 2 if quick else SAMPLER_STEPS
        self._apply = node(contender, "eager" if quick else "inductor")
        self._control_net = None
        self._load()

    def row(self, step: Step, eager: dict[str, Any]) -> report.Row:
        """The step's row, once its image is made. eager: images by step, which the contender eager fills."""
        if step.reload:
            self._load()
        before = read_counts()
        started = time.perf_counter()
        image = self.image(step)
        seconds = time.perf_counter() - started
        spent = read_counts().since(before)
        if self._contender == "eager":
            eager[step.name] = image
        expected = eager[step.name]
        difference = (image - expected).abs().max().item()
        return {
            "model": self._family.name,
            "step": step.name,
            "contender": self._contender,
            "first_image_s": round(seconds, 3),
            "compilations": spent.graphs,
            "graph_breaks": spent.breaks,
            "max_abs_diff": difference,
            "relative_diff": difference / expected.abs().max().item(),
            "uncompiled": spent.uncompiled,
            "gave_up": self._limit.heard,
            "dtype": self._dtype,
        }

    def image(self, step: Step):
        """The step's finished latent, on the CPU in float32."""
        import torch

        with torch.inference_mode():  # as ComfyUI runs every node
            return self._image(step).float().cpu()

    def _image(self, step: Step):
        import torch
        from kit import tiny_models

        scale = 1 if has_accelerator() else SCALE
        channels = self._model.get_model_object("latent_format").latent_channels
        latent = torch.zeros(step.batch, channels, latent_side(step.height, scale), latent_side(step.width, scale))
        positive = self._family.conditioning(step.tokens, seed=1)
        negative = self._family.conditioning(77, seed=2)
        if step.control:
            if self._control_net is None:
                self._control_net = self._family.control_net(tiny_models.DTYPES[self._dtype])
            positive = tiny_models.with_control(positive, self._control_net)
        model = self._with_lora(step.lora)
        if step.apart:
            model = kept_apart(model)
        image = tiny_models.sample_latent(model, latent, positive, negative, self._sampler_steps)
        if not image.isfinite().all():
            raise Problem(f"{self._family.name}, {self._contender}, step {step.name}: the image is not finite.")
        return image

    def _load(self) -> None:
        """Load the checkpoint, and unload the previous copy."""
        import comfy.model_management
        from kit import tiny_models

        comfy.model_management.unload_all_models()
        self._model = self._family.load(tiny_models.DTYPES[self._dtype])
        self._applied: dict[Any, Any] = {}

    def _with_lora(self, lora: tuple[int, float] | None):
        """The contender's model, with the LoRA as core's LoraLoaderModelOnly puts it on."""
        import comfy.sd
        from kit import tiny_models

        if lora not in self._applied:
            model = self._model
            if lora is not None:
                weights = tiny_models.lora(model, seed=lora[0])
                model, _ = comfy.sd.load_lora_for_models(model, None, weights, lora[1], 0)
            self._applied[lora] = self._apply(model)
        return self._applied[lora]


def node(contender: str, backend: str) -> Callable[[Any], Any]:
    """From a ModelPatcher to the one that the contender's node gives; backend: inductor, or eager for graphs alone."""
    if contender == "eager":
        return lambda model: model
    if contender == "core":
        from comfy_api.torch_helpers import set_torch_compile_wrapper
        from comfy_extras.nodes_torch_compile import TorchCompileModel

        def capture(model):
            # The node's own work, with a backend that its menu does not offer.
            model = model.clone()
            set_torch_compile_wrapper(model=model, backend=backend)
            return model

        return capture if backend == "eager" else lambda model: TorchCompileModel.execute(model, backend).args[0]
    from comfy_accel.accel.cache.graph_cache import GraphCache
    from comfy_accel.accel.core.compile_settings import CompileSettings
    from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate

    cache = GraphCache()
    return lambda model: accelerate(model, CompileSettings(backend=backend), cache)


def kept_apart(model):
    """A clone of the ModelPatcher whose cond and uncond core does not join into one batch, as where memory is short."""
    from comfy.patcher_extension import WrappersMP

    base = model.model

    def calc_cond_batch(executor, *args, **kwargs):
        base.memory_required = lambda *args, **kwargs: float("inf")
        try:
            return executor(*args, **kwargs)
        finally:
            del base.memory_required

    split = model.clone()
    split.add_wrapper(WrappersMP.CALC_COND_BATCH, calc_cond_batch)
    return split


def _check_steps(family: str, images: dict[str, Any]) -> None:
    """A step that should change the image and does not has tested nothing."""
    plain = images[STEPS[0].name]
    for step in STEPS:
        if step.changes and (images[step.name] - plain).abs().max() < 1e-3 * plain.abs().max():
            raise Problem(f"{family}, step {step.name}: the eager image is the plain one, so the step tests nothing.")


def _readable(row: report.Row) -> report.Row:
    return {name: report.scientific(row[name]) if name.endswith("_diff") else row[name] for name in COLUMNS}


if __name__ == "__main__":
    sys.exit(command.run(main))
