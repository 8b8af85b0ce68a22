"""The session that `dev.bench.session` runs: its steps, their sizes at test scale, and when it has failed. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

SCALE = 4
"""Latents are this many times smaller on each side than the session's pixels say, where there is no GPU."""

TOLERANCE = {"fp32": 2e-3, "fp16": 2e-2, "bf16": 1e-1}
"""Largest difference to the eager image of the same step, as a fraction of that image's largest value.

A compiler adds in another order, and rounds once where eager rounds after every operation; sampler steps and
classifier-free guidance multiply that. The table is of a random network, which damps nothing.
"""


@dataclass(frozen=True)
class Case:
    """width, height: pixels. batch: images."""

    width: int
    height: int
    batch: int = 1

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    def __str__(self) -> str:
        return self.size + (f" batch {self.batch}" if self.batch > 1 else "")


@dataclass(frozen=True)
class Step:
    """One image of the session. Width and height in pixels; tokens of the positive prompt.

    lora: (which, strength). control: with a ControlNet. apart: cond and uncond in calls of their own, as where
    memory is short. reload: the checkpoint is loaded anew before the step. changes: differs from a plain image of its
    size and batch, or the step tested nothing.
    """

    name: str
    width: int = 512
    height: int = 512
    batch: int = 1
    tokens: int = 77
    lora: tuple[int, float] | None = None
    control: bool = False
    apart: bool = False
    reload: bool = False

    @property
    def changes(self) -> bool:
        return self.lora is not None or self.control or self.tokens != 77


STEPS = (
    Step("512x512"),
    Step("768x512", 768, 512),
    Step("512x768", 512, 768),
    Step("720x960", 720, 960),
    Step("960x720", 960, 720),
    Step("736x992", 736, 992),
    Step("896x768", 896, 768),
    Step("batch 2", batch=2),
    Step("batch 4", batch=4),
    Step("154 tokens", tokens=154),
    Step("cond, uncond apart", apart=True),
    Step("LoRA at 0.8", lora=(1, 0.8)),
    Step("LoRA at 0.5", lora=(1, 0.5)),
    Step("another LoRA", lora=(2, 0.8)),
    Step("ControlNet on", control=True),
    Step("ControlNet off"),
    Step("weights reloaded", 896, 768, reload=True),
    Step("back to the first"),
)
"""One after the other in one process. "weights reloaded" is a new model object from the same checkpoint."""


def latent_side(pixels: int, scale: int = SCALE) -> int:
    """A side of the latent for an image `pixels` wide at 1 / scale of its size, odd and even where the full one is.

    The full latent's side is pixels / 8. Whether a UNet halves an even or an odd side at its first three
    downsamplings depends on that side modulo 8, so the result is the nearest number with the same remainder:
    720 pixels are 90 -> 45 -> 23 -> 12, and here 26 -> 13 -> 7 -> 4.
    """
    full = pixels // 8
    if scale == 1:
        return full
    remainder = full % 8
    return max(8, 8 * int((full / scale - remainder) / 8 + 0.5) + remainder)


def add_waiting(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `waiting_s`: by how many seconds an image that compiled took longer than eager's of that step."""
    eager = {(row["model"], row["step"]): row["first_image_s"] for row in rows if row["contender"] == "eager"}

    def waited(row: dict[str, Any]) -> float:
        longer = row["first_image_s"] - eager[row["model"], row["step"]]
        return round(max(0.0, longer), 3) if row["compilations"] else 0.0

    return [{**row, "waiting_s": waited(row)} for row in rows]


TOTALS = """\
first_image, later: graphs compiled in the session's first image, and in all after it; stalls: images that compiled.
gave_up_at: where torch reached its recompile limit; from there on it runs uncompiled. first_image_s, session_s: of the
first image, and of all; worst_stall_s: of the slowest image after the first. worst_diff: from plain, as a fraction of
the image's largest value."""


def sum_up(rows: Sequence[dict[str, Any]], *summed: str) -> list[dict[str, Any]]:
    """A row per model and contender, as `TOTALS` says, with the sums of more columns."""
    table = []
    for model, contender in dict.fromkeys((row["model"], row["contender"]) for row in rows):
        own = [row for row in rows if (row["model"], row["contender"]) == (model, contender)]
        compiled, seconds = [row["compilations"] for row in own], [row["first_image_s"] for row in own]
        table.append(
            {
                **{"model": model, "contender": contender, "first_image": compiled[0], "later": sum(compiled[1:])},
                "stalls": sum(count > 0 for count in compiled),
                "gave_up_at": next((row["step"] for row in own if row["gave_up"]), None),
                **{"first_image_s": seconds[0], "session_s": sum(seconds), "worst_stall_s": max(seconds[1:])},
                **{name: sum(row[name] for row in own) for name in summed},
                "worst_diff": f"{max(row['relative_diff'] for row in own):.1e}",
            }
        )
    return table


def find_failure(rows: Iterable[dict[str, Any]], first: str = STEPS[0].name) -> str | None:
    """What the promise "compiled once, and the same image" does not hold of in our rows, as one sentence; else None.

    first: the name of the session's first step.
    """
    for row in rows:
        if row["contender"] != "ours":
            continue
        where = f"{row['model']}, step {row['step']}"
        if row["compilations"] and row["step"] != first:
            return f"{where}: compiled {row['compilations']} graphs, and only the first image may compile."
        if not row["compilations"] and row["step"] == first:
            return f"{where}: nothing was compiled, so nothing was measured."
        if row.get("graph_breaks"):
            return f"{where}: {row['graph_breaks']} graph breaks."
        if row["uncompiled"]:
            return f"{where}: {row['uncompiled']} calls of blocks ran uncompiled."
        tolerance = TOLERANCE[row["dtype"]]
        if not row["relative_diff"] <= tolerance:
            return f"{where}: differs from uncompiled by {row['relative_diff']:.1e}, more than {tolerance:.0e}."
    return None
