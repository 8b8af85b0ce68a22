"""Refresh policies of other methods, each by its own signal, without the constants that their authors fit to a model.

A policy here is asked before a step's model call, where the authors' code decides within it. So each goes by the pace
up to the step before, as `drift.Drift` tells it, and nothing waits for the device. `interval` bounds each: the authors
bound the steps that may be skipped in a row, or should.
"""

from __future__ import annotations

from ..refresh import Step, UniformRefresh
from .drift import Drift


class FirstBlockRefresh(UniformRefresh):
    """Refreshes when the shallow part's result has changed by more than `threshold` since the last full step.

    First Block Cache (Cheng: ParaAttention, github.com/chengzeyi/ParaAttention; generalised to the first n blocks by
    cache-dit's DBCache), which compares the residual of a transformer's first block; here it is what the shallow part
    hands to the deep one.
    """

    uses_drift = True

    def should_refresh(self, step: Step, drift: Drift) -> bool:
        expected = drift.predicted(step.index)
        return super().should_refresh(step, drift) or expected is None or not expected <= self.threshold


class TeaRefresh(UniformRefresh):
    """Refreshes when the changes of the deep part's input from step to step add up to more than `threshold`.

    TeaCache (Liu et al., arXiv 2411.19108). It rescales each change of the modulated timestep input by a polynomial
    fit to the model's outputs; here the changes are the latent's, or those of what the shallow part makes, and are not
    rescaled.
    """

    uses_drift = True
    compares_neighbours = True
    _sum = 0.0

    def should_refresh(self, step: Step, drift: Drift) -> bool:
        expected = drift.predicted(step.index)
        self._sum = expected if step.since_refresh <= 1 or expected is None else self._sum + expected
        return super().should_refresh(step, drift) or expected is None or not self._sum <= self.threshold


class MagRefresh(UniformRefresh):
    """Refreshes when the errors that the deep features' growth lets expect add up to more than `threshold`.

    MagCache (Ma et al., arXiv 2506.09045). The magnitude of what the skipped part adds changes from step to step by a
    ratio g; a feature that is k steps old is taken to be wrong by |1 - g^k|, and the errors of skipped steps add up.
    The authors measure the ratios of a model once for every step; here g is that of the last two full steps.
    """

    uses_magnitudes = True
    _sum = 0.0

    def should_refresh(self, step: Step, drift: Drift) -> bool:
        growth = drift.growth(step.index)
        if growth is None or super().should_refresh(step, drift):
            return True
        error = abs(1 - growth**step.since_refresh)
        self._sum = error if step.since_refresh <= 1 else self._sum + error
        return not self._sum <= self.threshold
