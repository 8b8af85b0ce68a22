"""Compiling by running: the function is called once, and what torch compiled for that call is taken out of its cache.

For torch before 2.11, which cannot compile ahead of time. The taken code is called by itself, so no later call compiles
again: torch's own recompiling, with guards on sizes alone, takes a wrong graph.
"""

from __future__ import annotations

import atexit
import dis
import functools
import importlib
import io
import marshal
import math
import pickle
import shutil
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core import toolchain, torch_internals
from ..core.reasons import Reason
from ..signature.tensors import PLAIN_TENSORS
from . import generated_code
from .ahead_of_time import keep_size_guards, own_noise
from .backend import Artifact, NotSavable

TEMPLATE, COMPILED, MODULE = "template", "compiled", "module "
"""What saved bytes refer to by name: the block's template, the compiled graph, an imported module."""


class RunOnce:
    """A backend that torch knows by name, such as "eager", or a function as `torch.compile` takes it."""

    is_faster = False
    load = None

    def __init__(self, name: str | Callable):
        self.name = name

    def missing(self, device: str | None = None) -> Reason | None:
        lacking = torch_internals.lacking(torch_internals.RUN_ONCE)
        return None if lacking is None else Reason("torch_lacks", torch=torch.__version__, name=str(lacking))

    def compile(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], savable: bool) -> Artifact:
        return compile_by_running(function, tensors, self.name)


class InductorOnce(RunOnce):
    """Inductor, whose graphs are saved as torch saves a standalone one, where this torch does."""

    is_faster = True

    def __init__(self):
        super().__init__("inductor")

    def missing(self, device: str | None = None) -> Reason | None:
        return super().missing(device) or (toolchain.lacking(device) if device else None)

    def compile(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], savable: bool) -> Artifact:
        if not savable or torch_internals.lacking(torch_internals.STANDALONE_SAVING) is not None:
            return compile_by_running(function, tensors, self.name)
        standalone = _Standalone()
        return compile_by_running(function, tensors, standalone, standalone.save)

    def load(self, data: bytes, template: torch.nn.Module) -> Artifact:
        with generated_code.collected() as modules:
            code, guards, scope, values = _load(data, template)
        cells = tuple(types.CellType(values.get(name)) for name in code.co_freevars)
        call = types.FunctionType(code, {"__builtins__": __builtins__, **scope}, "block", None, cells)
        return _artifact(call, guards, modules, len(data))


def compile_by_running(
    function: types.FunctionType,
    tensors: Sequence[torch.Tensor],
    backend: str | Callable,
    save: Callable[..., bytes] | None = None,
) -> Artifact:
    """An artifact of the function, which is called once with unfilled tensors.

    save: from (the code to call, the function, the guards, the template) to bytes; None where it is not to be saved.
    """
    options = {"guard_filter_fn": keep_size_guards}
    # Torch says guards in Python unless they are checked in C++, which takes a C++ compiler.
    settings = {torch_internals.CPP_SHAPE_GUARDS.name: False}
    with generated_code.collected() as modules, own_noise(), torch._dynamo.config.patch(settings):
        # The function runs, and might write to the weights.
        torch.compile(function, fullgraph=True, backend=backend, options=options)(*map(_stand_in, tensors))
    (made,) = torch_internals.CACHE_ENTRIES.get()(function.__code__)
    guards = _size_guards(made.guard_manager)
    call = types.FunctionType(made.code, function.__globals__, "block", None, function.__closure__)
    saved = None if save is None else functools.partial(save, made.code, function, guards)
    return _artifact(call, guards, modules, generated_code.bytes_of(modules), saved)


def _artifact(
    call: types.FunctionType,
    guards: Sequence[str],
    modules: Sequence[types.ModuleType],
    nbytes: int,
    save: Callable[[torch.nn.Module], bytes] | None = None,
) -> Artifact:
    condition = compile(" and ".join(f"({guard})" for guard in guards) or "True", "guards", "eval")
    names = {"math": math, "torch": torch}

    def check(tensors: Sequence[torch.Tensor]) -> bool:
        return bool(eval(condition, {**names, "L": {"tensors": tensors}}))

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        return call(*tensors)

    release = functools.partial(generated_code.release, call.__globals__, modules)
    return Artifact(run, check, nbytes, save, release)


