"""What the predictions of a run's last full steps foretell of later ones.

In the spirit of TaylorSeer (Liu et al., arXiv 2503.06923), which draws lines through the features of a model's blocks:
a line through what the sampler is given is as close or closer, needs two latents, and no part of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Evaluation:
    """What the sampler asked for once. index: of the run's evaluations. angle, level: its noise level, in radians and
    as the sampler has it. latent, prediction: [B, ...], the latter of the denoised latent. parts: other predictions
    that the sampler goes by."""

    index: int
    angle: float
    level: float
    latent: torch.Tensor
    prediction: torch.Tensor
    parts: Sequence[torch.Tensor] = ()


def forecast(
    points: Sequence[Evaluation], angle: float, level: float, latent: torch.Tensor, follows: float | None = None
) -> torch.Tensor:
    """The prediction for `latent` at a noise level, on the line through those of one or two `points`.

    follows: how far a prediction follows where the latent is moved, as a share of the move: 0 where it is moved by
    noise. None: as on the trained networks, by half where there is much noise and all the way where there is little.
    """
    first, *others = points
    factors = [1.0]
    if others:
        second = (angle - first.angle) / (others[0].angle - first.angle)
        factors = [1 - second, second]
    held = sum(factor * one.prediction for factor, one in zip(factors, points, strict=True))
    if follows is None:
        follows = 1 - 0.5 * math.tan(min(angle, math.pi / 4))
    if not follows:
        return held
    noise = sum(factor / one.level * (one.latent - one.prediction) for factor, one in zip(factors, points, strict=True))
    return held + follows * (latent - level * noise - held)


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Root mean squares of their difference as shares of the other's range [B], on the device."""
    flat = other.flatten(1).float()
    peak = (flat.amax(1) - flat.amin(1)).clamp_min(1e-9)
    return (one - other).flatten(1).float().square().mean(1).sqrt() / peak
