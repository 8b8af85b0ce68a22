"""Ten models at the size of their published checkpoints, as core's own detection would describe these, and runs of
core's sampler on one of them.

Import it after `inprocess.boot`. Nothing is downloaded: weights are random, made where they are to lie.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import comfy.ldm.flux.model
import comfy.ldm.hunyuan_video.model
import comfy.model_management
import comfy.supported_models
import torch
from comfy.patcher_extension import WrappersMP
from kit import tiny_models
from kit.families import FAMILIES, nested
from kit.tiny_models import Family, known_to

from .flops import counted
from .session_plan import Case, latent_side

_UNET = {
    **{"use_checkpoint": False, "image_size": 32, "use_spatial_transformer": True, "legacy": False},
    **{"in_channels": 4, "out_channels": 4, "model_channels": 320},
    **{"use_temporal_resblock": False, "use_temporal_attention": False},
}

SD15 = Family(
    "SD1.5",
    "SD15",
    {
        **{**_UNET, "adm_in_channels": None, "num_res_blocks": [2, 2, 2, 2], "channel_mult": [1, 2, 4, 4]},
        **{"transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_middle": 1},
        **{"transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0], "use_linear_in_transformer": False},
        **{"context_dim": 768, "num_heads": 8, "num_head_channels": -1},
    },
    context_dim=768,
)

SDXL = Family(
    "SDXL",
    "SDXL",
    {
        **{**_UNET, "num_classes": "sequential", "adm_in_channels": 2816},
        **{"num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4], "transformer_depth": [0, 0, 2, 2, 10, 10]},
        **{"transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "transformer_depth_middle": 10},
        **{"use_linear_in_transformer": True, "context_dim": 2048, "num_heads": -1, "num_head_channels": 64},
    },
    context_dim=2048,
    pooled_dim=1280,
)

FLUX = Family(
    "Flux",
    "Flux",
    {
        **{"image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 768},
        **{"context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19},
        **{"depth_single_blocks": 38, "axes_dim": [16, 56, 56], "theta": 10000, "qkv_bias": True},
        "guidance_embed": True,
        **known_to(comfy.ldm.flux.model.FluxParams, txt_ids_dims=[], yak_mlp=False, txt_norm=False),
    },
    context_dim=4096,
    pooled_dim=768,
    control={"depth": 5, "depth_single_blocks": 10},
)
"""As Flux-dev; its ControlNet as deep as published ones."""

QWEN_IMAGE = Family(
    "Qwen-Image",
    "QwenImage",
    {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60},
    context_dim=3584,
)

WAN = Family(
    "Wan",
    "WAN21_T2V",
    {
        **{"image_model": "wan2.1", "model_type": "t2v", "dim": 1536, "out_dim": 16, "num_heads": 12, "ffn_dim": 8960},
        **{"num_layers": 30, "patch_size": (1, 2, 2), "freq_dim": 256, "window_size": (-1, -1), "qk_norm": True},
        **{"cross_attn_norm": True, "eps": 1e-6, "in_dim": 16},
    },
    context_dim=4096,
)
"""As Wan 2.1, text to video, 1.3B."""

Z_IMAGE = Family(
    "Z-Image",
    "ZImage",
    {
        **{"image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 3840, "cap_feat_dim": 2560},
        **{"n_layers": 30, "qk_norm": True, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48]},
        **{"axes_lens": [1536, 512, 512], "rope_theta": 256.0, "ffn_dim_multiplier": 8.0 / 3.0},
        **{"z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32},
    },
    context_dim=2560,
)

SD3 = Family(
    "SD3",
    "SD3",
    {
        **{"in_channels": 16, "out_channels": 16, "patch_size": 2, "depth": 38, "input_size": None},
        **{"adm_in_channels": 2048, "num_patches": 192 * 192, "pos_embed_max_size": 192},
        "context_embedder_config": {
            "target": "torch.nn.Linear",
            "params": {"in_features": 4096, "out_features": 2432},
        },
        **{"pos_embed_scaling_factor": None, "qk_norm": "rms", "x_block_self_attn_layers": []},
    },
    context_dim=4096,
    pooled_dim=2048,
)
"""As Stable Diffusion 3.5 large."""

FLUX2 = Family(
    "Flux.2",
    "Flux2",
    {
        **FLUX.config,
        **{"image_model": "flux2", "in_channels": 128, "out_channels": 128, "patch_size": 1, "vec_in_dim": None},
        **{"context_in_dim": 15360, "hidden_size": 6144, "num_heads": 48, "depth": 8, "depth_single_blocks": 48},
        **{"axes_dim": [32, 32, 32, 32], "theta": 2000, "mlp_ratio": 3.0, "qkv_bias": False, "ops_bias": False},
        **{"global_modulation": True, "mlp_silu_act": True, "default_ref_method": "index", "ref_index_scale": 10.0},
        **known_to(comfy.ldm.flux.model.FluxParams, txt_ids_dims=[3]),
    },
    context_dim=15360,
)
"""As Flux.2 dev."""

HUNYUAN_VIDEO = Family(
    "HunyuanVideo",
    "HunyuanVideo",
    {
        **{"image_model": "hunyuan_video", "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2]},
        **{"vec_in_dim": 768, "axes_dim": [16, 56, 56], "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0},
        **{"num_heads": 24, "depth": 20, "depth_single_blocks": 40, "theta": 256, "qkv_bias": True, "byt5": False},
        **{"guidance_embed": True, "meanflow": False, "use_cond_type_embedding": False, "vision_in_dim": None},
        **known_to(comfy.ldm.hunyuan_video.model.HunyuanVideoParams, meanflow_sum=False),
    },
    context_dim=4096,
    pooled_dim=768,
)

LTX_2 = Family(
    "LTX 2",
    "LTXAV",
    {"image_model": "ltxav", "num_layers": 48, "attention_head_dim": 128, "cross_attention_dim": 4096}
    | {"rope_type": "split"},
    context_dim=2 * 3840,
)
"""With prompts as its text encoder's node hands them out."""


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

    def load(self):
        """A ModelPatcher with its weights on the device, where they stay."""
        device = comfy.model_management.get_torch_device()
        return self.family.load(tiny_models.DTYPES[self.dtype], device=device)

    def make_latent(self, case: Case) -> Any:
        """Empty, [B, C, (F,) H, W]; with sound, both as core samples them."""
        channels = getattr(comfy.supported_models, self.family.model_class).latent_format.latent_channels
        sides = [latent_side(side, self.scale) * 8 // self.pixels for side in (case.height, case.width)]
        latent = torch.zeros(case.batch, channels, *([self.frames] if self.frames else []), *sides)
        return latent if self.sound is None else nested([latent, torch.zeros(case.batch, *self.sound)])

    def make_prompts(self) -> tuple[list, list]:
        """Positive and negative conditioning of the same length."""
        return self.family.conditioning(self.tokens, seed=1), self.family.conditioning(self.tokens, seed=2)


FULL = {
    "SDXL": Subject(SDXL, "fp16"),
    "SD1.5": Subject(SD15, "fp16"),
    "Flux": Subject(FLUX, "bf16", tokens=256),
    "Z-Image": Subject(Z_IMAGE, "bf16", tokens=96),
    "Qwen-Image": Subject(QWEN_IMAGE, "bf16", tokens=64, frames=1),
    "Wan": Subject(WAN, "bf16", tokens=512, frames=5),
    "SD3": Subject(SD3, "fp16", tokens=154),
    "Flux.2": Subject(FLUX2, "bf16", tokens=512, pixels=16),
    "HunyuanVideo": Subject(HUNYUAN_VIDEO, "bf16", tokens=256, frames=5),
    "LTX 2": Subject(LTX_2, "bf16", tokens=1024, frames=5, pixels=32, sound=(8, 33, 16)),
}
"""Dtypes as core chooses them on a recent card. 5 latent frames are a clip of 17, of LTX 2 one of 33."""


def make_shallow(name: str, layers: int) -> Subject:
    """The full-size model with so many layers of each kind."""
    subject = FULL[name]
    if name in UNETS:
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


def make_small(name: str) -> Subject:
    """A small model of the same family, with latents an eighth as large on each side, for the CPU."""
    frames = FULL[name].frames and min(FULL[name].frames, 2)
    family = _SMALL_SDXL if name == "SDXL" else FAMILIES[name].family
    return replace(FULL[name], family=family, dtype="fp32", tokens=24, scale=8, frames=frames)


_SMALL_SDXL = Family(
    "SDXL",
    "SDXL",
    {
        **{**tiny_models.UNET, "num_res_blocks": [1, 1], "channel_mult": [1, 2], "transformer_depth": [0, 1]},
        **{"transformer_depth_output": [0, 0, 1, 1], "use_linear_in_transformer": True, "context_dim": 64},
        **{"num_classes": "sequential", "adm_in_channels": 2816},
    },
    context_dim=64,
    pooled_dim=1280,
)


def _narrow(family: Family, **config: Any) -> Family:
    return replace(family, config={**family.config, **config, "context_dim": 64}, context_dim=64)


_WIDTH = tiny_models.UNET["model_channels"]
NARROW = {
    "SD1.5": _narrow(SD15, model_channels=_WIDTH, num_heads=tiny_models.UNET["num_heads"]),
    "SDXL": _narrow(SDXL, model_channels=_WIDTH, num_head_channels=16),
    "Flux": Family(
        "Flux",
        "Flux",
        {**tiny_models.FLUX, "depth": 19, "depth_single_blocks": 38, "guidance_embed": True},
        context_dim=64,
        pooled_dim=32,
    ),
}
"""At full depth and a fraction of the width."""

UNETS = ("SD1.5", "SDXL")


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

    def __init__(self, is_cuda: bool):
        self._is_cuda = is_cuda
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

    def take(self, steps: int) -> tuple[float, float | None]:
        """Milliseconds of a step's calls on either side, the median, of a run that is over; and forget them."""
        host, device = self.host, [began.elapsed_time(ended) for began, ended in self._events]
        self.host, self._events, calls = [], [], len(self.host) / steps
        return statistics.median(host) * calls, statistics.median(device) * calls if device else None


class Runs:
    """Runs of core's sampler on the subject. model: the ModelPatcher that every contender's is made of."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self.device = comfy.model_management.get_torch_device()
        self.model = subject.load()
        self._answer: torch.Tensor | None = None
        self._calls = CallTimes(self.device.type == "cuda")
        # Outside of what compilers see; a function, since cloning copies methods with their objects.
        self.model.set_model_sampler_pre_cfg_function(lambda args: self._keep_answer(args))
        self._calls.watch(self.model)
        self._prompts = subject.make_prompts()
        self._flops: dict[Case, int] = {}

    def run(self, model: Any, case: Case, steps: int) -> Run:
        """Sample the case in so many steps, as ComfyUI's own node does."""
        self._answer = None
        ends: list[float] = []
        wait_for(self.device)
        started = time.perf_counter()

        def note_end(*_: Any) -> None:
            wait_for(self.device)
            ends.append(time.perf_counter())

        latent = self.subject.make_latent(case)
        image = tiny_models.sample_latent(model, latent, *self._prompts, steps, callback=note_end)
        wait_for(self.device)
        seconds = time.perf_counter() - started
        each = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        return Run(image.float().cpu(), seconds, each, self._answer, *self._calls.take(steps))

    def _keep_answer(self, args: dict[str, Any]) -> Any:
        if self._answer is None:
            self._answer = torch.cat(list(args["conds_out"])).float().cpu()
        return args["conds_out"]

    def count_flops(self, case: Case) -> int:
        """Floating-point operations of one eager step, by torch's count."""
        if case not in self._flops:
            with counted(self.device) as counter:
                self.run(self.model, case, steps=1)
            self._flops[case] = counter.get_total_flops()
        return self._flops[case]


def wait_for(device: torch.device) -> None:
    """Until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
