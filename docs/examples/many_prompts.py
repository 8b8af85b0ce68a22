"""Images of ten thousand prompts with Ray Data: batches of one shape, on every GPU; stopped, it goes on where it was.

    python docs/examples/many_prompts.py prompts.jsonl --model PATH --workers 4 --output images

A line of prompts.jsonl is {"prompt": "a lake", "width": 1200, "height": 800, "seed": 1}. PATH is an SDXL pipeline's
folder (`save_pretrained`), the same on every machine, and so is the output's. Without them, a tiny pipeline with random
weights makes noise of made-up prompts. Needs the packages comfy-accel[ray,diffusers] (this repository's wheel).

Each prompt gets the trained size nearest to its own. Run the same command once more after a stop, however it came: an
image is there whole or not at all, and what is there is not made again.
"""

import argparse
import hashlib
import json
import math
import os
import random
import time
from collections import defaultdict
from pathlib import Path

import ray

SIZES = [(1024, 1024), (1152, 896), (1216, 832), (1344, 768), (1536, 640)]
SIZES += [(height, width) for width, height in SIZES[1:]]
"""Widths and heights that SDXL was trained at; its paper has more."""

BATCHES = (8, 4, 2, 1)
"""Images at once, so that only so many shapes are run at each size."""


def main(arguments=None):
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    jobs = list(read(options.prompts) if options.prompts else made_up(options.made_up))
    for number, job in enumerate(jobs):
        job["file"] = str(options.output.resolve() / file_name(number, job, options))
    left = [job for job in jobs if not os.path.exists(job["file"])]
    print(f"{len(jobs)} prompts, {len(jobs) - len(left)} of them are made", flush=True)
    if not left:
        return

    sizes = SIZES if options.model else [(width // 8, height // 8) for width, height in SIZES]
    batches = list(batches_of(left, sizes))
    ray.data.DataContext.get_current().enable_progress_bars = False  # ours counts images
    done, began = 0, time.perf_counter()
    rows = ray.data.from_items(batches, override_num_blocks=len(batches)).map(
        Images,
        fn_constructor_args=(options.model, options.steps, options.backend),
        concurrency=options.workers,
        num_cpus=1,
        num_gpus=options.gpus,
    )
    for row in rows.iter_rows():
        done += row["made"]
        seconds = time.perf_counter() - began
        print(f"{done} of {len(left)} images, {done / seconds:.2f} a second, {row['shape']}", flush=True)


def read(path):
    """Prompts of a file, a JSON object a line."""
    with path.open(encoding="utf-8") as lines:
        for line in filter(str.strip, lines):
            yield {"prompt": "", "width": 1024, "height": 1024, "seed": 0, **json.loads(line)}


def made_up(count):
    draw = random.Random(0)
    for number in range(count):
        width, height = draw.choice([(1024, 1024), (1200, 800), (800, 1200), (1920, 1080), (768, 1344)])
        yield {"prompt": f"a lake, view {number}", "width": width, "height": height, "seed": number}


def file_name(number, job, options):
    """Of its place in the list and of what makes it: a prompt that was changed since is made again."""
    made_of = json.dumps([job, str(options.model), options.steps], sort_keys=True)
    return f"{number:06d}-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}.png"


def batches_of(jobs, sizes):
    """Jobs of one size together, as many at once as `BATCHES` allows; a rest becomes smaller batches."""
    by_size = defaultdict(list)
    for job in jobs:
        aspect = math.log(job["width"] / job["height"])
        nearest = min(sizes, key=lambda size, aspect=aspect: abs(math.log(size[0] / size[1]) - aspect))
        by_size[nearest].append(job)
    for (width, height), same in by_size.items():
        while same:
            many = next(many for many in BATCHES if many <= len(same))
            yield {"width": width, "height": height, "jobs": same[:many]}
            same = same[many:]


class Images:
    """A pipeline in a process of its own. Called with one batch, it writes the images of it."""

    def __init__(self, model, steps, backend):
        import comfy_accel
        import diffusers
        import torch

        self.steps, self.features = steps, None
        if model:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            dtype = torch.float16 if device == "cuda" else torch.float32
            kind = diffusers.StableDiffusionXLPipeline
            self.pipe = kind.from_pretrained(str(model), torch_dtype=dtype, local_files_only=True).to(device)
        else:
            from sdxl_img2img_any_size import random_prompt, tiny_pipeline

            self.features = random_prompt()
            self.pipe = diffusers.StableDiffusionXLPipeline(**tiny_pipeline().components, add_watermarker=False)
        self.pipe.set_progress_bar_config(disable=True)
        comfy_accel.accelerate_pipeline(self.pipe, ignores=("vae",), backend=backend)

    def __call__(self, batch):
        import torch

        jobs, width, height = batch["jobs"], batch["width"], batch["height"]
        asked = {"prompt": [job["prompt"] for job in jobs]}
        if self.features:  # the tiny pipeline has no text encoder
            asked = {name: value.repeat(len(jobs), *[1] * (value.ndim - 1)) for name, value in self.features.items()}
        images = self.pipe(
            **asked,
            width=width,
            height=height,
            num_inference_steps=self.steps,
            generator=[torch.Generator().manual_seed(job["seed"]) for job in jobs],
        ).images
        for job, image in zip(jobs, images, strict=True):
            unfinished = f"{job['file']}.{os.getpid()}"
            image.save(unfinished, format="png")
            os.replace(unfinished, job["file"])
        return {"made": len(jobs), "shape": f"{len(jobs)} x {width}x{height}"}


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="?", help="a file; default: made-up ones")
    parser.add_argument("--made-up", type=int, default=200, help="how many without a file; default: %(default)s")
    parser.add_argument("--model", type=Path, help="default: a tiny one with random weights")
    parser.add_argument("--output", type=Path, default=Path("images"), help="a folder; default: %(default)s")
    parser.add_argument("--workers", type=int, default=1, help="pipelines at once; default: %(default)s")
    parser.add_argument("--gpus", type=float, default=0, help="of each worker; default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
