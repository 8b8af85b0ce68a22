"""From a block and the example of a call to a callable over tensors.

A compiled graph takes the block's weights as inputs beside the call's own tensors, so it serves
every block of the kind. It is made ahead of time: an object of ours, to be counted, dropped and saved,
where plain `torch.compile` would keep compiling behind our back at later calls, up to a limit of its own.
"""

from __future__ import annotations

import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._inductor.codecache

from . import call_spec
from .causes import cause_among, pass_on
from .compiled_graph import CompiledGraph
from .convolution import leave_to_library
from .kinds import Kind
from .same_path import Path, path_of

BACKENDS = ("inductor", "eager")
"""Offered to people: inductor generates fused kernels; eager captures the graph and runs it as it is."""


LARGEST_SIZE = 2**31
"""No dimension of a call's tensors is larger."""


class CompileFailed(RuntimeError):
    """The block could not be compiled; the message says why in one line."""


def compile_block(
    template: torch.nn.Module,
    kind: Kind,
    weights: Sequence[torch.Tensor],
    spec: call_spec.Spec,
    inputs: Sequence[torch.Tensor],
    backend: str | Callable = "inductor",
    dynamic: bool = True,
    growing: Container[tuple[int, int]] | None = None,
    interrupts: tuple[type[BaseException], ...] = (),
) -> CompiledGraph:
    """Compile a block for calls like this one, at any size.

    template: the block with its weights on the meta device (`kinds.template_of`); it is changed.
    kind: the block's kind. weights, inputs: real tensors, of which only shapes,
        strides, dtypes and devices are used; the inputs are dense (`call_spec.dense`).
    spec: how (args, kwargs) of the call are made from the inputs (`call_spec.flatten`).
    dynamic: every dimension of every input may vary; False compiles for these sizes alone.
    growing: (input, dimension) pairs that are 1 because the batch is; None where that is not known.
    interrupts: exceptions that mean "stop the run"; one that the compiler met is raised as it was.

    Raises:
        CompileFailed: the compiler is missing, gave up, or met an operator it does not know.
        torch.OutOfMemoryError: there was too little memory for it now, on a device or in the process.
    """
    if not _can_compile_ahead_of_time():
        raise CompileFailed(f"torch {torch.__version__} is too old: it cannot compile ahead of time")

    def path(inputs: Sequence[torch.Tensor]) -> Path | None:
        return path_of(lambda *tensors: _call(template, spec, tensors), inputs, interrupts)

    leave_to_library(template)
    taken = path(inputs)
    lifted = _lifted(inputs, growing) if dynamic else None
    if lifted is not None and taken is not None and path(lifted) is None:
        lifted = None
    examples, static_ones = _examples(lifted or inputs, dynamic)
    example_weights = _example_weights(weights, kind)
    with _one_at_a_time:
        before = set(_generated_modules())
        function, run, guards = _compile(
            template, kind, spec, (*example_weights, *examples), backend, dynamic, interrupts
        )
        generated = [module for module in _generated_modules() if module not in before]
    graph = CompiledGraph(
        run,
        guards,
        tuple((i + len(weights), d) for i, d in static_ones),
        _bytes_of(generated),
        len(weights),
        tuple(range(len(inputs))) if taken is None else taken.changed,
        path if dynamic else None,
        call_spec.without_values(spec)[1],
    )
    weakref.finalize(graph, _release, function.__globals__, generated).atexit = False
    return graph


def _call(template: torch.nn.Module, spec: call_spec.Spec, tensors: Sequence[torch.Tensor]) -> Any:
    args, kwargs = call_spec.rebuild(spec, tensors)
    return template(*args, **kwargs)


def _compile(template, kind, spec, tensors, backend, dynamic, interrupts):
    """The function traced, the graph and its guards.

    Taking 1 for a size like others is given up where it leaves a question open that must be answered.
    """
    for oblivious in (True, False) if dynamic else (False,):
        function = _block_function(template, kind.weights, spec)
        try:
            with _settings(dynamic, oblivious):
                return function, *_ahead_of_time(function, tensors, backend)
        except Exception as error:
            pass_on(error, (*interrupts, torch.OutOfMemoryError))
            if cause_among(error, (MemoryError,)) is not None:
                raise torch.OutOfMemoryError("the process got no more memory") from error
            if not oblivious or "data-dependent" not in str(error):
                raise CompileFailed(one_line(error)) from error


def _block_function(template: torch.nn.Module, names: tuple[str, ...], spec: call_spec.Spec) -> Callable:
    count = len(names)

    def block(*tensors):
        # Inductor asks whether a slice to the end goes past the end, which nothing says of a size without bound.
        for tensor in tensors[count:]:
            for size in tensor.shape:
                torch._check(size <= LARGEST_SIZE)
        args, kwargs = call_spec.rebuild(spec, tensors[count:])
        return torch.func.functional_call(template, dict(zip(names, tensors[:count])), args, kwargs)  # noqa: B905

    # A code object and globals of its own: torch counts recompilations per code object, which kinds must
    # not share, and leaves what it compiled in the function's globals, which must go when the graph goes.
    code = block.__code__.replace(co_name=f"block_{id(template)}")
    scope = {"__builtins__": __builtins__, "__name__": __name__, "torch": torch, "call_spec": call_spec}
    scope["LARGEST_SIZE"] = LARGEST_SIZE
    return types.FunctionType(code, scope, "block", None, block.__closure__)


