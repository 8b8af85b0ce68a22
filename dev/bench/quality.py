"""How close skipping comes on a checkpoint of yours, through ComfyUI's loader, sampler and VAE:

    python3 dev.py bench quality --model FILE

About ten minutes on a card. Each prompt is sampled in full, with each quality and every second step skipped, and with
as few steps as cost the same. Prints what each came to, and writes a contact sheet and a file to send in.
"""

import functools
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from PIL import Image

from dev import WORK, Problem
from dev.tools import command, pack, synthetic
from dev.tools.comfyui import has_accelerator
from dev.tools.inprocess import boot

from . import pictures, report, similarity
from .deepcache import EVERY_SECOND, FEWER, KEPT, LEVELS, apply_way, find_target
from .similarity import decibels

PROMPTS = (
    "a lighthouse on a cliff in a storm, oil painting",
    "portrait of an old fisherman, photograph, window light",
    "a bowl of lemons on a blue tablecloth",
)
SIDES, SIDE, TRIAL_SIDE = {"SD1": 512, "SD2": 768}, 1024, 128
"""Pixels: by how the name of core's class of the model begins, of others, and of the synthetic checkpoint."""
GUIDED_BY_ITSELF = ("Flux", "HunyuanVideo")
"""How the names of those classes begin that take no CFG."""
CFG, STEPS = 5.0, 20
LARGEST = 384
"""Pixels of a picture's longer side on the sheet."""


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser("quality", __doc__.splitlines()[0])
    help = "a checkpoint with text encoder and VAE (default: a synthetic one is made)"
    parser.add_argument("--model", "--checkpoint", type=Path, metavar="FILE", help=help)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one a line (default: three of ours)")
    parser.add_argument("--sampler", default="euler")
    parser.add_argument("--scheduler", help="default: simple for flow models, normal for others")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}; distilled models need fewer")
    parser.add_argument("--cfg", type=float, help=f"default: {CFG:g}; 1 for {' and '.join(GUIDED_BY_ITSELF)}")
    parser.add_argument("--width", type=int, help="in pixels (default: what such a model was trained at)")
    parser.add_argument("--height", type=int, help="in pixels (default: the same)")
    ways = (*LEVELS, EVERY_SECOND)
    parser.add_argument("--ways", nargs="+", default=ways, help=f"of: {', '.join(ways)}, or any N dB")
    parser.add_argument("--out", type=Path, default=WORK / "quality", help="folder of what is written")
    options = parser.parse_args(arguments)
    prompts = _prompts(options.prompts)
    comfyui = boot(cpu=not has_accelerator())
    file = options.model or synthetic.checkpoint(comfyui=comfyui)
    if not file.is_file():
        raise Problem(f"No file {file}: name a checkpoint, or none to have a synthetic one made.")
    pack.load()
    import torch

    rows, columns = [], {}
    with torch.inference_mode():
        bench = Bench(file, prompts, options)
        for index in range(len(prompts)):
            for row, picture in bench.rows(index, options.ways):
                said = f"{row['way']}: {row['work']:.0%} of the work, {row['latent_db']:.1f} dB"
                columns.setdefault(row["way"], []).append((said, _small(picture)))
                told = f"pixels {row['pixel_db']:.1f} dB, {row['seconds']:.1f} s, {row['steps_taken']}"
                print(f"prompt {index + 1} of {len(prompts)}, {said}, {told}", file=sys.stderr, flush=True)
                rows.append(row)
    asked = [row for row in rows if row["target_db"] is not None]
    kept = sum(row["latent_db"] >= row["target_db"] - KEPT for row in asked)
    print(f"\n{report.table(_by_way(rows))}\n\n{kept} of {len(asked)} images kept their target within {KEPT:g} dB.")
    print(f"dB: to the uncached latent and picture ({similarity.IDENTICAL:g}: the same). Seconds: of sampling alone.")
    if options.model is None:
        print("The model is random: these figures say that the bench runs, not how close skipping comes.")
    told = {"machine": {**report.machine(), "compiler": None}, "model": bench.model_facts}  # None: that is a path
    told |= {"sampling": bench.settings, "prompts": list(prompts) if options.prompts is None else len(prompts)}
    for path in filter(None, (options.out / "quality.json", options.json)):
        report.write(path, rows, comfyui, **told)
    pictures.contact_sheet(options.out / "quality.png", list(columns.values()))
    print(f"Contact sheet, a column for each way: {options.out / 'quality.png'}")
    print(f"To send in: {options.out / 'quality.json'}, which names the card and the model's file, but no path.")


