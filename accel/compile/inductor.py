"""Torch's inductor: fused kernels, which can be saved as bytes and loaded without tracing."""

from __future__ import annotations

import copy
import dataclasses
import dis
import functools
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core import torch_internals
from ..core.atomic_file import opened
from ..kernels.casts import define, unknown_casts_left
from ..kernels.input_checks import checked_together
from ..kernels.rewriting import rewritten_graphs
from ..kernels.sizes import narrow_sizes
from . import generated_code
from .ahead_of_time import AheadOfTime, artifact_of, compile_function
from .backend import Artifact, NotSavable
from .jit import compile_by_calling
from .native_kernels import carry_built_kernels, delete_leftovers, name_of

TEMPLATE = "template"
"""The name under which saved bytes refer to the block's template, which is not in them."""


class Inductor(AheadOfTime):
    """Compiles ahead of time; where the graph is not to be saved and torch has a remote cache, just in time."""

    is_faster = True

    def compile(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], savable: bool) -> Artifact:
        if not savable and _has_remote_cache():
            return compile_by_calling(function, tensors, self.name)
        device = _device(tensors)
        with (
            generated_code.collected() as modules,
            generated_code.own_settings(),
            narrow_sizes(),
            rewritten_graphs(device.type),
            unknown_casts_left(device),
            checked_together(),
            generated_code.building_told(),
        ):
            compiled = compile_function(function, tensors, self.name)
        save = functools.partial(_save, compiled, modules)
        return artifact_of(compiled, function.__globals__, modules, generated_code.bytes_of(modules), save)

    def load(self, data: bytes, template: torch.nn.Module) -> Artifact:
        name, _, content = data.partition(b"\n")
        _delete_impostor(name.decode())
        delete_leftovers()
        define()
        with generated_code.collected() as modules, generated_code.own_settings():
            compiled = torch_internals.AOT_FUNCTION.get().deserialize(content, None, {TEMPLATE: template})
        return artifact_of(compiled, compiled.fn.__globals__, modules, len(data))


def _device(tensors: Sequence[torch.Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors if tensor.ndim), torch.device("cpu"))


def _has_remote_cache() -> bool:
    """Whether the person has turned torch's remote cache on, which compiling ahead of time does not ask."""
    from torch._inductor import config

    return bool(getattr(config, "fx_graph_remote_cache", None))


def _save(compiled: Any, modules: Sequence[types.ModuleType], template: torch.nn.Module) -> bytes:
    """The compiled function as bytes, with its C++ kernels as binaries and without weights.

    template: the one that it was compiled from. modules: the generated code that it runs.

    Raises NotSavable: the backend's code, or something that the block closes over, cannot be saved.
    """
    if (lacking := torch_internals.lacking(torch_internals.SAVING)) is not None:
        raise NotSavable(f"this torch has no {lacking}")
    artifacts, callable_type = compiled._artifacts, torch_internals.AOT_INDUCTOR.get()
    if not isinstance(artifacts.compiled_fn, callable_type):
        raise NotSavable("only what inductor compiled can be saved")
    try:
        entry = copy.deepcopy(artifacts.compiled_fn.compiled_fn.serialize())
        name = carry_built_kernels(entry.compiled_fw.result, modules)
        environment = artifacts.runtime_env
        # Modules that the bytecode does not use were there for tracing. This pack's are among them, which another
        # installation may import under another name.
        used = {step.argval for step in dis.get_instructions(environment.bytecode) if "GLOBAL" in step.opname}
        sources = {alias: module for alias, module in environment.import_sources.items() if alias in used}
        portable = dataclasses.replace(
            artifacts,
            compiled_fn=callable_type(_Entry(entry)),
            runtime_env=dataclasses.replace(environment, import_sources=sources),
            source_info=torch_internals.SOURCE_INFO.get()(inlined_sources=set()),
        )
        data = torch_internals.AOT_FUNCTION.get().serialize(_Artifacts(portable), {TEMPLATE: template}).serialized_data
        return f"{name}\n".encode() + data
    except Exception as error:
        raise NotSavable(f"{type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Entry:
    """The serializable callable that torch asks for its entry."""

    entry: Any

    def serialize(self) -> Any:
        return self.entry


@dataclasses.dataclass(frozen=True)
class _Artifacts:
    """The part of a compiled function that torch saves."""

    _artifacts: Any


def _delete_impostor(name: str) -> None:
    """Delete a file in torch's cache that has this name but other content, since torch would run it.

    Torch writes generated code to a file of this name, unless there is one, and runs the file.
    """
    if not name:
        return
    path = Path(torch_internals.CODE_PATH.get()(name, "py")[2])
    try:
        with opened(path) as (file, _):
            written = file.read().replace(b"\r\n", b"\n")  # as Windows writes lines, and Python reads them
            is_ours = name_of(written) == name
    except FileNotFoundError:
        return
    except OSError:  # a link, a pipe
        is_ours = False
    if not is_ours:
        path.unlink()
