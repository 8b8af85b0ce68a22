"""How much two pictures are alike: PSNR and SSIM, of tensors [B, C, H, W] with values in 0..1."""

from __future__ import annotations

import torch
from torch.nn import functional

IDENTICAL = 100.0
"""The PSNR, in dB, of pictures without a difference; nothing counts for more."""


def psnr(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """For each picture [B], in dB, at most IDENTICAL: of the mean squared error, to the range 0..1."""
    return _decibels(actual, expected, torch.ones(len(expected), dtype=torch.float64))


def latent_psnr(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The same of latents, to the range of values in each of the expected ones: what DeepCache's quality target is."""
    values = expected.double().flatten(1)
    return _decibels(actual, expected, values.amax(1) - values.amin(1))


def _decibels(actual: torch.Tensor, expected: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    error = (actual.double() - expected.double()).square().flatten(1).mean(1)
    return (10 * (peak**2 / error).log10()).clamp(max=IDENTICAL)


def ssim(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """For each picture [B], at most 1, mean over channels and over every place where the window fits.

    Wang, Bovik, Sheikh, Simoncelli: "Image quality assessment: from error visibility to structural similarity",
    IEEE TIP 2004, with its window (11×11 Gaussian, standard deviation 1.5; smaller pictures, a smaller window)
    and constants (0.01, 0.03).
    """
    size = min(11, *actual.shape[-2:])
    offsets = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    line = torch.exp(-(offsets**2) / (2 * 1.5**2))
    line = line / line.sum()

    def smooth(image: torch.Tensor) -> torch.Tensor:
        channels = image.shape[1]
        kernel = (line[:, None] * line[None, :]).expand(channels, 1, size, size)
        return functional.conv2d(image, kernel, groups=channels)

    a, b = actual.double(), expected.double()
    mean_a, mean_b = smooth(a), smooth(b)
    variance_a = smooth(a * a) - mean_a**2
    variance_b = smooth(b * b) - mean_b**2
    covariance = smooth(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    similarity = ((2 * mean_a * mean_b + c1) * (2 * covariance + c2)) / (
        (mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2)
    )
    return similarity.flatten(1).mean(1)
