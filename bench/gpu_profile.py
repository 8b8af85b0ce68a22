"""The part "profile" of `bench gpu`: what a step spends in each kernel, contender by contender.

Import it after `inprocess.boot` and `pack.load`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from comfy_accel.accel.core.errors import one_line
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .gpu_cases import CONTENDERS, SAMPLED, Case, TimeBudget, skipped
from .gpu_contenders import Lineup
from .gpu_runs import Runs
from .gpu_steps import WARM_UP
from .report import Row

SHOWN = 25
"""Kernels of a contender that have a row of their own, those that take most first."""

NAME_LENGTH = 90
"""Characters of a kernel's name; C++ templates have hundreds."""


def rows(
    model: str, runs: Runs, lineup: Lineup, case: Case, names: Sequence[str], budget: TimeBudget, device: torch.device
) -> Iterator[Row]:
    """A row for each of the longest kernels of a contender's step, and one for the others together.

    Without a GPU the rows are of operators.
    """
    is_cuda = device.type == "cuda"
    for name in names:
        place = {"part": "profile", "model": model, "size": case.size, "batch": case.batch, "contender": name}
        if not budget.fits():
            yield skipped("profile", model, str(case), name)
            continue
        try:
            with lineup.running(name):
                patcher = lineup.patcher(name)
                runs.run(patcher, case, WARM_UP if CONTENDERS[name].has_graphs else SAMPLED)
                activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
                with profile(activities=[activity], acc_events=True) as seen:
                    runs.run(patcher, case, SAMPLED)
        except Exception as error:
            yield {**place, "failed": one_line(error)}
            continue
        kernels = [
            (event.key, event.count, event.self_device_time_total if is_cuda else event.self_cpu_time_total)
            for event in seen.key_averages()
            if not is_cuda or event.device_type == DeviceType.CUDA
        ]
        kernels.sort(key=lambda kernel: -kernel[2])
        total = sum(microseconds for _, _, microseconds in kernels)
        if not total:
            yield skipped("profile", model, str(case), name, "the profiler saw no kernel")
            continue
        others = kernels[SHOWN:]
        rest = ("others", sum(count for _, count, _ in others), sum(time for _, _, time in others))
        for kernel, count, microseconds in [*kernels[:SHOWN], *([rest] if others else [])]:
            yield {
                **place,
                "kernel": kernel[:NAME_LENGTH],
                "calls": round(count / SAMPLED, 1),
                "kernel_ms": round(microseconds / SAMPLED / 1e3, 4),
                "share": round(microseconds / total, 4),
            }
