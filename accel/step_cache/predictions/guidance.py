"""Classifier-free guidance with the prediction without the prompt left out, where the prompt's effect is known.

That effect, the difference of both predictions, changes more slowly than either (Castillo et al., "Adaptive Guidance",
arXiv 2312.12487; Lyu et al., "FasterCache", arXiv 2410.19355).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from ..step_schedule import stretch_of

MOST_STEPS = 16
"""Of runs that leave it out, with samplers that add noise: their neighbouring steps are then too far apart to skip the
model's deep part, which saves more in longer ones and with other samplers."""


class Guidance:
    """The difference of both predictions in the last step that made both. Memory: one latent.

    scale: gives that of the guidance now, as samplers have it; nodes may change it from step to step. changes: noise
    levels, as angles, at which what is asked of the model becomes another, as where a prompt begins or ends; a
    difference is good up to the next of them.
    """

    def __init__(self, scale: Callable[[], float], changes: Iterable[float] = ()):
        self.is_asked = False
        """Whether both predictions were asked for in the current evaluation; set by the run."""
        self._scale = scale
        self._changes = sorted(changes)
        self._step: int | None = None
        self._stretch: tuple[int, int] | None = None
        self._difference: torch.Tensor | None = None
        self._strength = 0.0
        """Of the guidance in that step: by what it enlarges an error of the prediction without the prompt."""
        self._work: Counter[int] = Counter()

    def is_of(self, step: int) -> bool:
        return self._step == step

    def record(self, step: int, angle: float, cond: torch.Tensor, uncond: torch.Tensor) -> None:
        self._step, self._stretch, self._difference = step, stretch_of(angle, self._changes), cond - uncond
        self._strength = abs(1 - self._scale())

    def forget(self) -> None:
        self._step = self._stretch = self._difference = None

    def uncond(self, cond: torch.Tensor) -> torch.Tensor:
        """The prediction without the prompt, by the one with it."""
        return cond - self._difference

    def is_known(self, angle: float) -> bool:
        """Whether the difference is of the same prompts as those at this noise level."""
        return self._stretch == stretch_of(angle, self._changes)

    def fits(self, shape: torch.Size, angle: float) -> bool:
        return self.is_known(angle) and self._difference.shape == shape

    @property
    def is_stronger(self) -> bool:
        """Whether errors count for more now than in that step."""
        return abs(1 - self._scale()) > self._strength

    def guided(self, cond: torch.Tensor, uncond: torch.Tensor) -> torch.Tensor:
        return uncond + self._scale() * (cond - uncond)

    def note_call(self, size: int, cond_indices: Sequence[int]) -> None:
        """Note what a full step's call of the model computes: chunks of `size` values, with (0) or without the
        prompt (1)."""
        for index in cond_indices:
            self._work[index] += size

    @property
    def share(self) -> float:
        """The share of a full step's work that the prediction without the prompt takes."""
        return self._work[1] / max(self._work.total(), 1)