def _size_guards(manager: Any) -> tuple[str, ...]:
    """Torch's guards on sizes, as Python expressions of `L["tensors"]`.

    Torch says each with a comment on where it comes from; it always guards its own global state too.
    """
    said = [part for guard in manager.root.get_leaf_guards() for part in guard.verbose_code_parts()]
    return tuple(part.partition("  # ")[0] for part in said if not part.startswith("___check"))


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """An unfilled tensor of the same layout and marks; the tensor itself where it is of a class of its own."""
    if type(tensor) not in PLAIN_TENSORS:
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    for dimension in getattr(tensor, "_dynamo_weak_dynamic_indices", ()):
        torch_internals.MARK_DYNAMIC.get()(made, dimension)
    return made


class _Standalone:
    """The backend that makes a graph which can be saved, for sizes as free as in the traced graph."""

    artifact: Any = None

    def __call__(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        self.artifact = torch_internals.STANDALONE.get()(graph, examples, dynamic_shapes="from_graph", options={})
        return self.artifact

    def save(
        self, code: types.CodeType, function: types.FunctionType, guards: Sequence[str], template: torch.nn.Module
    ) -> bytes:
        """The code with all that it refers to, and without weights.

        Raises NotSavable: inductor's code, or something that the block closes over, cannot be saved.
        """
        used = {step.argval for step in dis.get_instructions(code)}
        scope = {name: value for name, value in function.__globals__.items() if name in used}
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        values = {name: cell.cell_contents for name, cell in cells.items() if name in used}
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer)
        pickler.persistent_id = functools.partial(_name_of, template=template, scope=scope)
        try:
            with tempfile.TemporaryDirectory(prefix="accel-") as folder:
                path = Path(folder, "graph")
                self.artifact.save(path=str(path), format="binary")
                pickler.dump((marshal.dumps(code), tuple(guards), scope, values))
                return pickle.dumps((path.read_bytes(), buffer.getvalue()))
        except Exception as error:
            raise NotSavable(f"{type(error).__name__}: {error}") from error


def _name_of(value: Any, template: torch.nn.Module, scope: Mapping[str, Any]) -> str | None:
    """What saved bytes have in place of the value; None where they have the value itself."""
    if value is template:
        return TEMPLATE
    if isinstance(value, types.ModuleType):
        return MODULE + value.__name__
    is_compiled = any(value is item and name.startswith("__compiled_fn") for name, item in scope.items())
    return COMPILED if is_compiled else None


def _load(
    data: bytes, template: torch.nn.Module
) -> tuple[types.CodeType, tuple[str, ...], dict[str, Any], dict[str, Any]]:
    """(code, guards, globals, values of its free variables) as `_Standalone.save` had them."""
    graph, rest = pickle.loads(data)
    folder = _folder()
    path = Path(folder, "graph")
    path.write_bytes(graph)
    with torch_internals.TEMPORARY_CACHE.get()(str(folder)):
        compiled = torch_internals.STANDALONE_ARTIFACT.get().load(path=str(path), format="binary")
    path.unlink()

    def value_of(name: str) -> Any:
        if name in (TEMPLATE, COMPILED):
            return template if name == TEMPLATE else compiled
        return importlib.import_module(name.removeprefix(MODULE))

    unpickler = pickle.Unpickler(io.BytesIO(rest))
    unpickler.persistent_load = value_of
    code, guards, scope, values = unpickler.load()
    return marshal.loads(code), guards, scope, values


@functools.cache
def _folder() -> Path:
    """A folder into which torch unpacks loaded graphs: in its own cache it would prefer what somebody put there."""
    folder = Path(tempfile.mkdtemp(prefix="accel-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
