"""A session in a diffusers script: plain, diffusers' compile_repeated_blocks, torch.compile of the whole model, ours.

Small text-to-image pipelines of SDXL's and Flux's layout with random weights, in float32 on the CPU, at sizes scaled
down with their parity kept (`session_plan.latent_side`). They are given a prompt's features in one row, also for two
images of it. Every contender runs in a fresh process with an empty compiler cache, one at a time, and without saved
graphs.
"""

import importlib.util
import sys
import tempfile
import time
from typing import NamedTuple

from dev import Problem
from dev.tools import command, pack

from . import child, report
from .compilations import RecompileLimit, empty_inductor_cache, read_counts
from .session_plan import TOTALS, find_failure, latent_side, sum_up

CONTENDERS = PLAIN, BLOCKS, BLOCKS_DYNAMIC, WHOLE, OURS = ("plain", "blocks", "blocks dynamic", "whole", "ours")
LEGEND = f"""\
blocks: compile_repeated_blocks(fullgraph=True), as diffusers' guide has it; dynamic: with dynamic=True too.
whole: the model's compile(), which is torch.compile(dynamic=None). ours: accelerate_pipeline(pipe, ignores=("vae",)).
{TOTALS} warm_s: of all, each made once more right after it was made first."""

UNET = {
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (32, 64),
    "transformer_layers_per_block": (1, 2),
    "attention_head_dim": (2, 4),
    "cross_attention_dim": 64,
    "projection_class_embeddings_input_dim": 32 + 6 * 256,
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
"""Two levels of SDXL's three: a compiler takes long for a whole UNet with varying sizes."""
TRANSFORMER = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 14, 14),
    "guidance_embeds": True,
}
PROMPTS = {"prompt_embeds": (1, 77, 64), "pooled_prompt_embeds": (1, 32)}
"""And the negative ones, which Flux does without."""
ABSENT = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


class Step(NamedTuple):
    """One call of the pipeline, pixels. lora: the strength of a LoRA, which is loaded where it first comes."""

    name: str
    width: int = 1024
    height: int = 1024
    batch: int = 1
    lora: float | None = None


STEPS = (
    Step("1024x1024"),
    Step("512x2048", 512, 2048),
    Step("720x960", 720, 960),
    Step("batch 2", batch=2),
    Step("LoRA at 0.8", lora=0.8),
    Step("LoRA at 0.3", lora=0.3),
    Step("LoRA off"),
)


def main(arguments: list[str] | None = None) -> None:
    options = report.parser("diffusers", __doc__).parse_args(arguments)
    missing = [name for name in ("diffusers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        raise Problem(f"This needs {' and '.join(missing)}: install tests/requirements.txt beside dev/bench/'s.")
    rows: list[report.Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        for contender in CONTENDERS:
            with empty_inductor_cache():
                made = child.result_of(measure, [contender, f"{work}/plain.pt"], contender, {"ACCEL_STORE": "off"})
            rows += made
            for row in sum_up(made, "warm_s"):
                report.tell(row, list(row))
    print(f"\n{report.table(sum_up(rows, 'warm_s'))}\n\n{LEGEND}")
    report.finish(options.json, rows, find_failure(rows, STEPS[0].name))
    print("Ours compiled in the first image alone, and is within tolerance in every one.")


def measure(contender: str, expected: str) -> list[report.Row]:
    """A row per step of one contender's session, in this process; plain writes its images to the file `expected`."""
    pack.load()
    import torch

    torch.set_num_threads(1)  # Layers this small gain nothing from more.
    images = {} if contender == PLAIN else torch.load(expected)
    rows = []
    for model, (make, steps) in MODELS.items():
        pipe = make()
        with RecompileLimit() as limit:
            _accelerate(pipe, contender)
            for step in steps:
                before, uncompiled = read_counts(), _count_uncompiled()
                image, seconds = _timed(pipe, step)
                _, warm = _timed(pipe, step)
                wanted = images.setdefault(f"{model}, {step.name}", image)
                difference = (image - wanted).abs().max() / wanted.abs().max()
                row = {"model": model, "contender": contender, "step": step.name, "batch": step.batch}
                compiled, uncompiled = read_counts().since(before).graphs, _count_uncompiled() - uncompiled
                row |= {"compilations": compiled, "uncompiled": uncompiled}
                row |= {"gave_up": limit.heard, "first_image_s": round(seconds, 3), "warm_s": round(warm, 4)}
                rows.append({**row, "relative_diff": difference.item(), "dtype": "fp32"})
    if contender == PLAIN:
        torch.save(images, expected)
    return rows


def _sdxl():
    """Without text encoder and VAE; the same weights every time."""
    import diffusers
    import torch

    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(sample_size=32, **UNET).eval()
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, steps_offset=1, timestep_spacing="leading"
    )
    pipe = diffusers.StableDiffusionXLPipeline(**dict.fromkeys(ABSENT), unet=unet, scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _flux():
    """As `_sdxl`."""
    import diffusers
    import torch

    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(**TRANSFORMER).eval()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.FluxPipeline(**dict.fromkeys(ABSENT), transformer=transformer, scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


MODELS = {"SDXL": (_sdxl, STEPS), "Flux": (_flux, STEPS[:4])}


def _network(pipe):
    return getattr(pipe, "unet", None) or pipe.transformer


def _accelerate(pipe, contender: str) -> None:
    if contender in (BLOCKS, BLOCKS_DYNAMIC):
        _network(pipe).compile_repeated_blocks(fullgraph=True, dynamic=True if contender == BLOCKS_DYNAMIC else None)
    elif contender == WHOLE:
        _network(pipe).compile()
    elif contender == OURS:
        from comfy_accel.accel import accelerate_pipeline

        accelerate_pipeline(pipe, ignores=("vae",))


def _count_uncompiled() -> int:
    """Calls of blocks that our engine ran uncompiled, but for those measured to be slower compiled."""
    from comfy_accel.accel.core.fallbacks import fallbacks

    return sum(row["calls"] for row in fallbacks.rows() if row["code"] != "slower")


def _timed(pipe, step: Step):
    """The latents of a step, and the seconds they took, a LoRA's loading included."""
    import torch

    random = torch.Generator().manual_seed(3)
    prompts = {
        f"{sign}{name}": torch.randn(shape, generator=random)
        for sign in (("", "negative_") if hasattr(pipe, "unet") else ("",))
        for name, shape in PROMPTS.items()
    }
    started = time.perf_counter()
    _set_lora(_network(pipe), step.lora)
    image = pipe(
        width=8 * latent_side(step.width),
        height=8 * latent_side(step.height),
        num_images_per_prompt=step.batch,
        num_inference_steps=2,
        output_type="latent",
        generator=torch.Generator().manual_seed(1),
        **prompts,
    ).images
    return image, time.perf_counter() - started


def _set_lora(network, strength: float | None) -> None:
    """A LoRA with random weights, by PEFT, in the attention; None takes it out."""
    import torch
    from peft import LoraConfig

    loaded = bool(getattr(network, "peft_config", None))
    if strength is None:
        if loaded:
            network.unload_lora()
        return
    if not loaded:
        torch.manual_seed(2)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        # Not as PEFT starts training, with one half zero.
        network.add_adapter(LoraConfig(r=8, target_modules=targets, init_lora_weights=False), "lora")
        network.requires_grad_(False)
    network.set_adapters("lora", strength)


if __name__ == "__main__":
    sys.exit(command.run(main))
