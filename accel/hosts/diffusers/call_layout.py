"""One memory layout for a model's inputs, whatever they were made from."""

from __future__ import annotations

from typing import Any

import torch


def contiguous(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A model's arguments, images and latents ([B, C, H, W], [B, C, F, H, W]) among them in one layout.

    A pipeline makes other strides of a PIL image than of a tensor, and what computes on it passes them on through the
    model: without this, each would need graphs of its own. A model whose weights are channels-last computes so anyhow.
    """
    return tuple(map(_contiguous, args)), {name: _contiguous(value) for name, value in kwargs.items()}


def _contiguous(value: Any) -> Any:
    # Lists stay: some models write to those that they are given.
    return value.contiguous() if isinstance(value, torch.Tensor) and value.ndim >= 4 else value
