"""Small models of ComfyUI's own classes with random weights, and what a workflow puts around them.

Import it after `inprocess.boot`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import comfy.cldm.cldm
import comfy.controlnet
import comfy.ldm.flux.controlnet
import comfy.ldm.flux.model
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sample
import comfy.supported_models
import torch

UNET = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1, 1],
    "channel_mult": [1, 2, 4],
    "transformer_depth": [1, 1, 0],
    "transformer_depth_output": [1, 1, 1, 1, 0, 0],
    "transformer_depth_middle": 1,
    "num_heads": 4,
    "use_spatial_transformer": True,
    "context_dim": 768,
    "use_linear_in_transformer": False,
    "use_temporal_attention": False,
    "legacy": False,
    "adm_in_channels": None,
}
"""SD1.5's layout, 32 channels wide on three levels."""

FLUX = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": 32,
    "context_in_dim": 64,
    "hidden_size": 64,
    "mlp_ratio": 4.0,
    "num_heads": 4,
    "depth": 2,
    "depth_single_blocks": 3,
    "axes_dim": [4, 6, 6],
    "theta": 10000,
    "qkv_bias": True,
    "guidance_embed": False,
}
"""Flux's layout, 64 wide."""

SD3 = {
    "input_size": None,
    "in_channels": 16,
    "depth": 2,
    "num_blocks": 2,
    "num_patches": 24 * 24,
    "pos_embed_max_size": 24,
    "adm_in_channels": 32,
    "qk_norm": "rms",
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 48, "out_features": 128}},
}
"""Two blocks, each of a kind of its own, 128 wide."""

WAN = dict(dim=96, ffn_dim=160, freq_dim=32, text_dim=48, num_heads=4, num_layers=2, in_dim=16)
QWEN_IMAGE = dict(num_layers=2, attention_head_dim=32, num_attention_heads=2, joint_attention_dim=48) | {
    "axes_dims_rope": (8, 12, 12)
}


def known_to(parameters: type, **later: Any) -> dict[str, Any]:
    """Of settings that core has come to ask for since 0.3.75, those that its dataclass of parameters has."""
    return {name: value for name, value in later.items() if name in parameters.__dataclass_fields__}


FLUX |= known_to(comfy.ldm.flux.model.FluxParams, txt_ids_dims=[])

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Family:
    """How models of one architecture are made and prompted.

    model_class: the name of core's class in comfy.supported_models. config: its UNet config. control: what is
        different in the config of its ControlNet. state: what core's class reads of the checkpoint, made anew. fixed:
        what the config has instead of what core's class fixes.
    """

    name: str
    model_class: str
    config: dict[str, Any]
    context_dim: int
    pooled_dim: int | None = None
    control: dict[str, Any] = field(default_factory=dict)
    state: Callable[[], dict[str, torch.Tensor]] = dict
    fixed: dict[str, Any] = field(default_factory=dict)

    def build(self, dtype: torch.dtype, device: torch.device | str = "cpu", stored: torch.dtype | None = None):
        """Core's BaseModel on the device, its weights as the memory was. stored: of them, cast in each call."""
        config = getattr(comfy.supported_models, self.model_class)({**self.config, "dtype": dtype})
        config.unet_config.update(self.fixed)
        if stored is not None:
            config.set_inference_dtype(stored, dtype)
        return config.get_model(self.state(), device=torch.device(device)).eval()

    def load(self, dtype: torch.dtype, seed: int = 0, device: torch.device | None = None):
        """A ModelPatcher; the same weights for the same seed, as from a checkpoint.

        device: the weights are made there and stay there; None: made on the CPU and moved as core moves them.
        """
        model = self.build(dtype, device or "cpu")
        randomize(model.diffusion_model, seed)
        return comfy.model_patcher.ModelPatcher(
            model,
            load_device=device or comfy.model_management.get_torch_device(),
            offload_device=device or comfy.model_management.unet_offload_device(),
        )

    def conditioning(self, tokens: int, seed: int) -> list:
        """Core's CONDITIONING with random text features."""
        generator = torch.Generator().manual_seed(seed)
        extra = {}
        if self.pooled_dim:
            extra["pooled_output"] = torch.randn(1, self.pooled_dim, generator=generator)
        return [[torch.randn(1, tokens, self.context_dim, generator=generator), extra]]

    def control_net(self, dtype: torch.dtype, device: torch.device | None = None):
        """A ControlNet of the same layout, as core's loader would give it; device: as for `load`."""
        common = {"dtype": dtype, "device": device or "cpu", "operations": comfy.ops.disable_weight_init}
        if self.model_class in ("SD15", "SDXL"):
            settings = {name: value for name, value in self.config.items() if name != "out_channels"}
            net = comfy.cldm.cldm.ControlNet(**settings, hint_channels=3, **common)
            conds = ["y"]
        else:
            net = comfy.ldm.flux.controlnet.ControlNetFlux(**{**self.config, **self.control}, **common)
            conds = ["y", "guidance"]
        randomize(net, seed=3)
        device = device or comfy.model_management.get_torch_device()
        return comfy.controlnet.ControlNet(net.eval(), load_device=device, extra_conds=conds)


