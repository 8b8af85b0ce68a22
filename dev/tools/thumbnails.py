"""The pictures of the templates in ComfyUI's template browser: one drawn scene, shown as each template treats it.

.venv/bin/python -m dev.tools.thumbnails
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from dev import ROOT

from . import command

FOLDER = ROOT / "example_workflows"
WIDTH, HEIGHT = 768, 528
FINE = 2
"""Drawn so many times larger, then scaled down, for smooth edges."""

GROUND, TEXT, QUIET, WARM, READY = "#171a21", "#ffffff", "#aab2c0", "#ff9d57", "#6fbf9f"
DAWN = ("#26385e", "#f0a868", "#39506f", "#22262e", "#f4f0e8", "#c8452e")
"""Sky above, sky below, sea, cliff, tower, stripes."""
PALETTES = {
    "dawn": DAWN,
    "night": ("#0c1226", "#31406b", "#14203a", "#0a0c12", "#cfd6e6", "#7c3a4a"),
    "mint": ("#2d6a6a", "#cfe8c9", "#2f7f7a", "#1f3d3a", "#ffffff", "#e07a5f"),
    "candy": ("#7d5ba6", "#f7c6d9", "#5f6fbf", "#3b2a55", "#fff6fb", "#ef6f9d"),
    "lines": ("#000000", "#000000", "#000000", "#000000", "#000000", "#000000"),
}
Box = tuple[float, float, float, float]


class Card:
    """A thumbnail in the making. Positions are pixels of the finished picture."""

    def __init__(self) -> None:
        self.sheet = Image.new("RGB", (WIDTH * FINE, HEIGHT * FINE), GROUND)
        self.draw = ImageDraw.Draw(self.sheet)

    def write(self, x: float, y: float, text: str, size: int = 44, fill: str = TEXT, anchor: str = "mm") -> None:
        font = ImageFont.load_default(size * FINE)
        self.draw.text((x * FINE, y * FINE), text, font=font, fill=fill, anchor=anchor)

    def scene(self, box: Box, palette: str = "dawn") -> None:
        """A lighthouse on a cliff, cut to the box; "lines" is its drawing in white on black."""
        left, top, right, bottom = (round(side * FINE) for side in box)
        wide, high = right - left, bottom - top
        picture = Image.new("RGB", (wide, high))
        draw = ImageDraw.Draw(picture)
        above, below, sea, cliff, tower, stripes = PALETTES[palette]
        is_drawing = palette == "lines"
        stroke = {"outline": "#ffffff", "width": 3 * FINE} if is_drawing else {}
        start, end = (Image.new("RGB", (1, 1), colour).getpixel((0, 0)) for colour in (above, below))
        horizon = int(high * 0.68)
        for row in range(horizon):
            share = row / horizon
            mixed = tuple(round(a + (b - a) * share) for a, b in zip(start, end, strict=True))
            draw.line([(0, row), (wide, row)], fill=mixed)
        draw.rectangle([-9, horizon, wide + 9, high + 9], fill=sea, **stroke)
        unit, middle = min(wide, high), wide * 0.6
        foot = high * 0.62
        cliff_corners = [(middle - unit * 0.30, high + 9), (middle - unit * 0.17, foot), (middle + unit * 0.19, foot)]
        draw.polygon([*cliff_corners, (wide + 9, high * 0.80), (wide + 9, high + 9)], fill=cliff, **stroke)
        height, half = unit * 0.44, unit * 0.055
        lamp = foot - height
        if not is_drawing:
            beam = Image.new("RGBA", picture.size)
            corners = [(middle, lamp), (-wide * 0.1, lamp - unit * 0.22), (-wide * 0.1, lamp + unit * 0.06)]
            ImageDraw.Draw(beam).polygon(corners, fill=(255, 244, 200, 90))
            picture.paste(beam, (0, 0), beam)
        body = [
            (middle - half * 1.35, foot),
            (middle - half, lamp),
            (middle + half, lamp),
            (middle + half * 1.35, foot),
        ]
        draw.polygon(body, fill=tower, **stroke)
        for share in (0.2, 0.55):
            y = lamp + height * share
            draw.rectangle([middle - half * 1.1, y, middle + half * 1.1, y + height * 0.16], fill=stripes, **stroke)
        room = [middle - half * 0.7, lamp - unit * 0.07, middle + half * 0.7, lamp]
        draw.rectangle(room, fill="#ffe9a8" if not is_drawing else "#000000", **stroke)
        roof = [(middle - half, room[1]), (middle, room[1] - unit * 0.05), (middle + half, room[1])]
        draw.polygon(roof, fill=stripes, **stroke)
        mask = Image.new("L", picture.size)
        ImageDraw.Draw(mask).rounded_rectangle([0, 0, wide - 1, high - 1], radius=10 * FINE, fill=255)
        self.sheet.paste(picture, (left, top), mask)

    def arrow(self, x: float, y: float, length: float = 60) -> None:
        self.draw.line([x * FINE, y * FINE, (x + length - 12) * FINE, y * FINE], fill=WARM, width=8 * FINE)
        head = [(x + length, y), (x + length - 26, y - 18), (x + length - 26, y + 18)]
        self.draw.polygon([(a * FINE, b * FINE) for a, b in head], fill=WARM)

    def frame(self, box: Box, colour: str = WARM) -> None:
        self.draw.rounded_rectangle([side * FINE for side in box], radius=10 * FINE, outline=colour, width=6 * FINE)

    def squares(self, x: float, y: float, colours: list[str], side: float = 34) -> None:
        """Steps or images in a row."""
        for index, colour in enumerate(colours):
            at = x + index * (side + 8)
            corners = [at * FINE, y * FINE, (at + side) * FINE, (y + side) * FINE]
            self.draw.rounded_rectangle(corners, radius=6 * FINE, fill=colour)

    def save(self, path: Path) -> None:
        self.sheet.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).save(path, quality=85, optimize=True)


def start(card: Card) -> None:
    card.scene((24, 24, 744, 330))
    for x, wide, text, colour in ((24, 190, "Load", QUIET), (254, 270, "Speed Up", WARM), (564, 180, "Sample", QUIET)):
        card.frame((x, 378, x + wide, 458), colour)
        card.write(x + wide / 2, 418, text, 40, WARM if colour == WARM else TEXT)
    for x in (216, 526):
        card.arrow(x, 418, 36)
    card.write(384, 494, "one node, any size", 32, QUIET)


def model(name: str, note: str, palette: str) -> Callable[[Card], None]:
    def draw(card: Card) -> None:
        card.scene((24, 24, 744, 370), palette)
        card.write(384, 424, name, 60)
        card.write(384, 488, note, 34, WARM)

    return draw


def video(name: str, note: str) -> Callable[[Card], None]:
    def draw(card: Card) -> None:
        card.draw.rectangle([0, 60 * FINE, WIDTH * FINE, 360 * FINE], fill="#000000")
        for index in range(12):
            for y in (72, 328):
                card.squares(16 + index * 64, y, ["#4a5160"], 20)
        for index, palette in enumerate(("night", "dawn", "mint")):
            card.scene((20 + index * 246, 106, 256 + index * 246, 314), palette)
        card.write(384, 424, name, 60)
        card.write(384, 488, note, 34, WARM)

    return draw


def into(before: str, after: str, note: str) -> Callable[[Card], None]:
    def draw(card: Card) -> None:
        card.scene((24, 60, 344, 380), before)
        card.arrow(354, 220)
        card.scene((424, 60, 744, 380), after)
        card.write(384, 452, note, 44)

    return draw


def same_size(card: Card) -> None:
    card.scene((44, 90, 324, 316), "night")
    card.frame((24, 70, 344, 336))
    card.arrow(354, 204)
    card.scene((424, 90, 744, 316), "candy")
    card.write(184, 382, "743 x 601", 44)
    card.write(584, 382, "743 x 601", 44)
    card.write(384, 468, "exactly the size you gave it", 42, WARM)


def hires(card: Card) -> None:
    card.scene((24, 150, 194, 370))
    card.arrow(212, 260)
    card.scene((300, 24, 610, 430))
    card.write(690, 190, "900", 48)
    card.write(690, 235, "x", 40, QUIET)
    card.write(690, 285, "1180", 48)
    card.write(384, 482, "type any size", 44, WARM)


def lora(card: Card) -> None:
    for index, (palette, strength) in enumerate((("dawn", "0.4"), ("mint", "0.8"), ("candy", "1.2"))):
        card.scene((24 + index * 244, 40, 256 + index * 244, 330), palette)
        card.write(140 + index * 244, 376, strength, 48)
    card.write(384, 466, "three strengths, compiled once", 44, WARM)


def quality(card: Card) -> None:
    for x, name, steps in ((24, "every step", [WARM] * 8), (404, "DeepCache", [WARM, "#4a5160", "#4a5160"] * 3)):
        card.scene((x, 40, x + 340, 310))
        card.squares(x + 4, 336, steps[:8])
        card.write(x + 170, 416, name, 44)
    card.write(384, 482, "how close are they?", 40, WARM)


def warm_up(card: Card) -> None:
    for x, y, wide, high in ((24, 40, 180, 270), (228, 80, 280, 190), (532, 60, 212, 230)):
        card.scene((x, y, x + wide, y + high))
    card.squares(195, 350, [WARM], 46)
    card.squares(249, 350, [READY] * 6, 46)
    card.write(384, 446, "compile first,", 44, WARM)
    card.write(384, 494, "then every size without a wait", 36, READY)


PICTURES: dict[str, Callable[[Card], None]] = {
    "01 Start here": start,
    "02 SDXL": model("SDXL", "Speed Up: Balanced", "dawn"),
    "03 Flux dev": model("Flux dev", "Speed Up: Balanced", "mint"),
    "04 Z-Image Turbo": model("Z-Image Turbo", "Speed Up: Exact", "candy"),
    "05 Qwen-Image": model("Qwen-Image", "Speed Up: Balanced", "night"),
    "06 Wan 2.2 video": video("Wan 2.2 video", "two models, a Speed Up for each"),
    "07 Image to image": into("night", "candy", "a picture in, a new one out"),
    "08 Image to image, any size": same_size,
    "09 Hires fix, any size": hires,
    "10 ControlNet": into("lines", "dawn", "ControlNet, compiled too"),
    "11 LoRA sweep": lora,
    "12 DeepCache quality": quality,
    "13 Warm up sizes": warm_up,
    "14 Flux 2": model("Flux.2 dev", "Speed Up: Balanced, in a subgraph", "mint"),
    "15 LTX 2.5 video": video("LTX 2.5", "picture and sound, two samplers"),
}


def main() -> None:
    for name, draw in PICTURES.items():
        card = Card()
        draw(card)
        card.save(FOLDER / f"{name}.jpg")
    print(FOLDER)


if __name__ == "__main__":
    sys.exit(command.run(main))
