"""Samples of a trained test network beside pictures of its data, by class; or what each quality of DeepCache gives.

.venv/bin/python -m dev.bench.toy_sheet --network dit
.venv/bin/python -m dev.bench.toy_sheet --qualities
"""

import argparse
import sys
from pathlib import Path

from PIL import Image

from dev import ROOT
from dev.tools import command, pack
from dev.tools.inprocess import boot

from . import contact_sheet, similarity

SHEETS = {
    "unet": "toy_samples.jpg",
    "dit": "toy_dit_samples.jpg",
    "mmdit": "toy_mmdit_samples.jpg",
    "vpred": "toy_vpred_samples.jpg",
}
EACH = 5
ZOOM = 4
STEPS = 30

QUALITIES = (50.0, 40.0, 35.0)
SHOWN = (0, 2, 3)
"""Classes of each network on the sheet of qualities."""
AMPLIFIED = 10


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    boot(cpu=True)
    if options.qualities:
        print(_qualities(options.out or ROOT / "web" / "docs" / "AccelDeepCache" / "qualities.png"))
        return
    import torch

    from . import toy, toy_data

    torch.set_num_threads(1)
    labels = torch.arange(len(toy_data.CLASSES)).repeat_interleave(EACH)
    network = toy.NETWORKS[options.network]
    data = network.pictures(labels, 16, 16, torch.Generator().manual_seed(1_000_000))
    with torch.inference_mode():
        made = toy.sample(toy.load(options.network), labels, 16, 16, STEPS, "euler", seed=0)
    columns = []
    for index, name in enumerate(network.classes):
        own = slice(index * EACH, (index + 1) * EACH)
        columns.append([(name, strip(toy_data.view(data[own]))), ("sampled", strip(toy_data.view(made[own])))])
    file = options.out or ROOT / "docs" / SHEETS[options.network]
    contact_sheet.save(file, columns)
    print(file)


def _qualities(file: Path) -> Path:
    """What the networks sample without DeepCache and at each quality, and the difference."""
    pack.load()
    import torch
    from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
    from comfy_accel.accel.step_cache.config import DeepCacheSettings

    from . import toy, toy_data

    torch.set_num_threads(1)
    models, labels = [toy.load(network) for network in SHEETS], torch.tensor(SHOWN)

    def sampled(quality=None):
        latents = []
        for model in models:
            cached = model if quality is None else apply_deep_cache(model, DeepCacheSettings(quality=quality))
            with torch.inference_mode():
                latents.append(toy.sample(cached, labels, 16, 16, STEPS, "euler", seed=0))
        return torch.cat(latents)

    plain = sampled()
    view = toy_data.view(plain)
    column = [("without DeepCache", strip(view, across=True))]
    for quality in QUALITIES:
        latents = sampled(quality)
        reached, made = similarity.latent_psnr(latents, plain), toy_data.view(latents)
        told = f"planned for {quality:g} dB: {reached.min():.0f} to {reached.max():.0f} dB reached"
        column.append((told, strip(made, across=True)))
        difference = (0.5 + AMPLIFIED * (made - view)).clamp(0, 1)
        column.append((f"its difference, {AMPLIFIED} times", strip(difference, across=True)))
    contact_sheet.save(file, [column])
    return file


def strip(views, across: bool = False) -> Image.Image:
    """RGB views [B, 3, H, W] in 0..1, one above the other or side by side, with a line of white between."""
    import torch

    views = views.mT if across else views
    framed = torch.nn.functional.pad(views, (0, 0, 0, 1), value=1)
    pixels = framed.permute(0, 2, 3, 1).reshape(-1, framed.shape[3], 3)[:-1]
    pixels = (pixels.transpose(0, 1) if across else pixels).contiguous()
    image = Image.fromarray((pixels * 255).round().byte().numpy())
    return image.resize((image.width * ZOOM, image.height * ZOOM), Image.Resampling.NEAREST)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dev.bench.toy_sheet", description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=SHEETS, default="unet")
    parser.add_argument("--qualities", action="store_true", help="what each quality looks like, for the help pages")
    parser.add_argument("--out", type=Path, help="(default: in docs, or beside the help pages)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main))
