"""The noise level of each evaluation of a run, for the most part without waiting for the device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from ....core.events import log
from ....core.host_copy import HostCopy
from ....step_cache.step_schedule import SIGMA_TOLERANCE

LEARNED = 4
"""Evaluations at the schedule's levels, one after the other, after which the sampler is taken to go on like that. All
of core's do (`test_deep_cache_samplers.py`); heunpp2 looks two steps ahead before it comes back."""


class NoiseLevels:
    """Reads the levels of one run.

    Reading one from the device waits until all that is queued there is done, and the device is idle meanwhile. Most
    samplers evaluate each step once, at the step's own level, which is known. So after the first `LEARNED` levels the
    others are reckoned, and compared with what they were as soon as the device has passed them.

    reckons: whether any may be reckoned.
    """

    def __init__(self, reckons: bool):
        self._reckons = reckons
        self._count = 0
        self._reckoned: list[tuple[float, HostCopy]] = []

    def read(self, timestep: torch.Tensor, schedule: Sequence[float]) -> float:
        """The level of the next evaluation. timestep: as the sampler passes it. schedule: the run's levels."""
        place = self._count
        self._count += 1
        expected = schedule[place] if place + 1 < len(schedule) else None
        self._check()
        if self._reckons and expected is not None and place >= LEARNED:
            self._reckoned.append((expected, HostCopy(timestep.max())))
            return expected
        level = float(timestep.max())
        self._reckons = self._reckons and expected is not None and _is_same(level, expected)
        return level

    def _check(self) -> None:
        while self._reckoned and self._reckoned[0][1].has_come():
            expected, level = self._reckoned.pop(0)
            if self._reckons and not _is_same(float(level.read()), expected):
                log.warning("DeepCache: this sampler left the schedule on its way; its levels are read one by one.")
                self._reckons = False


def reckons(sampler: Any, device: torch.device) -> bool:
    """Whether levels need not all be read: the sampler is one of core's, none of which changes its ways in mid-run, and
    reading would wait for the device."""
    return is_of_core(sampler) and device.type == "cuda"


def is_of_core(sampler: Any) -> bool:
    """Whether it is none of a node pack, which may bear the name of the one that it wraps."""
    function = getattr(sampler, "sampler_function", None)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__.partition(".")[0] != "comfy":
        return False
    return getattr(module, function.__name__, function) is function


def _is_same(level: float, expected: float) -> bool:
    return abs(level - expected) <= SIGMA_TOLERANCE * abs(expected)
