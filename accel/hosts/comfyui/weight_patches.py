"""LoRA that ComfyUI-GGUF keeps on a weight (`patches`) and adds at each use, as one product of two matrices.

The list has core's patches of the weight. In float32, in which core adds them, all of them together are one product:
those of several LoRAs side by side, one of a part of the rows (the q of a qkv) with zeros around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import comfy.weight_adapter
import torch

from ...modules.stored_form import ADDS, Opaque

_LORA = comfy.weight_adapter.LoRAAdapter

_MULTIPLE = 8
"""Ranks are filled up to multiples of it, for which matrix products are quick. None is 1, which graphs would fix."""


class Patches:
    """`stored_form.Adds` for a list of (core's patches of one weight, their key)."""

    classes = frozenset((_LORA,))

    def require_low_rank(self, value: Any) -> None:
        for _, adapter, strength_of_model, _, function in _read_patches(value):
            if type(adapter) is not _LORA:
                kind = getattr(adapter, "name", None) or "full-size change"
                raise Opaque(f"tensor to which a {kind} is added at each use")
            if any(part is not None for part in adapter.weights[3:]) or function is not None or strength_of_model != 1:
                raise Opaque("tensor to which a LoRA with more than two matrices is added at each use")

    def low_rank(self, value: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = weight.shape[0], math.prod(weight.shape[1:])
        ups, downs = [], []
        for strength, adapter, _, part, _ in _read_patches(value):
            matrices = (matrix.to(weight.device, torch.float32, non_blocking=True) for matrix in adapter.weights[:2])
            up, down = (matrix.flatten(1) for matrix in matrices)
            alpha = adapter.weights[2]
            up = up * (strength if alpha is None else strength * alpha / down.shape[0])
            if part is not None:
                dimension, first, count = part
                if dimension == 0:
                    up = torch.nn.functional.pad(up, (0, 0, first, rows - first - count))
                else:
                    down = torch.nn.functional.pad(down, (first, columns - first - count))
            if up.shape[0] != rows or down.shape[1] != columns:
                raise Opaque("tensor to which a LoRA of another shape is added at each use")
            ups.append(up)
            downs.append(down)
        missing = -sum(up.shape[1] for up in ups) % _MULTIPLE
        if missing:
            ups.append(ups[0].new_zeros(rows, missing))
            downs.append(downs[0].new_zeros(missing, columns))
        return (ups[0], downs[0]) if len(ups) == 1 else (torch.cat(ups, 1), torch.cat(downs))

    def attribute(self, up: torch.Tensor, down: torch.Tensor) -> Any:
        return [([(1.0, _LORA(set(), (up, down, None, None, None, None)), 1.0, None, None)], "")]


def _read_patches(value: Any) -> Iterator[tuple]:
    """(strength, adapter, strength of the model, part of the weight, function) of each patch. Raises Opaque."""
    try:
        for patches, _key in value:
            for patch in patches:
                strength, adapter, strength_of_model, part, function = patch
                yield strength, adapter, strength_of_model, part, function
    except (TypeError, ValueError):
        raise Opaque("tensor with patches of an unknown form") from None


ADDS["patches"] = Patches()
