"""From a block and the example of a call to a callable over tensors.

A compiled graph takes the block's weights as inputs beside the call's own tensors, so it serves
every block of the kind. It is an object of ours, to be counted, dropped and saved, where plain
`torch.compile` would keep compiling behind our back at later calls, up to a limit of its own.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..core.errors import cause_among, one_line, pass_on
from ..fingerprint.kinds import Kind
from ..signature import tree_spec
from ..signature.tensors import PLAIN_TENSORS, empty_dense_like
from . import ahead_of_time, generated_code
from .compiled_graph import CompiledGraph, Facts
from .convolution import leave_to_library
from .fixed_sizes import FixedSizes
from .op_trace import Path, path_of

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
    spec: tree_spec.Spec,
    inputs: Sequence[torch.Tensor],
    backend: str | Callable = "inductor",
    dynamic: bool = True,
    growing: Container[tuple[int, int]] | None = None,
    interrupts: tuple[type[BaseException], ...] = (),
    savable: bool = True,
) -> CompiledGraph:
    """Compile a block for calls like this one, at any size.

    template: the block with its weights on the meta device (`kinds.template_of`); it is changed.
    kind: the block's kind. weights, inputs: real tensors, of which only shapes,
        strides, dtypes and devices are used; the inputs are dense (`dense`).
    spec: how (args, kwargs) of the call are made from the inputs (`tree_spec.flatten`).
    dynamic: every dimension of every input may vary; False compiles for these sizes alone.
    growing: (input, dimension) pairs that are 1 because the batch is; None where that is not known.
    interrupts: exceptions that mean "stop the run"; one that the compiler met is raised as it was.
    savable: the graph is going to be saved. Where it is not, and the person has turned on the cache that torch
        shares between machines, it is compiled in the one way that asks this cache.

    Raises:
        CompileFailed: the compiler is missing, gave up, or met an operator it does not know.
        torch.OutOfMemoryError: there was too little memory for it now, on a device or in the process.
    """
    if not ahead_of_time.is_available():
        raise CompileFailed(f"torch {torch.__version__} is too old: it cannot compile ahead of time")

    written: list[Any] = []
    path = _path(template, spec, interrupts, written)
    leave_to_library(template)
    taken = path(inputs)
    if written or taken is None and tree_spec.has_lists(spec):
        raise CompileFailed("it changes a list or dict that it is given, or may do so; a graph would change a copy")
    lifted = _lifted(inputs, growing) if dynamic else None
    if lifted is not None and taken is not None and path(lifted) is None:
        lifted = None
    examples, static_ones = _examples(lifted or inputs, dynamic)
    runs = backend == "inductor" and not savable and _torch_shares()
    example_weights = _example_weights(weights, kind, unfilled=runs)
    with _one_at_a_time:
        before = set(generated_code.all_modules())
        function, run, guards, save, fixed = _compile(
            template, kind, spec, (*example_weights, *examples), backend, dynamic, interrupts, runs
        )
        generated = [module for module in generated_code.all_modules() if module not in before]
    facts = Facts(
        static_ones=tuple((i + len(weights), d) for i, d in static_ones),
        weights=len(weights),
        changed=tuple(range(len(inputs))) if taken is None else taken.changed,
        dynamic=dynamic,
        values=tree_spec.without_values(spec)[1],
        fixed=tuple(item for item in fixed if item[0] >= len(weights)),
    )
    graph = CompiledGraph(
        run,
        guards,
        facts,
        generated_code.bytes_of(generated),
        path if dynamic else None,
        None if save is None else lambda: save(template, generated),
    )
    weakref.finalize(graph, generated_code.release, function.__globals__, generated).atexit = False
    return graph


def load_block(
    template: torch.nn.Module,
    spec: tree_spec.Spec,
    data: bytes,
    facts: Facts,
    interrupts: tuple[type[BaseException], ...] = (),
) -> CompiledGraph:
    """The graph whose `save` gave these bytes, without tracing or compiling anything.

    template, spec, interrupts: as for `compile_block`. data: code, so it must have been checked. facts: the graph's.

    Raises:
        Exception: of any type; the bytes are of another torch, or this system cannot load them.
    """
    leave_to_library(template)
    with _one_at_a_time:
        before = set(generated_code.all_modules())
        compiled = ahead_of_time.load(data, template)
        generated = [module for module in generated_code.all_modules() if module not in before]
    path = _path(template, spec, interrupts) if facts.dynamic else None
    graph = CompiledGraph(*ahead_of_time.callables(compiled), facts, len(data), path)
    weakref.finalize(graph, generated_code.release, compiled.fn.__globals__, generated).atexit = False
    return graph


def _path(
    template: torch.nn.Module,
    spec: tree_spec.Spec,
    interrupts: tuple[type[BaseException], ...],
    written: list[Any] | None = None,
) -> Callable[[Sequence[torch.Tensor]], Path | None]:
    """written: gets the arguments of a call that changed lists or dicts among them."""

    def call(*tensors: torch.Tensor) -> None:
        args, kwargs = tree_spec.rebuild(spec, tensors)
        before = tree_spec.outline((args, kwargs))
        template(*args, **kwargs)
        if written is not None and tree_spec.outline((args, kwargs)) != before:
            written.append((args, kwargs))

    return lambda inputs: path_of(call, inputs, interrupts)


def _compile(template, kind, spec, tensors, backend, dynamic, interrupts, runs):
    """The function traced, the graph, its guards, what saves it, given template and generated code, or None; and the
    sizes that it is good for alone.

    runs: compile it by running it. Taking 1 for a size like others is given up where it leaves a question open that
    must be answered.
    """
    compile_with = _just_in_time if runs else _ahead_of_time
    for oblivious in (True, False) if dynamic else (False,):
        fixed = FixedSizes()
        function = _block_function(template, kind.weights, spec, fixed)
        try:
            with _settings(dynamic, oblivious):
                return function, *compile_with(function, tensors, backend), fixed.of(tensors)
        except Exception as error:
            pass_on(error, (*interrupts, torch.OutOfMemoryError))
            if cause_among(error, (MemoryError,)) is not None:
                raise torch.OutOfMemoryError("the process got no more memory") from error
            if not oblivious or "data-dependent" not in str(error):
                raise CompileFailed(one_line(error)) from error


def _block_function(
    template: torch.nn.Module, names: tuple[str, ...], spec: tree_spec.Spec, fixed: FixedSizes
) -> Callable:
    count = len(names)

    def block(*tensors):
        watch()  # noqa: F821 of its own scope, below
        # Inductor asks whether a slice to the end goes past the end, which nothing says of a size without bound.
        for tensor in tensors[count:]:
            for size in tensor.shape:
                torch._check(size <= LARGEST_SIZE)
        args, kwargs = tree_spec.rebuild(spec, tensors[count:])
        return torch.func.functional_call(template, dict(zip(names, tensors[:count])), args, kwargs)  # noqa: B905

    # A code object and globals of its own: torch counts recompilations per code object, which kinds must
    # not share, and leaves what it compiled in the function's globals, which must go when the graph goes.
    code = block.__code__.replace(co_name=f"block_{id(template)}")
    scope = {"__builtins__": __builtins__, "__name__": __name__, "torch": torch, "tree_spec": tree_spec}
    scope |= {"LARGEST_SIZE": LARGEST_SIZE, "watch": fixed.watch()}
    return types.FunctionType(code, scope, "block", None, block.__closure__)


def _example_weights(weights: Sequence[torch.Tensor], kind: Kind, unfilled: bool) -> list[torch.Tensor]:
    """The weights, with an unfilled stand-in for each whose sizes vary within the kind, marked so.

    unfilled: stand-ins for all of them, since the block, which might write to one, will run.
    """
    varying = {index for index, _ in kind.varying}
    examples = [
        _unfilled(weight) if (unfilled or i in varying) and type(weight) in PLAIN_TENSORS else weight
        for i, weight in enumerate(weights)
    ]
    for index, dimension in kind.varying:
        if examples[index] is not weights[index]:
            torch._dynamo.maybe_mark_dynamic(examples[index], dimension)
    return examples


def _unfilled(weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)


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
    return [empty_dense_like(tensor, shape) for tensor, shape in zip(inputs, shapes, strict=True)]


def _examples(inputs: Sequence[torch.Tensor], dynamic: bool) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Fresh tensors like the inputs, their dimensions marked; and the dimensions taken as 1."""
    examples, ones = [], []
    for index, tensor in enumerate(inputs):
        example = empty_dense_like(tensor)
        for dimension, size in enumerate(tensor.shape):
            if size == 1:
                ones.append((index, dimension))
            elif dynamic and size:
                torch._dynamo.maybe_mark_dynamic(example, dimension)
        examples.append(example)
    return examples, ones


