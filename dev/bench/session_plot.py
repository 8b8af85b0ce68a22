"""The picture of `dev.py bench session`: which of its images wait for a compiler, and how long.

.venv/bin/python -m dev.bench.session_plot
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from dev import ROOT
from dev.tools import command

from .pictures import FINE
from .session_plan import STEPS

WAITS, READY, GAVE_UP = "#d55e00", "#6fbf9f", "#c8c8c8"
NAMES = {"core": "core's TorchCompileModel", "ours": "Accelerate Model"}
GROUPS = ("7 sizes", 7), ("batch", 2), ("prompt", 2), ("LoRA", 3), ("control", 2), ("again", 2)
"""What changes between the steps of `session_plan.STEPS`, and in how many of them."""

WIDTH, LEFT, TOP, CELL, ROW = 1000, 222, 112, 27, 44


def save(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the picture of `dev.bench.session`'s rows: a square for each image."""
    if sum(count for _, count in GROUPS) != len(STEPS):
        raise ValueError("the groups do not add up to the session's steps")
    models = list(dict.fromkeys(row["model"] for row in rows))
    height = TOP + len(models) * (2 * (ROW - 8) + 50)
    sheet = Image.new("RGB", (WIDTH * FINE, height * FINE), "white")
    draw = ImageDraw.Draw(sheet)
    fonts = {size: ImageFont.load_default(size * FINE) for size in (11, 12, 14, 20)}

    def write(x: float, y: float, text: str, anchor: str = "lm", size: int = 14, fill: str = "#333333") -> None:
        draw.text((x * FINE, y * FINE), text, font=fonts[size], anchor=anchor, fill=fill)

    def box(x: float, y: float, fill: str) -> None:
        corners = [x * FINE, y * FINE, (x + CELL - 3) * FINE, (y + CELL - 3) * FINE]
        draw.rounded_rectangle(corners, radius=4 * FINE, fill=fill)

    write(24, 28, "One session, 18 images. Which of them wait for the compiler, and how long?", size=20, fill="black")
    x = 24
    legend = {"compiles: you wait so many seconds": WAITS, "ready": READY, "compiler gave up: runs uncompiled": GAVE_UP}
    for text, colour in legend.items():
        box(x, 50, colour)
        write(x + CELL + 4, 62, text)
        x += CELL + 24 + draw.textlength(text, fonts[14]) / FINE
    at = LEFT
    for text, count in GROUPS:
        write(at + (count * CELL - 3) / 2, TOP - 18, text, "mm", 12, "#666666")
        draw.line([(at * FINE, (TOP - 8) * FINE), ((at + count * CELL - 5) * FINE, (TOP - 8) * FINE)], "#999999", FINE)
        at += count * CELL
    y = TOP + 6
    for model in models:
        write(24, y + 6, model, fill="black")
        y += 22
        for contender in NAMES:
            own = [row for row in rows if (row["model"], row["contender"]) == (model, contender)]
            write(40, y + CELL / 2, NAMES[contender])
            for index, row in enumerate(own):
                colour = WAITS if row["compilations"] else GAVE_UP if row["gave_up"] else READY
                box(LEFT + index * CELL, y, colour)
                if row["compilations"]:
                    middle = (CELL - 3) / 2
                    write(LEFT + index * CELL + middle, y + middle, f"{row['waiting_s']:.0f}", "mm", 11, "black")
            write(LEFT + len(own) * CELL + 14, y + CELL / 2, total(own), fill="black")
            y += ROW - 8
        y += 28
    path.parent.mkdir(parents=True, exist_ok=True)
    image = sheet.resize((WIDTH, height), Image.Resampling.LANCZOS)
    image.quantize(64).save(path, optimize=True)


def total(own: Sequence[dict[str, Any]]) -> str:
    """What the squares of one contender add up to."""
    waiting = sum(row["compilations"] > 0 for row in own)
    images = f"{waiting} image{'s' * (waiting != 1)}"
    return f"{sum(row['waiting_s'] for row in own):.0f} s of waiting in {images}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dev.bench.session_plot", description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=Path, default=ROOT / "docs" / "session.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "session.png")
    options = parser.parse_args(arguments)
    save(options.out, json.loads(options.counts.read_text())["rows"])
    print(options.out)


if __name__ == "__main__":
    sys.exit(command.run(main))
