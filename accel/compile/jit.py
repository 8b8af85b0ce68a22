"""Compiling by calling: the function is called once, and what torch compiled for that call is taken out of its cache.

For torch before 2.11, which cannot compile ahead of time. Nothing runs, which would take twice the memory of a call,
since a batch of 1 is traced as 2. The taken code is called by itself, so no later call compiles again: torch's own
recompiling, with guards on sizes alone, takes a wrong graph.
"""

from __future__ import annotations

import atexit
import dis
import functools
import importlib
import io
import marshal
import os
import pickle
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ..core import torch_internals
from . import generated_code
from .ahead_of_time import keep_size_guards, own_noise
from .backend import Artifact, NotSavable, TorchBackend
from .native_kernels import FOLDER_PREFIX, carry_built_kernels, delete_leftovers

TEMPLATE, COMPILED, MODULE = "template", "compiled", "module "
"""What saved bytes refer to by name: the block's template, the compiled graph, an imported module."""

GRAPHS = "fxgraph"
"""The folder of torch's cache that has inductor's graphs."""


class CallOnce(TorchBackend):
    """Compiles by calling and saves nothing."""

    needs = torch_internals.CALL_ONCE

    def compile(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], savable: bool) -> Artifact:
        return compile_by_calling(function, tensors, self.name)


class InductorOnce(CallOnce):
    """Inductor, whose graphs are saved as torch saves a standalone one, where this torch does."""

    is_faster = True

    def compile(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], savable: bool) -> Artifact:
        with generated_code.building_told():
            if not savable or torch_internals.lacking(torch_internals.STANDALONE_SAVING) is not None:
                return compile_by_calling(function, tensors, self.name)
            backend = _Standalone()
            call, guards, modules = _called_once(function, tensors, backend)
        # Torch keeps every backend for the life of the process.
        graph, backend.graph = backend.graph, None
        save = functools.partial(_save, graph, modules, call, guards)
        return _artifact(call, guards, modules, generated_code.bytes_of(modules), save)

    def load(self, data: bytes, template: torch.nn.Module) -> Artifact:
        code, guards, scope, values, modules = _load(data, template)
        cells = tuple(types.CellType(values.get(name)) for name in code.co_freevars)
        call = types.FunctionType(code, {"__builtins__": __builtins__, **scope}, "block", None, cells)
        return _artifact(call, guards, modules, len(data))


class _NotRun(BaseException):
    """Ends the call that has compiled a function, before anything runs."""


def compile_by_calling(
    function: types.FunctionType, tensors: Sequence[torch.Tensor], backend: str | Callable
) -> Artifact:
    """An artifact of the function, not to be saved."""
    call, guards, modules = _called_once(function, tensors, backend)
    return _artifact(call, guards, modules, generated_code.bytes_of(modules))