_one_at_a_time = threading.Lock()
"""Torch compiles one graph at a time in a process anyway; held here, new modules are surely this graph's."""


@contextmanager
def _settings(dynamic: bool, oblivious: bool):
    """torch's settings for one compilation: equal sizes are a coincidence, and 1 is a size like others (oblivious).

    Random numbers are drawn as the block draws them, or an image would have other noise than without compiling.
    """
    from torch._inductor import config as inductor

    with ExitStack() as stack:
        stack.enter_context(inductor.patch(fallback_random=True))
        if dynamic:
            config = torch.fx.experimental._config
            wanted = {"use_duck_shape": False, "backed_size_oblivious": oblivious}
            stack.enter_context(config.patch({name: value for name, value in wanted.items() if hasattr(config, name)}))
        yield


def _ahead_of_time(function: types.FunctionType, tensors: Sequence[torch.Tensor], backend: str | Callable):
    compiled = ahead_of_time.compile_function(function, tensors, backend)
    save = functools.partial(ahead_of_time.save, compiled) if backend == "inductor" else None
    return *ahead_of_time.callables(compiled), save


def _torch_shares() -> bool:
    """Whether the person has turned torch's remote cache on, which it leaves aside when compiling ahead of time."""
    from torch._inductor import config

    return bool(getattr(config, "fx_graph_remote_cache", None))


def _just_in_time(function: types.FunctionType, tensors: Sequence[torch.Tensor], backend: str | Callable):
    """A graph like one made ahead of time, but by calling the function once, and not to be saved.

    What torch compiled is taken out and called by itself, so that no later call compiles again.
    """
    options = {"guard_filter_fn": ahead_of_time.keep_guards_on_sizes}
    torch.compile(function, fullgraph=True, backend=backend, options=options)(*tensors)
    (made,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
    call = types.FunctionType(made.code, function.__globals__, "block", None, function.__closure__)
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    scope = dict(zip(function.__code__.co_freevars, cells, strict=True))
    check = made.guard_manager.check
    return lambda tensors: call(*tensors), lambda tensors: check({**scope, "tensors": tuple(tensors)}), None
