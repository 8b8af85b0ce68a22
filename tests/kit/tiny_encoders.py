"""Small text encoders of ComfyUI's own classes with random weights, in its real `comfy.sd.CLIP`.

Import it after `inprocess.boot`. There is no vocabulary: a prompt is made of made-up tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import comfy.sd
import comfy.sd1_clip
import comfy.sdxl_clip
import torch

from kit.tiny_models import randomize

_CLIP_L = dict(num_hidden_layers=4, hidden_size=32, num_attention_heads=2, intermediate_size=64)
_CLIP_G = _CLIP_L | {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 3}
_T5 = dict(num_layers=4, d_model=32, d_kv=16, num_heads=2, d_ff=64)
_LLM = dict(num_hidden_layers=4, hidden_size=32, num_attention_heads=4, num_key_value_heads=2) | {
    "intermediate_size": 64
}
_SECTION = 77
"""Tokens in each part of a prompt for CLIP's own encoders."""


@dataclass(frozen=True)
class Encoders:
    """Encoders as one class of core's has them. configs: what differs from its own, by their names."""

    model_class: Callable[[], Any]
    configs: Mapping[str, dict[str, Any]]

    def load(self, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> comfy.sd.CLIP:
        """Core's CLIP; the same weights for the same seed. options: core's `model_options`."""
        target = type("Target", (), {"params": {}, "clip": self.model_class(), "tokenizer": _NoWords})
        options |= {f"{name}_model_config": config for name, config in self.configs.items()}
        made = comfy.sd.CLIP(target, model_options={"dtype": dtype, **options})
        randomize(made.cond_stage_model, seed)
        for part in made.cond_stage_model.modules():
            if isinstance(getattr(part, "layer", None), list):  # of a model with more of them
                part.layer, part.options_default = [1, 2, 3], ([1, 2, 3], *part.options_default[1:])
        return made

    def tokens(self, length: int = 20, parts: int = 1, weight: float = 1.0) -> dict[str, list]:
        """A prompt of so many tokens. parts: of it for CLIP, 77 tokens each. weight: of one word."""
        named = {}
        for name in self.configs:
            is_clip = name.startswith("clip_")
            words = [(7 + 3 * at, weight if at == 5 else 1.0) for at in range(length)]
            padded = [(49406, 1.0), *words[: _SECTION - 2], *[(49407, 1.0)] * (_SECTION - 1)][:_SECTION]
            named[name.removeprefix("clip_")] = [padded] * parts if is_clip else [[*words, (1, 1.0), (0, 1.0)]]
        return named


class _NoWords:
    """In place of a tokenizer."""

    def __init__(self, **kwargs: Any):
        pass

    def state_dict(self) -> dict:
        return {}


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"comfy.text_encoders.{module}"), name)


def _made(module: str, name: str, **kwargs: Any) -> Callable[[], Any]:
    return lambda: _class(module, name)(**kwargs)


_TRIPLE = {"clip_l": _CLIP_L, "clip_g": _CLIP_G, "t5xxl": _T5 | {"d_model": 4096, "vocab_size": 256}}
"""SD3 fills CLIP's features up to the width of T5's."""

ENCODERS = {
    "SD1.5": Encoders(lambda: comfy.sd1_clip.SD1ClipModel, {"clip_l": _CLIP_L}),
    "SDXL": Encoders(lambda: comfy.sdxl_clip.SDXLClipModel, {"clip_l": _CLIP_L, "clip_g": _CLIP_G}),
    "SD3": Encoders(_made("sd3_clip", "sd3_clip", t5_attention_mask=True), _TRIPLE),
    "Flux": Encoders(_made("flux", "flux_clip"), {"clip_l": _CLIP_L, "t5xxl": _T5}),
    "Flux.2": Encoders(_made("flux", "flux2_te"), {"mistral3_24b": _LLM}),
    "Wan": Encoders(_made("wan", "te"), {"umt5xxl": _T5}),
    "Qwen-Image": Encoders(_made("qwen_image", "te"), {"qwen25_7b": _LLM}),
    "Z-Image": Encoders(_made("z_image", "te"), {"qwen3_4b": _LLM}),
    "Lumina 2": Encoders(_made("lumina2", "te"), {"gemma2_2b": _LLM}),
    "NewBie": Encoders(_made("lumina2", "te", model_type="gemma3_4b"), {"gemma3_4b": _LLM}),
    "HunyuanVideo": Encoders(_made("hunyuan_video", "hunyuan_video_clip"), {"clip_l": _CLIP_L, "llama": _LLM}),
    "OmniGen 2": Encoders(_made("omnigen2", "te"), {"qwen25_3b": _LLM}),
    "HunyuanDiT": Encoders(lambda: _class("hydit", "HyditModel"), {"hydit_clip": _CLIP_L, "mt5xl": _T5}),
    "Krea 2": Encoders(_made("krea2", "te"), {"qwen3vl_4b": _LLM}),
    "ERNIE-Image": Encoders(_made("ernie", "te"), {"ministral3_3b": _LLM}),
}


def missing(name: str) -> str | None:
    """The module of these encoders, where this core is older than they are; None where it has them."""
    try:
        ENCODERS[name].model_class()
    except ModuleNotFoundError as absent:
        return absent.name
    return None