def _called_once(
    function: types.FunctionType, tensors: Sequence[torch.Tensor], backend: str | Callable
) -> tuple[types.FunctionType, tuple[str, ...], list[types.ModuleType]]:
    """(the compiled function, its guards on sizes, the generated code that it runs)."""
    compile_graph = torch_internals.LOOK_UP_BACKEND.get()(backend) if isinstance(backend, str) else backend
    graphs = []

    def compile_only(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(compile_graph(graph, examples))

        def stop(*_: Any) -> None:
            raise _NotRun

        return stop

    # Only its guards on sizes are taken anyway; the others take a while to make.
    options = {"guard_filter_fn": keep_size_guards} if torch_internals.GUARD_FILTER.is_there else {}
    # Torch says guards in Python unless they are checked in C++, which takes a C++ compiler.
    settings = {torch_internals.CPP_SHAPE_GUARDS.name: False}
    if hasattr(torch._dynamo.config, "run_gc_after_compile"):
        settings["run_gc_after_compile"] = False  # a host may want no garbage collected now
    with (
        generated_code.collected() as modules,
        generated_code.own_settings(),
        own_noise(),
        torch._dynamo.config.patch(settings),
        suppress(_NotRun),
    ):
        torch.compile(function, fullgraph=True, backend=compile_only, options=options)(*tensors)
    (made,) = torch_internals.CACHE_ENTRIES.get()(function.__code__)
    guards = _size_guards(made.guard_manager)
    scope = function.__globals__
    for name in [name for name in made.code.co_names if name.startswith("__compiled_fn")]:
        (scope[name],) = graphs
    return types.FunctionType(made.code, scope, "block", None, function.__closure__), guards, modules


def _artifact(
    call: types.FunctionType,
    guards: Sequence[str],
    modules: Sequence[types.ModuleType],
    nbytes: int,
    save: Callable[[torch.nn.Module], bytes] | None = None,
) -> Artifact:
    source = compile(f"lambda L: {' and '.join(f'({guard})' for guard in guards) or 'True'}", "guards", "eval")
    code = next(constant for constant in source.co_consts if isinstance(constant, types.CodeType))
    condition = types.FunctionType(code, dict(torch_internals.GUARD_NAMES.get()))

    def check(tensors: Sequence[torch.Tensor]) -> bool:
        try:
            return bool(condition({"tensors": tensors}))
        except Exception:  # a guard on what is no argument
            return False

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        return call(*tensors)

    generated_code.ask_sizes_directly(call.__globals__)
    release = functools.partial(generated_code.release, call.__globals__, modules)
    return Artifact(run, check, nbytes, save, release)


def _size_guards(manager: Any) -> tuple[str, ...]:
    """Torch's guards on sizes, as Python expressions of `L["tensors"]`. Torch adds where each comes from in a comment.

    They are the root's last guards; before them torch guards its own global state.
    """
    said = [part for guard in manager.root.get_epilogue_lambda_guards() for part in guard.verbose_code_parts()]
    return tuple(part.partition("  # ")[0] for part in said)


class _Standalone:
    """The backend that makes a graph which can be saved, for sizes as free as in the traced graph."""

    graph: Any = None

    def __call__(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        # They have told torch how large sizes may be, and torch 2.10 saves no graph that has one.
        for check in graph.graph.find_nodes(op="call_function", target=torch._check):
            graph.graph.erase_node(check)
        graph.recompile()
        self.graph = torch_internals.STANDALONE.get()(graph, examples, dynamic_shapes="from_graph", options={})
        return self.graph


def _save(
    graph: Any,
    modules: Sequence[types.ModuleType],
    call: types.FunctionType,
    guards: Sequence[str],
    template: torch.nn.Module,
) -> bytes:
    """The compiled function with all that it refers to, and without weights.

    graph: torch's part of it. modules: the generated code that it runs.

    Raises NotSavable: inductor's code, or something that the block closes over, cannot be saved.
    """
    code = call.__code__
    used = {step.argval for step in dis.get_instructions(code)}
    scope = {name: value for name, value in call.__globals__.items() if name in used}
    cells = zip(code.co_freevars, call.__closure__ or (), strict=True)
    values = {name: cell.cell_contents for name, cell in cells if name in used}
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.persistent_id = functools.partial(_name_of, template=template, scope=scope)
    try:
        pickler.dump((marshal.dumps(code), tuple(guards), scope, values))
        return pickle.dumps((_files_of(graph, modules), buffer.getvalue()))
    except Exception as error:
        raise NotSavable(f"{type(error).__name__}: {error}") from error


def _files_of(graph: Any, modules: Sequence[types.ModuleType]) -> dict[str, bytes]:
    """What torch's cache needs to load its graph, by the path in there; C++ kernels as libraries.

    Generated code is in the graph, as are Triton's kernels.
    """
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as folder:
        with _triton_cache_unchanged():
            graph.save(path=folder, format="unpacked")
        files = {}
        for path in Path(folder).rglob("*"):
            if path.suffix == ".py" or not path.is_file():
                continue
            content = path.read_bytes()
            if path.relative_to(folder).parts[0] == GRAPHS:
                inner = pickle.loads(content)
                source = inner.source_code
                carry_built_kernels(inner, modules)
                if inner.source_code != source:
                    content = pickle.dumps(inner)
            files[path.relative_to(folder).as_posix()] = content
        return files


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
) -> tuple[types.CodeType, tuple[str, ...], dict[str, Any], dict[str, Any], list[types.ModuleType]]:
    """(code, guards, globals, values of its free variables) as saved, and the generated code that it runs."""
    delete_leftovers()
    files, rest = pickle.loads(data)
    # A folder of its own: in its cache torch would prefer what somebody put there. It may be read later.
    folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    with _triton_cache_unchanged(), generated_code.collected() as modules:
        compiled = torch_internals.STANDALONE_ARTIFACT.get().load(path=folder, format="unpacked")

    def value_of(name: str) -> Any:
        if name in (TEMPLATE, COMPILED):
            return template if name == TEMPLATE else compiled
        return importlib.import_module(name.removeprefix(MODULE))

    unpickler = pickle.Unpickler(io.BytesIO(rest))
    unpickler.persistent_load = value_of
    code, guards, scope, values = unpickler.load()
    return marshal.loads(code), guards, scope, values, modules


@contextmanager
def _triton_cache_unchanged() -> Iterator[None]:
    """Torch names Triton's folder in the environment where nobody has, and would leave ours there."""
    was_set = "TRITON_CACHE_DIR" in os.environ
    try:
        yield
    finally:
        if not was_set:
            os.environ.pop("TRITON_CACHE_DIR", None)
