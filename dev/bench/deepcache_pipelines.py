"""The trained DiT in diffusers' Flux pipeline: ours beside diffusers' own hooks at equal work, the share of steps in
which the last block runs. Import it after `pack.load`.

Its other trained kind, SD3, has no such hooks: they fail on what its last block returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import diffusers
import safetensors.torch
import torch
from comfy_accel.accel.hosts.diffusers.deep_cache import deep_cache
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from diffusers.loaders import single_file_utils

from . import toy

_LAYOUT = {
    **{"in_channels": 16, "num_layers": 2, "num_single_layers": 8, "axes_dims_rope": (8, 10, 10)},
    **{"attention_head_dim": 28, "num_attention_heads": 4, "guidance_embeds": False},
    **{"joint_attention_dim": toy.CONTEXT_DIM, "pooled_projection_dim": toy.CONTEXT_DIM},
}
_ABSENT = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


class FluxPipeline:
    """Samples without guidance."""

    def __init__(self) -> None:
        self._model = diffusers.FluxTransformer2DModel(**_LAYOUT).eval()
        self._model.load_state_dict(_weights())
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        self._pipe = diffusers.FluxPipeline(scheduler, **dict.fromkeys(_ABSENT), transformer=self._model)
        self._pipe.set_progress_bar_config(disable=True)
        self._full = 0
        """Steps of the newest image in which the last block ran."""
        self._model.single_transformer_blocks[-1].proj_mlp.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._full += 1

    def sample(
        self, steps: int, seed: int, context: AbstractContextManager[None] | None = None
    ) -> tuple[torch.Tensor, float]:
        """A latent [1, numbers] and its share of full steps, within one of the contexts below."""
        tokens = toy.class_tokens()[torch.tensor([seed % toy.CLASSES])]
        given = {"prompt_embeds": tokens, "pooled_prompt_embeds": toy.pooled(tokens), "output_type": "latent"}
        noise, self._full = torch.Generator().manual_seed(seed), 0
        with context or nullcontext():
            out = self._pipe(height=128, width=128, num_inference_steps=steps, generator=noise, **given)
        return out.images.flatten(1), self._full / steps

    def ours(self, target: float) -> AbstractContextManager[None]:
        return deep_cache(self._pipe, DeepCacheSettings(target))

    def first_block(self, threshold: float) -> AbstractContextManager[None]:
        return self._hooked(diffusers.FirstBlockCacheConfig(threshold))

    def taylor(self, interval: float) -> AbstractContextManager[None]:
        """Of whole blocks, as it is with "lite"; by itself it leaves out attention alone."""
        precise = {"taylor_factors_dtype": torch.float32, "use_lite_mode": True}
        return self._hooked(diffusers.TaylorSeerCacheConfig(cache_interval=int(interval), **precise))

    @contextmanager
    def _hooked(self, config: Any) -> Iterator[None]:
        self._model.enable_cache(config)
        try:
            yield
        finally:
            self._model.disable_cache()


def _weights() -> dict[str, torch.Tensor]:
    """Of the trained network, by diffusers' names."""
    split = torch.split  # by the sizes of Flux itself, which is 3072 wide

    def narrow(tensor: torch.Tensor, sizes: list[int], dim: int) -> Any:
        return split(tensor, [size * 112 // 3072 for size in sizes], dim)

    with patch.object(torch, "split", narrow):
        return single_file_utils.convert_flux_transformer_checkpoint_to_diffusers(
            safetensors.torch.load_file(toy.NETWORKS["dit"].file)
        )