def _example_weights(weights: Sequence[torch.Tensor], kind: Kind) -> list[torch.Tensor]:
    """The weights, with an unfilled stand-in for each whose sizes vary within the kind, marked so."""
    examples = list(weights)
    for index, dimension in kind.varying:
        weight = examples[index]
        if weight is weights[index]:
            weight = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
            examples[index] = weight
        torch._dynamo.maybe_mark_dynamic(weight, dimension)
    return examples


def _lifted(inputs: Sequence[torch.Tensor], growing: Container[tuple[int, int]] | None) -> list[torch.Tensor] | None:
    """The inputs with a batch of 2 where it is 1, so that it teaches the compiler nothing false; None elsewhere.

    Where it is not known what grows with the batch, that is taken to be the first dimension of the first
    input, and of each other input in which it is 1 too.
    """
    if growing is None:
        first = next((tensor for tensor in inputs if tensor.ndim and tensor.numel()), None)
        if first is None or first.shape[0] != 1:
            return None
        growing = {(index, 0) for index in range(len(inputs))}
    shapes = [
        [2 if size == 1 and (index, dimension) in growing else size for dimension, size in enumerate(tensor.shape)]
        for index, tensor in enumerate(inputs)
    ]
    return [call_spec.canonical(tensor, shape) for tensor, shape in zip(inputs, shapes, strict=True)]


def _examples(inputs: Sequence[torch.Tensor], dynamic: bool) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Fresh tensors like the inputs, their dimensions marked; and the dimensions taken as 1."""
    examples, ones = [], []
    for index, tensor in enumerate(inputs):
        example = call_spec.canonical(tensor)
        for dimension, size in enumerate(tensor.shape):
            if size == 1:
                ones.append((index, dimension))
            elif dynamic and size:
                torch._dynamo.maybe_mark_dynamic(example, dimension)
        examples.append(example)
    return examples, ones


_one_at_a_time = threading.Lock()
"""Torch compiles one graph at a time in a process anyway; held here, new modules are surely this graph's."""


def _generated_modules() -> list[types.ModuleType]:
    """The modules of generated code that inductor keeps for the life of the process."""
    cache = torch._inductor.codecache.PyCodeCache
    return [*cache.modules, *getattr(cache, "modules_no_attr", {}).values()]


def _bytes_of(modules: Sequence[types.ModuleType]) -> int:
    """What generated code weighs: its source and the libraries built from it, as files, bytes."""
    files = set()
    for module in modules:
        files.add(module.__file__)
        for value in vars(module).values():
            files.add(getattr(getattr(value, "lib", None), "_name", None))
    return sum(os.path.getsize(file) for file in files if file and os.path.isfile(file))


def _release(scope: dict, modules: Sequence[types.ModuleType]) -> None:
    """Give a dropped graph's memory back: torch would keep its code and what it compiled for good."""
    scope.clear()
    cache = torch._inductor.codecache.PyCodeCache
    gone = set(map(id, modules))
    cache.modules[:] = [module for module in cache.modules if id(module) not in gone]
    without_attributes = getattr(cache, "modules_no_attr", {})
    for path in [path for path, module in without_attributes.items() if id(module) in gone]:
        del without_attributes[path]
    kept = {module.__file__ for module in _generated_modules()}
    for module in modules:
        if module.__file__ not in kept:
            getattr(cache, "linemaps", {}).pop(module.__file__, None)
        if sys.modules.get(module.__name__) is module:
            del sys.modules[module.__name__]


@contextmanager
def _settings(dynamic: bool, oblivious: bool):
    """torch's settings for one compilation: equal sizes are a coincidence, and 1 is a size like others (oblivious)."""
    with ExitStack() as stack:
        if dynamic:
            config = torch.fx.experimental._config
            wanted = {"use_duck_shape": False, "backed_size_oblivious": oblivious}
            stack.enter_context(config.patch({name: value for name, value in wanted.items() if hasattr(config, name)}))
        yield


def _can_compile_ahead_of_time() -> bool:
    """torch 2.11 has the method while a switch is on; from 2.13 on it is documented."""
    return hasattr(torch._dynamo.config, "enable_aot_compile")


def _keep_guards_on_sizes(guards: Sequence[Any]) -> list[bool]:
    """What a graph depends on besides sizes is in the key under which it is kept."""
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]


def _ahead_of_time(function: Callable, tensors: Sequence[torch.Tensor], backend: str | Callable):
    options = {"guard_filter_fn": _keep_guards_on_sizes}
    with torch._dynamo.config.patch(enable_aot_compile=True):
        compiled = torch.compile(function, fullgraph=True, backend=_serializable(backend), options=options)
        compiled = compiled.aot_compile((tuple(tensors), {}))
    check = compiled._artifacts.guard_manager.check
    scope = compiled.prepare_f_locals()
    call = compiled.fn

    def guards(tensors: Sequence[torch.Tensor]) -> bool:
        return check({**scope, "tensors": tuple(tensors)})

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        return call(*tensors)

    return run, guards


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
            raise RuntimeError(f"graphs of the backend {backend} cannot be saved")

        @classmethod
        def deserialize_compile_artifacts(cls, data: bytes) -> Any:
            raise RuntimeError(f"graphs of the backend {backend} cannot be loaded")

    return lambda graph, examples: InProcess(make(graph, examples))


def one_line(error: BaseException) -> str:
    """An exception as one line for log and report: its type and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
