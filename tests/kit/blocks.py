"""Doubles that many unit tests share; no ComfyUI here.

What is compiled (`Block`, `model_of`), what stands in for it in a run (`runner`, `runners`, `layers_of`), weights of a
class of their own (`Wrapped`, `Stored`), other packs' functions (`of_a_pack`), why calls ran uncompiled (`reasons`),
what a host raises (`Stop`), what fails (`raising`), what is told meanwhile (`heard`), and Python in another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.events import subscribe
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.dispatch.block_runner import BlockRunner, BlocksRun
from comfy_accel.accel.dispatch.compiled_layers import Host, make_compiled_layers, survey_model
from comfy_accel.accel.fingerprint.survey import survey

ROOT = Path(__file__).resolve().parents[2]


class Stop(Exception):
    """What a host raises to stop a run."""


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """A function that raises the error, whatever it is called with."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


class Block(torch.nn.Module):
    """[..., 4] through two linear layers."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x):
        return self.second(self.first(x))


class Model(torch.nn.Module):
    """Calls its blocks one after the other."""

    def __init__(self, *blocks: torch.nn.Module):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)
        self.eval().requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Stored(torch.nn.Parameter):
    """Bytes that only their layer understands, with what it keeps beside them: as bitsandbytes' weights."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


def model_of(*blocks: torch.nn.Module) -> Model:
    """A model whose list of blocks these are."""
    return Model(*blocks)


def eagerly(**settings: Any) -> CompileSettings:
    """Settings under which graphs are traced, which takes no compiler."""
    return CompileSettings(**{"backend": "eager", **settings})


def runner(block: torch.nn.Module, cache: GraphCache | None = None, cls=BlockRunner, given=(), **settings: Any):
    """What stands in for a block in a run. given: further arguments of `cls`; settings: those of compiling."""
    region, *_ = survey(model_of(block)).regions
    return cls(region, BlocksRun(cache or GraphCache(), eagerly(**settings)), *given)


def runners(model: torch.nn.Module, cache: GraphCache, **settings: Any) -> dict[torch.nn.Module, BlockRunner]:
    """What stands in for each block of a model in a run."""
    return {of.block: BlockRunner(of, BlocksRun(cache, eagerly(**settings))) for of in survey(model).regions}


def layers_of(model: torch.nn.Module, cache: GraphCache, host: Host | None = None, **settings: Any):
    """All that is put around a model and its blocks for a run, by module."""
    made, host = eagerly(**settings), host or Host()
    return make_compiled_layers(model, survey_model(model, made, host), made, host, cache)


def of_a_pack(function: types.FunctionType, name: str = "a_pack") -> types.FunctionType:
    """The function as another package has it."""
    scope = {**function.__globals__, "__name__": name}
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    made.__module__ = name
    return made


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
def heard(only: str | None = None) -> Iterator[list[Any]]:
    """The events that are told while it lasts: (name, fields); the fields alone of those named `only`."""
    events: list[Any] = []

    def hear(name: str, fields: dict[str, Any]) -> None:
        if only in (None, name):
            events.append((name, fields) if only is None else fields)

    stop = subscribe(hear)
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
