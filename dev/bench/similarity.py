"""How much two pictures are alike: PSNR, of tensors [B, C, H, W] with values in 0..1."""

from __future__ import annotations

import torch

IDENTICAL = 100.0
"""The PSNR, in dB, of pictures without a difference; nothing counts for more."""


def psnr(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """For each picture [B], in dB, at most IDENTICAL: of the mean squared error, to the range 0..1."""
    return _ratio(actual, expected, torch.ones(len(expected), dtype=torch.float64))


def latent_psnr(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The same of latents, to the range of values in each of the expected ones: what DeepCache's quality target is."""
    values = expected.double().flatten(1)
    return _ratio(actual, expected, values.amax(1) - values.amin(1))


def decibels(actual: torch.Tensor, expected: torch.Tensor, psnr=latent_psnr) -> float:
    """The same of one latent, or of one picture with `psnr`, as rows have it."""
    return round(psnr(actual, expected).item(), 2)


def _ratio(actual: torch.Tensor, expected: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    error = (actual.double() - expected.double()).square().flatten(1).mean(1)
    return (10 * (peak**2 / error).log10()).clamp(max=IDENTICAL)