class Bench:
    """The checkpoint's model, text encoder and VAE, and its pictures in full. `settings` are those of the sampling."""

    def __init__(self, file: Path, prompts: Sequence[str], options: Namespace):
        from comfy.model_sampling import CONST
        from comfy_accel.accel.report.run_record import records

        self._records = records  # which listen from here on
        self._model, clip, self._vae = _loaded(file)
        encode = [clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in (*prompts, "")]
        self._positive, self._negative = encode[:-1], encode[-1]
        model = self._model.model
        kind = type(model.model_config).__name__
        names = {"file": file.name, "class": kind, "network": type(model.diffusion_model).__name__}
        self.model_facts = {**names, "dtype": str(model.get_dtype())}
        side = TRIAL_SIDE if options.model is None else SIDES.get(kind[:3], SIDE)
        self.settings = {
            "sampler": options.sampler,
            "scheduler": options.scheduler or ("simple" if isinstance(model.model_sampling, CONST) else "normal"),
            "steps": options.steps,
            "cfg": options.cfg or (1.0 if kind.startswith(GUIDED_BY_ITSELF) else CFG),
            "width": options.width or side,
            "height": options.height or options.width or side,
        }
        print(", ".join(f"{name} {value}" for name, value in {**self.model_facts, **self.settings}.items()), flush=True)
        self._plain = functools.cache(functools.partial(self._made, self._model))
        self._made(self._model, 0, 1)  # loads the model

    def rows(self, index: int, ways: Sequence[str]) -> Iterator[tuple[report.Row, object]]:
        """For each way of sampling prompt `index`, beginning with in full, its row and its picture."""
        steps = self.settings["steps"]
        expected, expected_picture, _ = self._plain(index, steps)

        def row(way: str, made: tuple, work: float, taken: str, target: float | None = None):
            latent, picture, seconds = made
            told = {"prompt": index, "way": way, "target_db": target, "work": round(work, 4)}
            told |= {"seconds": round(seconds, 3), "latent_db": decibels(latent, expected)}
            told["pixel_db"] = decibels(picture[None], expected_picture[None], similarity.psnr)
            return {**told, "steps_taken": taken}, picture

        yield row("uncached", self._plain(index, steps), 1.0, "F" * steps)
        for way in ways:
            made = self._made(apply_way(way, self._model, steps), index, steps)
            skipping = self._records.last().skipping
            yield row(way, made, 1 - skipping.skipped_work, skipping.steps_taken, find_target(way))
            if way != EVERY_SECOND:
                fewer = max(1, round((1 - skipping.skipped_work) * steps))
                yield row(f"{FEWER}, as {way}", self._plain(index, fewer), fewer / steps, "F" * fewer)

    def _made(self, model, index: int, steps: int):
        """The latent [1, C, H, W], its picture [3, H, W] in 0..1, and seconds of sampling."""
        import comfy.sample
        import torch
        from kit import tiny_models

        given, scale = self.settings, self._vae.spacial_compression_encode()
        empty = torch.zeros(1, 4, given["height"] // scale, given["width"] // scale)
        empty = comfy.sample.fix_empty_latent_channels(model, empty)
        prompts = self._positive[index], self._negative
        how = given["cfg"], given["sampler"], given["scheduler"]
        started = time.perf_counter()
        latent = tiny_models.sample_latent(model, empty, *prompts, steps, *how).cpu()
        seconds = time.perf_counter() - started
        picture = self._vae.decode(latent).float().cpu()
        return latent, picture.reshape(-1, *picture.shape[-3:])[0].movedim(-1, 0).clamp(0, 1), seconds


def _loaded(file: Path) -> tuple:
    """The ModelPatcher, the text encoder and the VAE of a full checkpoint. Raises Problem for any other file."""
    import comfy.sd

    try:
        model, clip, vae = comfy.sd.load_checkpoint_guess_config(str(file))[:3]
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].replace(str(file), file.name)
        raise Problem(f"ComfyUI cannot load {file.name} as a checkpoint ({reason}): name another file.") from None
    if None in (model, clip, getattr(vae, "first_stage_model", None)):
        join = "join it with these in ComfyUI, by the node Save Checkpoint, and name what that saves"
        raise Problem(f"{file.name} is a model without its text encoder or VAE: {join}.")
    return model, clip, vae


def _by_way(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row for each way: means over prompts, and the worst."""
    table = []
    for place, group in report.grouped(rows, ["way"]):
        means = {name: fmean(row[name] for row in group) for name in ("work", "seconds", "latent_db", "pixel_db")}
        worst = {f"worst {name}": min(row[f"{name}_db"] for row in group) for name in ("latent", "pixel")}
        table.append({**place, **means, **worst, "steps of the first": group[0]["steps_taken"]})
    return table


def _small(image) -> Image.Image:
    """[3, H, W] in 0..1 as a picture for the sheet."""
    made = Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy())
    made.thumbnail((LARGEST, LARGEST))
    return made


def _prompts(file: Path | None) -> Sequence[str]:
    if file is None:
        return PROMPTS
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise Problem(f"No prompt in {file}: name a text file with one a line.")
    return found


if __name__ == "__main__":
    sys.exit(command.run(main))
