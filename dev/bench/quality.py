"""What each level and target of DeepCache costs and reaches on a checkpoint of yours: through ComfyUI's loader,
samplers and VAE.

    python3 dev.py bench quality --checkpoint FILE [--prompts FILE]

Beside the uncached run: DeepCache in each way, and as many steps as its work is worth. Writes rows, a table and a
contact sheet with one column a prompt.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from PIL import Image

from dev import WORK, Problem
from dev.tools import command, pack, synthetic
from dev.tools.comfyui import has_accelerator
from dev.tools.inprocess import boot

from . import pictures, report, similarity
from .deepcache import KEPT, LEVELS, TARGETS, apply, target_of

PROMPTS = (
    "a lighthouse on a cliff in a storm, oil painting",
    "portrait of an old fisherman, photograph, window light",
    "a bowl of lemons on a blue tablecloth",
)
COLUMNS = ("sampler", "steps", "way", "flops_share", "seconds", "psnr_db", "latent_db", "fewer_db")
LARGEST = 384
"""Pixels of a picture's longer side on the sheet."""


@dataclass(frozen=True)
class Scene:
    """What is sampled: prompts, the size in pixels, and the guidance."""

    prompts: Sequence[str]
    width: int
    height: int
    cfg: float


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser("quality", __doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="with text encoder and VAE (default: a synthetic one is made)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one a line (default: three of ours)")
    parser.add_argument("--samplers", nargs="+", default=["euler"])
    parser.add_argument("--steps", nargs="+", type=int, default=[30])
    parser.add_argument("--cfg", type=float, default=5.0)
    parser.add_argument("--width", type=int, default=512, help="in pixels")
    parser.add_argument("--height", type=int, default=512, help="in pixels")
    parser.add_argument("--ways", nargs="+", default=(*LEVELS, *TARGETS), help="levels, or N dB")
    parser.add_argument("--out", type=Path, default=WORK / "quality", help="folder of rows and contact sheet")
    options = parser.parse_args(arguments)
    prompts = _prompts(options.prompts)
    comfyui = boot(cpu=not has_accelerator())
    checkpoint = options.checkpoint or synthetic.checkpoint(comfyui=comfyui)
    if not checkpoint.is_file():
        raise Problem(f"No file {checkpoint}: name a checkpoint, or none to have a synthetic one made.")
    pack.load()
    import torch

    scene = Scene(prompts, options.width, options.height, options.cfg)
    rows, columns = [], [[] for _ in prompts]
    with torch.inference_mode():
        bench = Bench(checkpoint, scene)
        for sampler in options.samplers:
            for steps in options.steps:
                found, labelled = bench.rows(sampler, steps, options.ways)
                rows += found
                for column, of_prompt in zip(columns, labelled, strict=True):
                    column += [(f"{sampler}, {steps}: {label}", image) for label, image in of_prompt]
    print(f"\n{report.table(_by_way(rows), COLUMNS)}\n")
    print(_verdict(rows, len(prompts)))
    if options.checkpoint is None:
        print("The model is random: these figures say that the bench runs, not what a target looks like.")
    options.out.mkdir(parents=True, exist_ok=True)
    for file in filter(None, (options.out / "quality.json", options.json)):
        report.write(file, rows, comfyui, checkpoint=checkpoint.name, prompts=list(prompts))
    pictures.contact_sheet(options.out / "quality.png", columns)
    print(f"Rows and contact sheet: {options.out}")


