"""Extrapolation of a feature from its values at the last refreshes.

In the spirit of TaylorSeer (Liu et al., arXiv 2503.06923) and Spectrum (arXiv 2603.01623): features move along smooth
curves from step to step, so a curve through the last ones is closer than the last one alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

ORDER = 1
"""Degree of the polynomial; the history has one point more. On the trained test network curves of degree 2 are worse
by 1 to 4 dB at an interval of 3, and by more at 5. Nor is it chosen, or the line damped, by what would have been right
at the last full step: that makes the features' error smaller and the images of some samplers worse
(docs/lab/deepcache.md)."""

REACH = 1.0
"""How far beyond the newest point the curve is followed, in lengths of the last segment; from there on the forecast is
constant, since a short segment says little about a long distance."""


def weights(points: Sequence[float], at: float) -> list[float]:
    """Lagrange weights: sum(w[i] * f[i]) is the polynomial through (points[i], f[i]) at `at`. They add up to 1.

    points: newest first, all different.
    """
    result = []
    for i, own in enumerate(points):
        product = 1.0
        for j, other in enumerate(points):
            if j != i:
                product *= (at - other) / (own - other)
        result.append(product)
    return result


class History:
    """The last `keep` points of one feature, newest first, each with a copy of the feature."""

    def __init__(self, keep: int):
        self._keep = keep
        self._points: list[tuple[int, float, torch.Tensor]] = []

    @property
    def newest(self) -> int:
        """The step that was recorded last."""
        return self._points[0][0]

    def fits(self, feature: torch.Tensor) -> bool:
        """Whether all points have the shape and dtype of `feature`."""
        return all(known.shape == feature.shape and known.dtype == feature.dtype for _, _, known in self._points)

    def record(self, step: int, at: float, feature: torch.Tensor, owned: bool = False) -> None:
        """Add the feature at the place `at` on the curve.

        Another evaluation of the same step, or at the same place, replaces its point; a feature of another shape or
        dtype replaces all points. owned: nobody writes to `feature` any more, so it need not be copied.
        """
        if not self.fits(feature):
            self._points.clear()
        self._points = [point for point in self._points if point[0] != step and not _is_same(point[1], at)]
        del self._points[self._keep - 1 :]
        self._points.insert(0, (step, at, feature if owned else feature.clone()))

    def value(self, at: float) -> torch.Tensor:
        """The feature at the place `at`, in memory of its own: the forecast, or the newest point where it is the only
        one."""
        newest = self._points[0][2]
        result = newest.clone()
        if len(self._points) > 1:
            points = [place for _, place, _ in self._points]
            for weight, (_, _, older) in zip(weights(points, reachable(points, at)), self._points, strict=True):
                if older is not newest:
                    # The weights add up to 1. Differences of neighbours keep their digits in half precision.
                    result.add_(older - newest, alpha=weight)
        return result

    def error(self, at: float, feature: torch.Tensor, samples: int) -> torch.Tensor | None:
        """The mean squared error of the forecast of `feature`, which is at the place `at`: of each sample, where the
        feature's first dimension has so many, else of all [1]. None where it does not fit."""
        if not self.fits(feature):
            return None
        difference = self.value(at).sub_(feature)
        rows = difference.reshape(samples if difference.shape[0] == samples else 1, -1)
        # Adds up in float32 without a copy in it.
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).square() / max(rows.shape[1], 1)


def _is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def reachable(points: Sequence[float], at: float) -> float:
    """`at`, or as far towards it from the newest point as the last segment is long, times `REACH`."""
    reach = REACH * abs(points[0] - points[1])
    return points[0] + min(max(at - points[0], -reach), reach)
