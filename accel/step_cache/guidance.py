"""Classifier-free guidance with the prediction without the prompt left out, where the prompt's effect is known.

That effect, the difference of both predictions, changes more slowly than either (Castillo et al., "Adaptive Guidance",
arXiv 2312.12487; Lyu et al., "FasterCache", arXiv 2410.19355).
"""

from __future__ import annotations

import torch

MOST_STEPS = 16
"""Of runs that leave it out. In such runs neighbouring steps are too far apart to skip the model's deep part, which
saves more in longer ones."""


class Guidance:
    """The difference of both predictions in the last step that made both. Memory: one latent.

    scale: of the guidance, as samplers have it.
    """

    def __init__(self, scale: float):
        self.is_asked = False
        """Whether both predictions were asked for in the current evaluation; set by the run."""
        self._scale = scale
        self._step: int | None = None
        self._difference: torch.Tensor | None = None

    def is_of(self, step: int) -> bool:
        return self._step == step

    def record(self, step: int, cond: torch.Tensor, uncond: torch.Tensor) -> None:
        self._step, self._difference = step, cond - uncond

    def forget(self) -> None:
        self._step = self._difference = None

    def uncond(self, cond: torch.Tensor) -> torch.Tensor:
        """The prediction without the prompt, by the one with it."""
        return cond - self._difference

    def fits(self, shape: torch.Size) -> bool:
        return self._difference is not None and self._difference.shape == shape

    def guided(self, cond: torch.Tensor, uncond: torch.Tensor) -> torch.Tensor:
        return uncond + self._scale * (cond - uncond)
