"""The predictions of a run's last full steps, and what they foretell of the next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from .features import weights

FOLLOW_RATIO = 0.5
"""How far a prediction follows when the latent is moved, as a share of the move. On the trained networks it is from
about 0 where there is much noise to about 1 where there is little, and differs from image to image."""


@dataclass(frozen=True)
class Evaluation:
    """index: of the run's evaluations. place: its noise level in radians. latent, prediction: [B, ...], the latter of
    the denoised latent, as the model made it or as it was extrapolated. given: what the sampler got; of skipped
    ones."""

    index: int
    place: float
    level: float
    latent: torch.Tensor
    prediction: torch.Tensor
    given: torch.Tensor | None = None


class FullEvaluations:
    """The last two full evaluations, the newest first, as long as the model is asked the same. Memory: four latents,
    most of which the sampler holds as well.

    follows: `FOLLOW_RATIO`, or 0 where the latent is moved by noise.
    """

    def __init__(self, follows: float = FOLLOW_RATIO):
        self._follows = follows
        self.known: list[Evaluation] = []
        self._situation: Hashable = None

    def enter(self, situation: Hashable) -> bool:
        """Forget them if it is another situation; whether it is."""
        is_new, self._situation = situation != self._situation, situation
        if is_new:
            self.known.clear()
        return is_new

    def add(self, now: Evaluation) -> None:
        self.known = [now, *self.known[:1]]

    def error_of(self, now: Evaluation) -> torch.Tensor | None:
        """How far its prediction is from what they foretell: root mean squares as shares of its range [B], on the
        device. None where there are not two."""
        if len(self.known) < 2 or any(one.latent.shape != now.latent.shape for one in self.known):
            return None
        held, moved = mixed(self.known, self.factors(now.place), now.latent, now.level)
        off = held + self._follows * (moved - held) - now.prediction
        flat = now.prediction.flatten(1).float()
        peak = (flat.amax(1) - flat.amin(1)).clamp_min(1e-9)
        return off.flatten(1).float().square().mean(1).sqrt() / peak

    def factors(self, place: float) -> list[float]:
        """The weight of each in a forecast at the noise level `place`."""
        places = [one.place for one in self.known]
        return weights(places, place)


def mixed(
    points: Sequence[Evaluation], factors: Sequence[float], latent: torch.Tensor, level: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The prediction for `latent` at `level` on the line through those of `points`: as it would be if predictions did
    not follow the latent, and if they followed it all the way."""
    held = sum(factor * one.prediction for factor, one in zip(factors, points, strict=True))
    noise = sum(factor / one.level * (one.latent - one.prediction) for factor, one in zip(factors, points, strict=True))
    return held, latent - level * noise
