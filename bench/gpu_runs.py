"""One run of core's sampler at a case: the image, each step's seconds, and the model's own first answer.

Import it after `inprocess.boot` and `pack.load`.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any, NamedTuple

import torch
from comfy_accel.accel.compile.benchmark import TOLERANCE
from kit import made_up_device, tiny_models
from torch.utils.flop_counter import FlopCounterMode

from . import similarity
from .gpu_cases import Case
from .gpu_device import wait
from .gpu_models import Subject


class Run(NamedTuple):
    """image: the finished latent. seconds: of the whole run, its compiling included. steps: seconds of each step after
    the first, which has what a run begins with in it. answer: what the model said in its first step, cond and uncond
    [2 B, ...], before classifier-free guidance."""

    image: torch.Tensor
    seconds: float
    steps: list[float]
    answer: torch.Tensor


class FirstAnswer:
    """Sees what the model says before guidance; outside of what compilers look at."""

    def __init__(self) -> None:
        self.answer: torch.Tensor | None = None

    def watch(self, model: Any) -> None:
        """From now on it sees the runs of this ModelPatcher and of its clones."""

        def see(args: dict[str, Any]) -> Any:  # a function, since cloning copies objects
            if self.answer is None:
                self.answer = torch.cat(list(args["conds_out"])).float().cpu()
            return args["conds_out"]

        model.set_model_sampler_pre_cfg_function(see)


class Runs:
    """Runs on one model. model: its ModelPatcher, which every contender's is made of."""

    def __init__(self, subject: Subject):
        self._subject = subject
        self._device = subject.device
        self._first = FirstAnswer()
        self.model = subject.load()
        self._first.watch(self.model)
        self._prompts = subject.prompts()
        self._flops: dict[Case, int] = {}

    def run(self, model: Any, case: Case, steps: int) -> Run:
        """Sample the case in so many steps, as ComfyUI's own node does."""
        self._first.answer = None
        ends: list[float] = []

        def after_step(*_: Any) -> None:
            wait(self._device)
            ends.append(time.perf_counter())

        wait(self._device)
        started = time.perf_counter()
        image = tiny_models.sample(model, self._subject.latent(case), *self._prompts, steps, callback=after_step)
        wait(self._device)
        seconds = time.perf_counter() - started
        each = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        return Run(image.float().cpu(), seconds, each, self._first.answer)

    def flops(self, case: Case) -> int:
        """Floating-point operations of one step, by torch's count of an eager one."""
        if case in self._flops:
            return self._flops[case]
        # The counter knows attention written out, not the CPU's fused kind.
        from torch.nn.attention import SDPBackend, sdpa_kernel

        written_out = sdpa_kernel(SDPBackend.MATH) if self._device.type == "cpu" else contextlib.nullcontext()
        with FlopCounterMode(display=False) as counter, written_out:
            self.run(self.model, case, steps=1)
        self._flops[case] = counter.get_total_flops()
        return self._flops[case]


def tolerance(dtype: str) -> float | None:
    """The largest `difference` of a right output; None on the made-up device, which computes no values."""
    return None if made_up_device.is_here() else TOLERANCE[tiny_models.DTYPES[dtype]]


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, as a fraction of the largest value expected; infinite where something is not finite."""
    value = ((actual - expected).abs().max() / expected.abs().max()).item()
    return value if math.isfinite(value) else math.inf


def decibels(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """PSNR of finished latents over the range of the expected ones, mean over the batch."""
    low, high = expected.min(), expected.max()
    one, other = ((image - low) / (high - low) for image in (actual, expected))
    return round(similarity.psnr(one, other).mean().item(), 2)