class Bench:
    """The checkpoint's model, text encoder and VAE, and its uncached pictures."""

    def __init__(self, checkpoint: Path, scene: Scene):
        import comfy.sd

        from .flops import Flops

        self._scene = scene
        self._model, clip, self._vae = comfy.sd.load_checkpoint_guess_config(str(checkpoint))[:3]
        if None in (self._model, clip, self._vae):
            raise Problem(f"{checkpoint.name} lacks a text encoder or a VAE: name a full checkpoint.")
        encode = [clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in (*scene.prompts, "")]
        self._positive, self._negative = encode[:-1], encode[-1]
        self._flops = Flops(self._model.model.diffusion_model)

    def rows(self, sampler: str, steps: int, ways: Sequence[str]):
        """A row for each way and prompt, and for each prompt its labelled pictures."""
        count = len(self._scene.prompts)
        self._flops.learn(lambda: self._latent(self._model, 0, sampler, 1))
        self._flops.take()
        plain = [self._run(self._model, index, sampler, steps) for index in range(count)]
        rows, columns = [], [[("uncached", _small(image))] for _, image, _, _ in plain]
        for way in ways:
            model = apply(way, self._model, steps)
            for index, (expected, expected_image, work, seconds) in enumerate(plain):
                latent, image, taken, spent = self._run(model, index, sampler, steps)
                fewer = max(1, round(steps * taken / work))
                at_equal_work = self._run(self._model, index, sampler, fewer)[0] if fewer < steps else expected
                row = {
                    "prompt": index,
                    "sampler": sampler,
                    "steps": steps,
                    "way": way,
                    "target_db": target_of(way),
                    "flops_share": round(taken / work, 4),
                    "seconds": round(spent, 3),
                    "uncached_seconds": round(seconds, 3),
                    "psnr_db": round(similarity.psnr(image[None], expected_image[None]).item(), 2),
                    "latent_db": round(similarity.latent_psnr(latent, expected).item(), 2),
                    "fewer_steps": fewer,
                    "fewer_db": round(similarity.latent_psnr(at_equal_work, expected).item(), 2),
                }
                rows.append(row)
                words = f"{way}: {row['flops_share']:.0%} of the work, {row['latent_db']:.1f} dB"
                columns[index].append((words, _small(image)))
        return rows, columns

    def _run(self, model, index: int, sampler: str, steps: int):
        """The latent [1, C, H, W], its picture [3, H, W] in 0..1, FLOPs and seconds of sampling."""
        started = time.perf_counter()
        latent = self._latent(model, index, sampler, steps).cpu()
        seconds = time.perf_counter() - started
        work = self._flops.take()
        image = self._vae.decode(latent).float().cpu()
        return latent, image.reshape(-1, *image.shape[-3:])[0].movedim(-1, 0).clamp(0, 1), work, seconds

    def _latent(self, model, index: int, sampler: str, steps: int):
        import comfy.sample
        import torch
        from kit import tiny_models

        scene = self._scene
        scale = self._vae.spacial_compression_encode()
        empty = torch.zeros(1, 4, scene.height // scale, scene.width // scale)
        empty = comfy.sample.fix_empty_latent_channels(model, empty)
        prompts = self._positive[index], self._negative
        return tiny_models.sample_latent(model, empty, *prompts, steps, scene.cfg, sampler)


def _by_way(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each sampler, number of steps and way, means over prompts."""
    groups: dict[tuple, list[report.Row]] = {}
    for row in rows:
        groups.setdefault((row["sampler"], row["steps"], row["way"]), []).append(row)
    table = []
    for key, group in groups.items():
        numbers = [name for name, value in group[0].items() if isinstance(value, float) and name != "target_db"]
        means = {name: fmean(row[name] for row in group) for name in numbers}
        table.append({**dict(zip(("sampler", "steps", "way"), key, strict=True)), **means})
    return table


def _verdict(rows: Sequence[report.Row], prompts: int) -> str:
    asked = [row for row in rows if row["target_db"] is not None]
    kept = sum(row["latent_db"] >= row["target_db"] - KEPT for row in asked)
    return (
        f"{kept} of {len(asked)} runs reached their target within {KEPT:g} dB, {prompts} prompts. seconds: of "
        "sampling alone, by this machine's clock."
    )


def _small(image) -> Image.Image:
    """[3, H, W] in 0..1 as a picture for the sheet."""
    made = Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy())
    made.thumbnail((LARGEST, LARGEST))
    return made


def _prompts(file: Path | None) -> Sequence[str]:
    if file is None:
        return PROMPTS
    if not file.is_file():
        raise Problem(f"No file {file}: --prompts takes a text file with one prompt a line.")
    found = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not found:
        raise Problem(f"{file} has no prompt: write one a line.")
    return found


if __name__ == "__main__":
    sys.exit(command.run(main))
