"""Arguments of models and blocks in one form, so that calls that compute the same share a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ...fingerprint.survey import Region

_ATTENTION_KWARGS = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")


def contiguous(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments with every image and latent ([B, C, H, W], [B, C, F, H, W]) contiguous.

    A pipeline produces other strides from a PIL image than from a tensor, and these pass through the whole model:
    each would need its own graphs. A model whose weights are channels-last converts its inputs anyway.
    """
    return tuple(map(_contiguous, args)), {name: _contiguous(value) for name, value in kwargs.items()}


def simplifier(region: Region) -> Callable[[dict], dict] | None:
    """For a block of diffusers: replaces None by an empty dict in its attention kwargs; None for other blocks.

    A pipeline called with a LoRA scale in these kwargs passes an empty dict to its blocks, and otherwise None. The
    blocks treat both alike, so one graph serves both.
    """
    cls = type(region.block)
    parameters = inspect.signature(cls.forward).parameters
    name = next((name for name in _ATTENTION_KWARGS if name in parameters), None)
    if name is None or cls.__module__.partition(".")[0] != "diffusers":
        return None

    def simplify(options: dict) -> dict:
        return {**options, name: {}} if options.get(name, options) is None else options

    return simplify


def _contiguous(value: Any) -> Any:
    # Lists are not copied: some models write to the ones they are given.
    return value.contiguous() if isinstance(value, torch.Tensor) and value.ndim >= 4 else value