UNET_FAMILY = Family("SD1.5 UNet", "SD15", UNET, context_dim=768)
FLUX_FAMILY = Family("Flux DiT", "FluxSchnell", FLUX, context_dim=64, pooled_dim=32)


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights that keep activations finite: norms 1, biases small, matrices scaled by fan-in; made where they lie."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(normal(parameter.shape) / parameter[0].numel() ** 0.5)
            elif name.endswith(("weight", "scale")):
                parameter.fill_(1)
            else:
                parameter.copy_(normal(parameter.shape) * 0.02)
        # Buffers without values until a checkpoint fills them: SD3's, and those of Stable Audio and MiniMax Music.
        for name, buffer in model.named_buffers():
            if name == "pos_embed":
                buffer.copy_(normal(buffer.shape))
            elif name.endswith("rotary_pos_emb.inv_freq"):
                buffer.copy_(10000.0 ** -torch.linspace(0, 1, buffer.numel()))
            elif name.endswith(".beta"):
                buffer.zero_()


def lora(model, seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """A LoRA file's content for every linear layer of a ModelPatcher's model, in the generic key format."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, module in model.model.diffusion_model.named_modules():
        if isinstance(module, torch.nn.Linear):
            up = torch.randn(module.out_features, rank, generator=generator) / rank**0.5
            down = torch.randn(rank, module.in_features, generator=generator) / module.in_features**0.5
            weights[f"diffusion_model.{name}.lora_up.weight"] = up
            weights[f"diffusion_model.{name}.lora_down.weight"] = down
    return weights


def with_control(conditioning: list, control_net, seed: int = 4) -> list:
    """What core's ControlNetApply does, with a random hint image and for the negative prompt too."""
    hint = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
    control = control_net.copy().set_cond_hint(hint, 1.0)
    added = {"control": control, "control_apply_to_uncond": True}
    return [[context, {**extra, **added}] for context, extra in conditioning]


def sample_latent(
    model,
    latent: torch.Tensor,
    positive: list,
    negative: list,
    steps: int,
    cfg: float = 5.0,
    sampler: str = "euler",
    scheduler: str = "normal",
    seed: int = 0,
    **others: Any,
) -> torch.Tensor:
    """Core's sampler over a latent [B, C, (F,) H, W], empty as a rule; returns the finished one. others: core's own."""
    settings = (steps, cfg, sampler, scheduler, positive, negative, latent)
    noise = comfy.sample.prepare_noise(latent, seed)
    return comfy.sample.sample(model, noise, *settings, disable_pbar=True, seed=seed, **others)


CONTEXT_DIM = 768


def unet_config(**changes) -> dict:
    """SD1.5's layout, 32 channels wide on three levels: 3.7 M parameters."""
    return {**UNET, **changes}


def unet(seed: int = 0, dtype: torch.dtype = torch.float32, inference_dtypes: tuple | None = None, **changes):
    """A ModelPatcher over core's SD15 model class.

    inference_dtypes: of the weights, and what core casts them to in each call, as where they are fp8; None casts none.
    """
    import comfy.model_patcher
    import comfy.supported_models

    if inference_dtypes is None:
        config = comfy.supported_models.SD15(unet_config(dtype=dtype, **changes))
    else:
        config = comfy.supported_models.SD15(unet_config(**changes))
        config.set_inference_dtype(*inference_dtypes)
    model = config.get_model({}, device=torch.device("cpu"))
    randomize(model.diffusion_model, seed)
    device = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


TWO_LEVELS = {
    "channel_mult": [1, 2],
    "num_res_blocks": [0, 1],
    "transformer_depth": [1],
    "transformer_depth_output": [0, 1, 1],
    "transformer_depth_middle": -2,
}
"""Changes of `unet_config` that leave it two levels and no middle: two kinds of blocks.

Every ResBlock changes the number of channels, as one that does not is of another kind, and attention is on the lower
level alone: in the input block 2 and the output blocks 0 and 1.
"""


def small_unet(**changes):
    """A UNet whose compiling takes a moment only.

    Torch before 2.11 makes graphs of their own for norms with one channel in a group, which no known model has but this
    one at its 32 channels: so 64 in tests that count graphs to the last.
    """
    return unet(**TWO_LEVELS | changes)


def res_blocks(**changes):
    """The same without transformers, whose tracing takes most of the time: one kind."""
    return small_unet(transformer_depth=[0], transformer_depth_output=[0, 0, 0], **changes)


def conditioning(tokens: int = 77, seed: int = 1, dim: int = CONTEXT_DIM, **extra) -> list:
    """Core's CONDITIONING with random text features: [[context [1, tokens, dim], {...}]]."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(1, tokens, dim, generator=generator), dict(extra)]]


def sample(
    model,
    width: int = 128,
    height: int = 128,
    batch: int = 1,
    steps: int = 3,
    seed: int = 0,
    cfg: float = 5.0,
    sampler: str = "euler",
    scheduler: str = "normal",
    tokens: int = 77,
    denoise: float = 1.0,
    positive: list | None = None,
    negative: list | None = None,
    latent: torch.Tensor | None = None,
    callback=None,
) -> torch.Tensor:
    """Run core's sampler; width and height in pixels. Returns the latent [B, C, H / 8, W / 8]."""
    if latent is None:
        channels = model.get_model_object("latent_format").latent_channels
        latent = torch.zeros(batch, channels, height // 8, width // 8)
    prompts = positive or conditioning(tokens, seed=1), negative or conditioning(77, seed=2)
    settings = (steps, cfg, sampler, scheduler, seed)
    return sample_latent(model, latent, *prompts, *settings, denoise=denoise, callback=callback)
