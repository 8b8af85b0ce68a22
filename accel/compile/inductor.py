"""Torch's inductor: fused kernels, which can be saved as bytes and loaded without tracing."""

from __future__ import annotations

import copy
import dataclasses
import dis
import functools
import pickle
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..core import torch_internals
from ..kernels.casts import define, unknown_casts_left
from ..kernels.convolution import call_directly
from ..kernels.rewriting import rewrite_graphs
from ..kernels.sizes import narrow_sizes
from . import generated_code
from .ahead_of_time import AheadOfTime, artifact_of, compile_function
from .backend import Artifact, NotSavable
from .native_kernels import carry_built_kernels

TEMPLATE = "the block's template"
"""What saved bytes have in its place."""


class Inductor(AheadOfTime):
    """Torch's default backend."""

    is_faster = True

    def compile(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Artifact:
        with code_generation(device_of(tensors)), generated_code.building_told():
            return self._compile(function, tensors, self.name)[0]

    def _compile(
        self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], backend: str | Callable
    ) -> tuple[Artifact, list[types.ModuleType]]:
        """The artifact, and the generated code that it runs."""
        with generated_code.collect_modules() as modules, generated_code.own_settings():
            compiled = compile_function(function, tensors, backend)
        save = functools.partial(_save, compiled, modules)
        nbytes = generated_code.bytes_of(modules)
        return artifact_of(compiled, function.__globals__, modules, nbytes, save), modules

    def load(self, data: bytes, template: torch.nn.Module) -> Artifact:
        define()
        function, entry = pickle.loads(data)
        with generated_code.collect_modules() as modules, generated_code.own_settings():
            compiled = torch_internals.AOT_FUNCTION.get().deserialize(function)
            compiled.fn.__globals__[compiled._artifacts.backend_id] = generated_code.load_entry(entry)
        for cell in compiled.fn.__closure__ or ():
            if isinstance(cell.cell_contents, str) and cell.cell_contents == TEMPLATE:
                cell.cell_contents = template
        return artifact_of(compiled, compiled.fn.__globals__, modules, len(data))


@contextmanager
def code_generation(device: torch.device) -> Iterator[None]:
    """A context in which inductor makes code as the engine has it. device: that it runs on."""
    asserts = torch_internals.INPUT_ASSERTS  # of inputs, which were asked before (`accepts`, `InlineCache.match`)
    with (
        generated_code.own_settings(),
        narrow_sizes(),
        rewrite_graphs(device.type),
        unknown_casts_left(device),
        asserts.replace(lambda wrapper: None) if asserts.is_there else nullcontext(),
        call_directly(),
    ):
        yield


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device of a function's tensors; a number on the CPU does not count."""
    return next((tensor.device for tensor in tensors if tensor.ndim), torch.device("cpu"))


def _save(compiled: Any, modules: Sequence[types.ModuleType], template: torch.nn.Module) -> bytes:
    """The compiled function as bytes, with its C++ kernels as binaries and without weights.

    template: the one that it was compiled from. modules: the generated code that it runs.

    Raises NotSavable: the backend's code, or something that the block closes over, cannot be saved.
    """
    if (lacking := torch_internals.find_missing(torch_internals.SAVING)) is not None:
        raise NotSavable(f"this torch has no {lacking}")
    artifacts = compiled._artifacts
    if not isinstance(artifacts.compiled_fn, torch_internals.AOT_INDUCTOR.get()):
        raise NotSavable("only what inductor compiled can be saved")
    try:
        entry = copy.deepcopy(artifacts.compiled_fn.compiled_fn.serialize())
        carry_built_kernels(entry.compiled_fw.result, modules)
        environment = artifacts.runtime_env
        # What the bytecode does not use was there for tracing: modules, this pack's among them, which another
        # installation may import under another name; and functions of ours that hold the block.
        steps = list(dis.get_instructions(environment.bytecode))
        used = {step.argval for step in steps if "GLOBAL" in step.opname or "DEREF" in step.opname}
        sources = {alias: module for alias, module in environment.import_sources.items() if alias in used}
        closure = []
        for name, cell in zip(environment.bytecode.co_freevars, environment.closure or (), strict=True):
            value = cell.cell_contents if name in used else None
            closure.append(types.CellType(TEMPLATE if value is template else value))
        portable = dataclasses.replace(
            artifacts,
            compiled_fn=_Apart(),
            runtime_env=dataclasses.replace(environment, import_sources=sources, closure=tuple(closure)),
            source_info=torch_internals.SOURCE_INFO.get()(inlined_sources=set()),
        )
        data = torch_internals.AOT_FUNCTION.get().serialize(_Artifacts(portable))
        function = getattr(data, "serialized_data", data)  # torch 2.10 gives the bytes themselves
        return pickle.dumps((function, entry))
    except Exception as error:
        raise NotSavable(f"{type(error).__name__}: {error}") from error


class _Apart:
    """Stands in a saved function for what it calls, which is saved beside it."""

    deserialize_compile_artifacts = bytes
    serialize_compile_artifacts = staticmethod(lambda apart: b"")


@dataclasses.dataclass(frozen=True)
class _Artifacts:
    """The part of a compiled function that torch saves."""

    _artifacts: Any
