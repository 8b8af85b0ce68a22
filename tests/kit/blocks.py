"""Doubles that many unit tests share; no ComfyUI here.

What is compiled (`Block`, `model_of`, `runner`), weights of a class of their own (`Wrapped`), why calls ran uncompiled
(`reasons`), what a host raises (`Stop`), what is told meanwhile (`heard`), and Python in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.events import subscribe
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.dispatch.block_runner import BlockRunner
from comfy_accel.accel.fingerprint.survey import survey

ROOT = Path(__file__).resolve().parents[2]


class Stop(Exception):
    """What a host raises to stop a run."""


class Block(torch.nn.Module):
    """[..., 4] through two linear layers."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x):
        return self.second(self.first(x))


def model_of(*blocks: torch.nn.Module) -> torch.nn.Module:
    """A model whose list of blocks these are."""
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(blocks)
    return model.eval().requires_grad_(False)


def runner(block: torch.nn.Module, cache: GraphCache | None = None, cls=BlockRunner, given=(), **settings: Any):
    """What stands in for a block in a run. given: further arguments of `cls`; settings: those of compiling."""
    region, *_ = survey(model_of(block)).regions
    return cls(region, cache or GraphCache(), CompileSettings(**{"backend": "eager", **settings}), *given)


def reasons() -> list[str]:
    """Why calls of blocks ran uncompiled, each once."""
    return [row["reason"] for row in fallbacks.rows()]


class Wrapped(torch.Tensor):
    """A weight of a class of its own, as quantised ones are: tensors, and a text that says how they are to be read."""

    @staticmethod
    def __new__(cls, inner, tag="", scale=None):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner, tag="", scale=None):
        self.inner, self.tag = inner, tag
        if scale is not None:
            self.scale = scale

    def __tensor_flatten__(self):
        return ["inner", "scale"] if hasattr(self, "scale") else ["inner"], {"tag": self.tag}

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        return Wrapped(tensors["inner"], context["tag"], tensors.get("scale"))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        bare = [arg.inner if isinstance(arg, Wrapped) else arg for arg in args]
        return function(*bare, **(kwargs or {}))


@contextmanager
def heard() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The events that are told while it lasts: (name, fields)."""
    events: list[tuple[str, dict[str, Any]]] = []
    stop = subscribe(lambda name, fields: events.append((name, fields)))
    try:
        yield events
    finally:
        stop()


def in_new_process(code: str, **environment: str) -> str:
    """What Python code prints in a process of its own, in which the pack is loaded."""
    begin = (
        f"import sys; sys.path += [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\nfrom dev.tools import pack; pack.load()\n"
    )
    command = [sys.executable, "-c", begin + code]
    return subprocess.check_output(command, env={**os.environ, **environment}, text=True, timeout=200)
