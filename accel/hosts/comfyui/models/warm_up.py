"""Warm-up: sample a model at given sizes, so that compiling and capturing are done before the first real image."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import comfy.sample
import comfy.samplers
import comfy.utils
import torch

from ....core.events import emit
from ....sizing.resolution import Size
from ..sizes.model_sizes import latent_layout
from .options import WARMS_UP, is_captured

MOST = 1000
"""Runs allowed in one warm-up; a typing error must not occupy the machine for hours."""

LARGEST_RUN, MOST_PIXELS = 64 << 20, 1 << 30
"""Pixels of one run's images, and of all runs'. The largest run is 64 images of 1024 x 1024, or one of 8192 x 8192."""

LARGEST_BATCH, LONGEST_PROMPT = 64, 4096
"""Images, and tokens, of one run."""

_STEPS_TO_CAPTURE = 12
"""At most eight calls that compile graphs and compare them with their blocks, then the warm-up, the dry run and the
capture of the call."""


def parse_runs(sizes: str, batches: str, prompt_lengths: str) -> tuple[list[Size], list[int], list[int]]:
    """The node's three lists, from text.

    Raises ValueError: one is invalid, or all combinations are more than `check_amount` allows.
    """
    parsed = (
        parse_sizes(sizes),
        parse_numbers(batches, "batches", LARGEST_BATCH),
        parse_numbers(prompt_lengths, "prompt lengths", LONGEST_PROMPT),
    )
    check_amount(*parsed)
    return parsed


def check_amount(sizes: Sequence[Size], batches: Sequence[int], prompt_lengths: Sequence[int] = ()) -> None:
    """Raises ValueError, with the limit, if all combinations of these are too many or too large."""
    runs = len(sizes) * len(batches) * max(1, len(prompt_lengths))
    if runs > MOST:
        raise ValueError(f"{runs} runs are too many: at most {MOST} are allowed at once.")
    pixels = [size.pixels * batch for size in sizes for batch in batches]
    if max(pixels, default=0) > LARGEST_RUN:
        raise ValueError(
            f"The largest run would have {_mega(max(pixels))} megapixels (width x height x batch): "
            f"at most {_mega(LARGEST_RUN)} are possible."
        )
    total = sum(pixels) * max(1, len(prompt_lengths))
    if total > MOST_PIXELS:
        raise ValueError(
            f"All runs together would have {_mega(total)} megapixels (width x height x batch): "
            f"at most {_mega(MOST_PIXELS)} are possible at once."
        )


def warm_up(
    model: Any, conditioning: list, sizes: Sequence[Size], batches: Sequence[int], prompt_lengths: Sequence[int] = ()
) -> tuple[int, float]:
    """Sample at every combination of size, batch and prompt length; one step, or as many as capturing takes.

    conditioning: core's CONDITIONING, for the model's inputs beside the text.
    prompt_lengths: tokens; empty takes the conditioning's own length.

    Returns the number of runs and the seconds they took. The images are discarded.

    Raises ValueError: nothing to run, or more than `check_amount` allows.
    """
    check_amount(sizes, batches, prompt_lengths)
    runs = [(size, batch, length) for size in sizes for batch in batches for length in prompt_lengths or (None,)]
    if not runs:
        raise ValueError("Nothing to run: give at least one size and one batch.")
    layout = latent_layout(model)
    model = model.clone()
    model.model_options["transformer_options"][WARMS_UP] = True
    steps = _STEPS_TO_CAPTURE if is_captured(model) else 1
    progress = comfy.utils.ProgressBar(len(runs))
    started = time.perf_counter()
    for number, (size, batch, length) in enumerate(runs, 1):
        latent = torch.zeros(layout.shape(size, batch))
        prompt = conditioning if length is None else [_of_length(*part, length) for part in conditioning]
        sampler = comfy.samplers.KSampler(model, steps, model.load_device, sampler="euler", scheduler="normal")
        sampler.sample(torch.zeros_like(latent), prompt, prompt, cfg=2.0, latent_image=latent, disable_pbar=True)
        progress.update_absolute(number)
    emit("warmed_up")
    return len(runs), time.perf_counter() - started


def _of_length(text: torch.Tensor, extra: dict[str, Any], length: int) -> list:
    """An entry of a conditioning with text features [B, length, D]: the given ones [B, T, D], repeated or cut.

    An attention mask [B, T] is changed in the same way.
    """
    tokens = text.shape[1]

    def fitted(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * -(-length // tokens), dim=1)[:, :length]

    mask = extra.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim > 1 and mask.shape[1] == tokens:
        extra = {**extra, "attention_mask": fitted(mask)}
    return [fitted(text), extra]


def _mega(pixels: int) -> str:
    """In units of 1024 x 1024, rounded up, so that a refused size never reads like the limit."""
    return str(-(-pixels // (1 << 20)))


def parse_sizes(text: str) -> list[Size]:
    """Sizes in pixels from text such as "1024x1024, 720x960".

    Raises ValueError: a part is not a size; the message shows a valid one.
    """
    sizes = []
    for part in _parts(text):
        match = re.fullmatch(r"(\d+)\s*[x×*]\s*(\d+)", part)
        if match is None or not all(16 <= int(side) <= 16384 for side in match.groups()):
            raise ValueError(f"{part!r} is not a size: write width x height in pixels, 16 to 16384, as in 720x960.")
        sizes.append(Size(int(match[1]), int(match[2])))
    return sizes


def parse_numbers(text: str, name: str, largest: int) -> list[int]:
    """Whole numbers from text such as "1, 2, 4".

    Raises ValueError: a part is not a number from 1 to `largest`.
    """
    numbers = []
    for part in _parts(text):
        if not part.isdecimal() or not 1 <= int(part) <= largest:
            raise ValueError(f"{part!r} is not valid for {name}: write whole numbers from 1 to {largest}, as in 1, 4.")
        numbers.append(int(part))
    return numbers


class Limit(str):
    """The least or largest number allowed in a text such as "1, 2, 4", as an input's `min` or `max`.

    Core compares a value with these before the run and marks that input alone, where what `validate_inputs` refuses
    marks all that it is given. A text with anything but numbers is below any limit.
    """

    def __gt__(self, text: str) -> bool:
        return not all(part.isdecimal() and int(part) >= int(self) for part in _parts(text))

    def __lt__(self, text: str) -> bool:
        return any(part.isdecimal() and int(part) > int(self) for part in _parts(text))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"[,;\n]", text) if part.strip()]
