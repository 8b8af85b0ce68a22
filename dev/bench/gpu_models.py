"""The models of `bench gpu`, at full size and small, and one run of core's sampler on one of them.

Import it after `inprocess.boot` and `pack.load`.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import comfy.model_management
import comfy.supported_models
import torch
from comfy.patcher_extension import WrappersMP
from kit import made_up_device, tiny_models
from kit.families import FAMILIES, nested
from kit.tiny_models import Family

from . import full_size
from .flops import counted
from .gpu_cases import Case
from .gpu_device import wait
from .session_plan import TOLERANCE, latent_side

QUICK_SCALE = 8
"""Small models' latents are this many times smaller on each side than their pixels say."""


@dataclass(frozen=True)
class Subject:
    """dtype: of the weights, a name of `tiny_models.DTYPES`. tokens: of the prompt.

    frames: of the latents, None for pictures. scale: by which their sides are smaller (`session_plan.latent_side`).
    pixels: of an image, on each side of one of the latent's. sound: the latent that is sampled beside, [C, T, F].
    """

    family: Family
    dtype: str
    tokens: int = 77
    frames: int | None = None
    scale: int = 1
    pixels: int = 8
    sound: tuple[int, ...] | None = None

    @property
    def device(self) -> torch.device:
        return comfy.model_management.get_torch_device()

    def load(self):
        """A ModelPatcher with its weights on the device, where they stay."""
        return self.family.load(tiny_models.DTYPES[self.dtype], device=self.device)

    def latent(self, case: Case) -> Any:
        """Empty, [B, C, (F,) H, W]; with sound, both as core samples them."""
        channels = getattr(comfy.supported_models, self.family.model_class).latent_format.latent_channels
        sides = [latent_side(side, self.scale) * 8 // self.pixels for side in (case.height, case.width)]
        latent = torch.zeros(case.batch, channels, *([self.frames] if self.frames else []), *sides)
        return latent if self.sound is None else nested([latent, torch.zeros(case.batch, *self.sound)])

    def prompts(self) -> tuple[list, list]:
        """Positive and negative conditioning of the same length."""
        return self.family.conditioning(self.tokens, seed=1), self.family.conditioning(self.tokens, seed=2)


FULL = {
    "SDXL": Subject(full_size.SDXL, "fp16"),
    "SD1.5": Subject(full_size.SD15, "fp16"),
    "Flux": Subject(full_size.FLUX, "bf16", tokens=256),
    "Z-Image": Subject(full_size.Z_IMAGE, "bf16", tokens=96),
    "Qwen-Image": Subject(full_size.QWEN_IMAGE, "bf16", tokens=64, frames=1),
    "Wan": Subject(full_size.WAN, "bf16", tokens=512, frames=5),
    "SD3": Subject(full_size.SD3, "fp16", tokens=154),
    "Flux.2": Subject(full_size.FLUX2, "bf16", tokens=512, pixels=16),
    "HunyuanVideo": Subject(full_size.HUNYUAN_VIDEO, "bf16", tokens=256, frames=5),
    "LTX 2": Subject(full_size.LTX_2, "bf16", tokens=1024, frames=5, pixels=32, sound=(8, 33, 16)),
}
"""Dtypes as core chooses them on a recent card. 5 latent frames are a clip of 17, of LTX 2 one of 33."""


def shallow(name: str, layers: int) -> Subject:
    """The full-size model with so many layers of each kind."""
    subject = FULL[name]
    if name in ("SD1.5", "SDXL"):
        upper = int(name == "SD1.5")  # transformer blocks at the upper level
        changes = {
            **{"channel_mult": [1, 2], "num_res_blocks": [layers] * 2, "transformer_depth_middle": 1},
            "transformer_depth": [upper] * layers + [1] * layers,
            "transformer_depth_output": [upper] * (layers + 1) + [1] * (layers + 1),
        }
    else:
        depths = dict.fromkeys(("Flux", "Flux.2", "HunyuanVideo"), ("depth", "depth_single_blocks"))
        depths |= {"Z-Image": ("n_layers", "n_refiner_layers"), "SD3": ("num_blocks",)}
        changes = dict.fromkeys(depths.get(name, ("num_layers",)), layers)
    return replace(subject, family=replace(subject.family, config={**subject.family.config, **changes}))


_SDXL = {
    **tiny_models.UNET,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [0, 1],
    "transformer_depth_output": [0, 0, 1, 1],
    "use_linear_in_transformer": True,
    "context_dim": 64,
    "num_classes": "sequential",
    "adm_in_channels": 2816,
}
_small = {name: FAMILIES[name].family for name in ("SD1.5", "Flux", "Z-Image", "Qwen-Image", "Wan")}
_small["SDXL"] = Family("SDXL", "SDXL", _SDXL, 64, 1280)

QUICK = {
    name: replace(
        FULL[name],
        family=family,
        dtype="fp32",
        tokens=24,
        scale=QUICK_SCALE,
        frames=FULL[name].frames and min(FULL[name].frames, 2),
    )
    for name, family in _small.items()
}


class Run(NamedTuple):
    """image: the finished latent. seconds: of the whole run, compiling included. steps: seconds of each step but the
    first, which includes the run's set-up. answer: the model's output in the first step, cond and uncond [2 B, ...],
    before classifier-free guidance. host_ms, device_ms: of the model's calls in a step, until Python has them queued
    and from the first kernel to the last; device_ms None without a GPU."""

    image: torch.Tensor
    seconds: float
    steps: list[float]
    answer: torch.Tensor
    host_ms: float
    device_ms: float | None


class CallTimes:
    """How long each of the model's calls keeps Python and the device, outside of what compilers see."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self.host: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def watch(self, model: Any) -> None:
        """Watch the runs of this ModelPatcher and of its clones."""

        def timed(executor: Any, *args: Any, **kwargs: Any) -> Any:
            events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2 if self._is_cuda else 0))
            began = time.perf_counter()
            for event in events[:1]:
                event.record()
            out = executor(*args, **kwargs)
            for event in events[1:]:
                event.record()
            self.host.append((time.perf_counter() - began) * 1e3)
            self._events += [events] if events else []
            return out

        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "bench", timed)

    def of_a_step(self, steps: int) -> tuple[float, float | None]:
        """Milliseconds of a step's calls on either side, the median, of a run that is over; and forget them."""
        host, device = self.host, [began.elapsed_time(ended) for began, ended in self._events]
        self.host, self._events, calls = [], [], len(self.host) / steps
        return statistics.median(host) * calls, statistics.median(device) * calls if device else None


class Runs:
    """Runs of core's sampler on one model. model: the ModelPatcher that every contender's is made of; the subject's."""

    def __init__(self, subject: Subject, model: Any = None):
        self._subject = subject
        self._device = subject.device
        self._answer: torch.Tensor | None = None
        self._calls = CallTimes(self._device)
        self.model = model or subject.load()
        # Outside of what compilers see; a function, since cloning copies methods with their objects.
        self.model.set_model_sampler_pre_cfg_function(lambda args: self._see(args))
        self._calls.watch(self.model)
        self._prompts = subject.prompts()
        self._flops: dict[Case, int] = {}

    def run(self, model: Any, case: Case, steps: int) -> Run:
        """Sample the case in so many steps, as ComfyUI's own node does."""
        self._answer = None
        ends: list[float] = []

        def after_step(*_: Any) -> None:
            wait(self._device)
            ends.append(time.perf_counter())

        wait(self._device)
        started = time.perf_counter()
        image = tiny_models.sample_latent(model, self._subject.latent(case), *self._prompts, steps, callback=after_step)
        wait(self._device)
        seconds = time.perf_counter() - started
        each = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        return Run(image.float().cpu(), seconds, each, self._answer, *self._calls.of_a_step(steps))

    def _see(self, args: dict[str, Any]) -> Any:
        """Keep the model's first output of a run before guidance."""
        if self._answer is None:
            self._answer = torch.cat(list(args["conds_out"])).float().cpu()
        return args["conds_out"]

    def flops(self, case: Case) -> int:
        """Floating-point operations of one eager step, by torch's count."""
        if case not in self._flops:
            with counted(self._device) as counter:
                self.run(self.model, case, steps=1)
            self._flops[case] = counter.get_total_flops()
        return self._flops[case]


def tolerance(dtype: str) -> float | None:
    """The largest `difference` of a right output; None on the made-up device, which computes no values."""
    return None if made_up_device.is_here() else TOLERANCE[dtype]


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest one, as a fraction of the largest expected value; infinite where a value is not finite."""
    actual, expected = actual.float(), expected.float()
    value = ((actual - expected).abs().max() / expected.abs().max()).item()
    return value if math.isfinite(value) else math.inf


def free() -> None:
    """Let go of what nobody holds any more, and of all that was compiled in this process."""
    torch._dynamo.reset()
    comfy.model_management.unload_all_models()
    gc.collect()
    torch.cuda.empty_cache()
