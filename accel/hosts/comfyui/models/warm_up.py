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

_STEPS_TO_CAPTURE = 12
"""At most eight calls that compile graphs and compare them with their blocks, then the warm-up, the dry run and the
capture of the call."""


def warm_up(
    model: Any, conditioning: list, sizes: Sequence[Size], batches: Sequence[int], prompt_lengths: Sequence[int] = ()
) -> tuple[int, float]:
    """Sample at every combination of size, batch and prompt length; one step, or as many as capturing takes.

    conditioning: core's CONDITIONING, for the model's inputs beside the text.
    prompt_lengths: tokens; empty takes the conditioning's own length.

    Returns the number of runs and the seconds they took. The images are discarded.

    Raises ValueError: nothing to run.
    """
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
        prompt = conditioning
        if length is not None:
            prompt = [_repeat_to_length(text, extra, length) for text, extra in conditioning]
        sampler = comfy.samplers.KSampler(model, steps, model.load_device, sampler="euler", scheduler="normal")
        sampler.sample(torch.zeros_like(latent), prompt, prompt, cfg=2.0, latent_image=latent, disable_pbar=True)
        progress.update_absolute(number)
    emit("warmed_up")
    return len(runs), time.perf_counter() - started


def _repeat_to_length(text: torch.Tensor, extra: dict[str, Any], length: int) -> list:
    """A conditioning's entry with its text features [B, T, D] and mask [B, T], repeated or cut to [B, length, D]."""
    tokens = text.shape[1]

    def fit(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * -(-length // tokens), dim=1)[:, :length]

    mask = extra.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim > 1 and mask.shape[1] == tokens:
        extra = {**extra, "attention_mask": fit(mask)}
    return [fit(text), extra]


def parse_sizes(text: str) -> list[Size]:
    """Sizes in pixels from text such as "1024x1024, 720x960". Raises ValueError for anything else."""
    sizes = []
    for part in _split_parts(text):
        match = re.fullmatch(r"(\d+)\s*[x×*]\s*(\d+)", part)
        if match is None or not all(16 <= int(side) <= 16384 for side in match.groups()):
            raise ValueError(f"{part!r} is not a size: write width x height in pixels, 16 to 16384, as in 720x960.")
        sizes.append(Size(int(match[1]), int(match[2])))
    return sizes


def parse_numbers(text: str, name: str) -> list[int]:
    """Whole numbers from text such as "1, 2, 4". Raises ValueError for anything else, and below 1."""
    numbers = []
    for part in _split_parts(text):
        if not part.isdecimal() or not int(part):
            raise ValueError(f"{part!r} is not valid for {name}: write whole numbers from 1 on, as in 1, 4.")
        numbers.append(int(part))
    return numbers


def _split_parts(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"[,;\n]", text) if part.strip()]
