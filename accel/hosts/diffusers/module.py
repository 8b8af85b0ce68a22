"""`accelerate_module`: any model's repeated blocks run compiled, for packs and scripts with samplers of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...compile.registry import DEFAULT
from . import component_call
from .pipeline import begin_use, compile_settings
from .runs import new_run


def accelerate_module(module: torch.nn.Module, backend: str = DEFAULT, *, measured: bool | None = None) -> Any:
    """The module itself, whose repeated blocks run compiled until `restore_module(module)`, for every size and batch.

    It is called as before, by `module(...)`; a call of `module.forward` is not accelerated. Nothing of it is replaced,
    so it may be moved, loaded anew or given a LoRA meanwhile. What cannot run compiled runs as it is, and the log says
    why once.

    backend, measured: as for `accelerate_pipeline`.

    Raises:
        TypeError: not a module.
        ValueError: another backend than there are, or somebody else compiles the module as a whole.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, not a {type(module).__name__}")
    settings = compile_settings(backend, measured=measured)
    begin_use()
    if not component_call.place(module, settings, None):
        raise ValueError(f"{type(module).__name__} is compiled as a whole already: leave that out.")
    return module


def restore_module(module: torch.nn.Module) -> Any:
    """The module as it was before `accelerate_module`."""
    component_call.take_away(module)
    return module


@contextmanager
def one_run() -> Iterator[None]:
    """A context around a sampler's loop: calls in it share what is looked up once a run, and its graphs stay in memory
    until the end."""
    with new_run():
        yield
