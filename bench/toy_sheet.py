"""Samples of a trained test network beside pictures of its data, by class.

.venv/bin/python -m bench.toy_sheet --network dit
"""

import argparse
import sys
from pathlib import Path

from PIL import Image

from . import ROOT, command, contact_sheet
from .inprocess import boot

SHEETS = {"unet": "toy_samples.jpg", "dit": "toy_dit_samples.jpg"}
EACH = 5
ZOOM = 4
STEPS = 30


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    boot(cpu=True)
    import torch

    from . import toy, toy_data

    torch.set_num_threads(1)
    labels = torch.arange(len(toy_data.CLASSES)).repeat_interleave(EACH)
    data = toy_data.pictures(labels, 16, 16, torch.Generator().manual_seed(1_000_000))
    with torch.inference_mode():
        made = toy.sample(toy.load(options.network, options.weights), labels, 16, 16, STEPS, "euler", seed=0)
    columns = []
    for index, name in enumerate(toy_data.CLASSES):
        own = slice(index * EACH, (index + 1) * EACH)
        columns.append([(name, _strip(toy_data.view(data[own]))), ("sampled", _strip(toy_data.view(made[own])))])
    file = options.out or ROOT / "docs" / SHEETS[options.network]
    contact_sheet.save(file, columns)
    print(file)


def _strip(views) -> Image.Image:
    """RGB views [B, 3, H, W] in 0..1, one above the other, with a line of white between."""
    import torch

    framed = torch.nn.functional.pad(views, (0, 0, 0, 1), value=1)
    pixels = framed.permute(0, 2, 3, 1).reshape(-1, framed.shape[3], 3)[:-1]
    image = Image.fromarray((pixels * 255).round().byte().numpy())
    return image.resize((image.width * ZOOM, image.height * ZOOM), Image.Resampling.NEAREST)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.toy_sheet", description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=SHEETS, default="unet")
    parser.add_argument("--weights", type=Path, help="(default: bench/data/toy_NETWORK.safetensors)")
    parser.add_argument("--out", type=Path, help="(default: in docs)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main))
