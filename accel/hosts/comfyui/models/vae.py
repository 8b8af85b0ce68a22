"""VAEs that are never compiled: a view of a VAE, for VAE Skip Compile and Speed Up.

A VAE runs once per image, so compiling it pays back only over many images, and whoever compiles it for one size waits
for the compiler again at the next.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..views import as_view

_CALLS = ("decode", "encode")
"""Prefixes of the methods that run a VAE (such as decode_tiled_1d)."""


def uncompiled(vae: Any) -> Any:
    """A VAE with the same weights that runs uncompiled, whatever else compiles it; the given VAE is unchanged."""
    return as_view(copy.copy(vae), _CALLS, _Uncompiled())


class _Uncompiled:
    """The context of each call of a view."""

    def call(self, view: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> AbstractContextManager:
        """A context in which functions wrapped in torch.compile run eagerly (torch 2.6 and later)."""
        set_stance = getattr(torch.compiler, "set_stance", None)
        return nullcontext() if set_stance is None else set_stance("force_eager")
