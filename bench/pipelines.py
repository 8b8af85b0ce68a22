"""Small pipelines of diffusers' own classes with random weights and without text encoder and VAE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import diffusers
import torch

SDXL = {
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (32, 64),
    "transformer_layers_per_block": (1, 2),
    "attention_head_dim": (2, 4),
    "cross_attention_dim": 64,
    "projection_class_embeddings_input_dim": 32 + 6 * 256,
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
"""Two levels of SDXL's three: a compiler takes long for a whole UNet with varying sizes."""
FLUX = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (8, 12, 12),
    "guidance_embeds": True,
}
TOKENS = {"sdxl": 77, "flux": 128}
ABSENT = dict.fromkeys(["vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"])


@dataclass(frozen=True)
class Pipeline:
    """A text-to-image pipeline and its prompt. name: of `MODELS`."""

    name: str
    pipe: Any

    @property
    def denoiser(self) -> torch.nn.Module:
        return self.pipe.unet if self.name == "sdxl" else self.pipe.transformer

    def images(self, width: int, height: int, batch: int, steps: int) -> torch.Tensor:
        """Latents of `batch` images of this size in pixels, the same for the same arguments."""
        return self.pipe(
            width=width,
            height=height,
            num_images_per_prompt=batch,
            num_inference_steps=steps,
            output_type="latent",
            generator=torch.Generator().manual_seed(1),
            **self._prompt(),
        ).images

    def set_lora(self, strength: float | None) -> None:
        """A LoRA with random weights, by PEFT, in the attention of the denoiser; None takes it out."""
        from peft import LoraConfig

        loaded = bool(getattr(self.denoiser, "peft_config", None))
        if strength is None:
            if loaded:
                self.denoiser.unload_lora()
            return
        if not loaded:
            self._add_lora(LoraConfig)
        self.denoiser.set_adapters("lora", strength)

    def _add_lora(self, config: type) -> None:
        torch.manual_seed(2)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        # Not as PEFT starts training, with one half zero.
        self.denoiser.add_adapter(config(r=8, target_modules=targets, init_lora_weights=False), "lora")
        self.denoiser.requires_grad_(False)

    def _prompt(self) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(3)
        config = self.denoiser.config
        sdxl = self.name == "sdxl"
        width = config.cross_attention_dim if sdxl else config.joint_attention_dim
        pooled = config.projection_class_embeddings_input_dim - 6 * 256 if sdxl else config.pooled_projection_dim
        names = ["prompt_embeds", "pooled_prompt_embeds"]
        names += ["negative_prompt_embeds", "negative_pooled_prompt_embeds"] if sdxl else []
        shapes = {name: (1, pooled) if "pooled" in name else (1, TOKENS[self.name], width) for name in names}
        parameter = next(self.denoiser.parameters())
        return {name: torch.randn(shape, generator=random).to(parameter) for name, shape in shapes.items()}


def make(name: str) -> Pipeline:
    """The pipeline of that name in `MODELS`, in float32 on the CPU; the same weights every time."""
    diffusers.logging.set_verbosity_error()  # it says so whenever a model changes its dtype
    torch.manual_seed(0)
    pipe = MODELS[name]()
    pipe.set_progress_bar_config(disable=True)
    return Pipeline(name, pipe)


def _sdxl() -> Any:
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, steps_offset=1, timestep_spacing="leading"
    )
    unet = diffusers.UNet2DConditionModel(sample_size=32, **SDXL).eval()
    return diffusers.StableDiffusionXLPipeline(**ABSENT, unet=unet, scheduler=scheduler)


def _flux() -> Any:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    transformer = diffusers.FluxTransformer2DModel(**FLUX).eval()
    return diffusers.FluxPipeline(**ABSENT, transformer=transformer, scheduler=scheduler)


MODELS = {"sdxl": _sdxl, "flux": _flux}
