"""Functions compiled by torch ahead of time: made, saved as bytes, and made again from them without tracing."""

from __future__ import annotations

import copy
import dataclasses
import dis
import hashlib
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.atomic_file import opened
from .native_kernels import with_built_kernels

TEMPLATE = "template"
"""The name under which saved bytes refer to the block's template, which is not in them."""


class NotSavable(RuntimeError):
    """The compiled function cannot leave this process; the message says why."""


def is_available() -> bool:
    """torch 2.11 has it while a switch is on; from 2.13 on it is documented."""
    return hasattr(torch._dynamo.config, "enable_aot_compile")


def compile_function(function: Callable, tensors: Sequence[torch.Tensor], backend: str | Callable) -> Any:
    """Torch's compiled function of these tensors, guarded by their sizes alone."""
    options = {"guard_filter_fn": keep_guards_on_sizes}
    with torch._dynamo.config.patch(enable_aot_compile=True):
        compiled = torch.compile(function, fullgraph=True, backend=_serializable(backend), options=options)
        return compiled.aot_compile((tuple(tensors), {}))


def callables(compiled: Any) -> tuple[Callable[[Sequence[torch.Tensor]], Any], Callable[[Sequence], bool]]:
    """(run, guards): what computes, and whether it is right for these tensors."""
    check = compiled._artifacts.guard_manager.check
    scope = compiled.prepare_f_locals()
    call = compiled.fn

    def guards(tensors: Sequence[torch.Tensor]) -> bool:
        return check({**scope, "tensors": tuple(tensors)})

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        return call(*tensors)

    return run, guards


def save(compiled: Any, template: torch.nn.Module, modules: Sequence[types.ModuleType]) -> bytes:
    """The compiled function as bytes, with its C++ kernels built and without weights.

    template: the one that it was compiled from. modules: the generated code of it that was executed.

    Raises:
        NotSavable: the backend's code, or something that the block closes over, cannot be saved.
    """
    from torch._dynamo.aot_compile import AOTCompiledFunction
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable
    from torch._dynamo.package import SourceInfo

    artifacts = compiled._artifacts
    if not isinstance(artifacts.compiled_fn, BundledAOTAutogradSerializableCallable):
        raise NotSavable("only what inductor compiled can be saved")
    try:
        entry = copy.deepcopy(artifacts.compiled_fn.compiled_fn.serialize())
        name = _carry_built_kernels(entry.compiled_fw.result, modules)
        environment = artifacts.runtime_env
        # What the bytecode does not use was there for tracing, and this pack's modules, which another
        # installation may know under another name, are among it.
        used = {step.argval for step in dis.get_instructions(environment.bytecode) if "GLOBAL" in step.opname}
        sources = {alias: module for alias, module in environment.import_sources.items() if alias in used}
        portable = dataclasses.replace(
            artifacts,
            compiled_fn=BundledAOTAutogradSerializableCallable(_Entry(entry)),
            runtime_env=dataclasses.replace(environment, import_sources=sources),
            source_info=SourceInfo(inlined_sources=set()),
        )
        data = AOTCompiledFunction.serialize(_Artifacts(portable), {TEMPLATE: template}).serialized_data
        return f"{name}\n".encode() + data
    except Exception as error:
        raise NotSavable(f"{type(error).__name__}: {error}") from error


def load(data: bytes, template: torch.nn.Module) -> Any:
    """The function that `save` gave the bytes of. They are code: they must have been checked.

    Raises:
        Exception: of any type; the bytes are of another torch, or this system cannot load the kernels.
    """
    from torch._dynamo.aot_compile import AOTCompiledFunction

    name, _, data = data.partition(b"\n")
    _clear_the_way(name.decode())
    return AOTCompiledFunction.deserialize(data, None, {TEMPLATE: template})


@dataclasses.dataclass(frozen=True)
class _Entry:
    """What torch asks a compiled callable for when it saves it."""

    entry: Any

    def serialize(self) -> Any:
        return self.entry


@dataclasses.dataclass(frozen=True)
class _Artifacts:
    """What torch saves of a compiled function."""

    _artifacts: Any


def _carry_built_kernels(graph: Any, modules: Sequence[types.ModuleType]) -> str:
    """Have the graph's generated code carry its built kernels; the name of that code, "" where there is none."""
    source = getattr(graph, "source_code", None)
    if not source:
        return ""
    module = next((module for module in modules if getattr(module, "key", None) == graph.cache_key), None)
    if module is not None:
        graph.source_code = with_built_kernels(source, module)
    graph.cache_key = _name_of(graph.source_code.encode())
    return graph.cache_key


def _name_of(code: bytes) -> str:
    return f"c{hashlib.sha256(code).hexdigest()[:51]}"


def _clear_the_way(name: str) -> None:
    """See that torch will run the code of this name that it is about to read, and not a file that lies there already.

    It writes generated code to a file of this name in its own cache, unless there is one, and runs the file.
    """
    from torch._inductor.codecache import get_path

    if not name:
        return
    path = Path(get_path(name, "py")[2])
    try:
        with opened(path) as (file, _):
            is_ours = _name_of(file.read()) == name
    except FileNotFoundError:
        return
    except OSError:  # a link, a pipe
        is_ours = False
    if not is_ours:
        path.unlink()


def keep_guards_on_sizes(guards: Sequence[Any]) -> list[bool]:
    """What a graph depends on besides sizes is in the key under which it is kept."""
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]


def _serializable(backend: str | Callable) -> str | Callable:
    """Ahead-of-time compiling asks every backend for a serializable callable; only inductor gives one."""
    if backend == "inductor":
        return backend
    from torch._dynamo.aot_compile_types import SerializableCallable
    from torch._dynamo.backends.registry import lookup_backend

    make = lookup_backend(backend) if isinstance(backend, str) else backend

    class InProcess(SerializableCallable):
        """A callable that cannot leave the process."""

        def __init__(self, function: Callable):
            self._function = function

        def __call__(self, *args: Any) -> Any:
            return self._function(*args)

        @classmethod
        def serialize_compile_artifacts(cls, fn: Any) -> bytes:
            raise NotSavable(f"graphs of the backend {backend} cannot be saved")

        @classmethod
        def deserialize_compile_artifacts(cls, data: bytes) -> Any:
            raise NotSavable(f"graphs of the backend {backend} cannot be loaded")

    return lambda graph, examples: InProcess(make(graph, examples))
