"""Compiles a block into a graph, given an example call.

A graph takes the block's weights as inputs beside the call's own tensors, so it serves every block of the kind. The
caller owns it: counts, drops and saves it. Plain `torch.compile` would recompile at later calls, up to its own limit.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..core import torch_internals
from ..core.errors import cause_among, one_line, pass_on
from ..core.events import emit, log
from ..core.reasons import Reason
from ..fingerprint.block_call import Call
from ..fingerprint.code_hash import ReadCode, find_unread_code, is_of_program
from ..fingerprint.kept_state import KeepsState, others_may_keep, refuse_kept_state
from ..fingerprint.kinds import Kind
from ..kernels.convolution import leave_to_library
from ..modules.code_owner import owner_of
from ..modules.stored_form import restore_weights
from ..signature import switches, tree_spec
from ..signature.tensors import PLAIN_TENSORS, empty_dense_like, storage_of
from .ahead_of_time import random_numbers_kept
from .backend import Artifact, Backend
from .compiled_graph import CompiledGraph, CompileFailed, Facts
from .generated_code import GENERATE
from .registry import backend_named
from .specialization import Trace
from .traced_reads import forget_guards, refuse_unwatched

LARGEST_SIZE = 2**31 - 1
"""No dimension of a call's tensors is larger: it fits an index of 32 bits."""

_OPEN_QUESTIONS = ("data-dependent", "unbacked symbols", "shape error in scatter op", "LoweringException")
"""What torch says where tracing must know whether a size is 1, and inductor how long a slice is."""

_one_at_a_time = threading.Lock()
"""Torch compiles one graph at a time in a process anyway; backends rely on it to tell whose generated code is new."""

_numbers = itertools.count()
"""Numbers for the functions that are compiled."""

Tracing = Callable[[], AbstractContextManager[None]]


def compile_block(
    template: torch.nn.Module,
    call: Call,
    lifts: bool = True,
    interrupts: tuple[type[BaseException], ...] = (),
    savable: bool = True,
    code: ReadCode | None = None,
    tracing: Tracing = nullcontext,
    compiler: Backend | None = None,
) -> CompiledGraph:
    """The graph for calls like this one; of its tensors only shapes, strides, dtypes and devices are used.

    The block is traced without running; with weights of tensor subclasses, its code is run without values.

    template: the block with its weights on the meta device (`kinds.template_of`); it is changed.
    lifts: trace a batch of 1 as 2, where the block's code allows it.
    interrupts: exceptions that mean "stop the run"; one that the compiler met is raised as it was.
    savable: keep what saving the graph needs.
    code: what was read of the block; a graph with other code or values is refused. None: any code is allowed.
    tracing: makes the context that the block is traced in.
    compiler: used in place of the call's backend.

    Raises:
        CompileFailed: the compiler is missing, failed, or met an operator it does not know.
        torch.OutOfMemoryError: there was too little memory for it now, on a device or in the process.
    """
    compiler = compiler or backend_named(call.backend)
    kind, weights, inputs = call.kind, call.weights, call.inputs
    device = next((tensor.device.type for tensor in (*inputs, *weights) if tensor.ndim), None)
    if (missing := compiler.find_missing(device)) is not None:
        raise CompileFailed(missing)
    if kind.forms and others_may_keep(code.codes if code else (), template):
        raise CompileFailed(Reason("others_may_keep"))
    try:
        leave_to_library(template)
    except Exception as error:  # a class that no other can be derived from
        raise CompileFailed(Reason("compile_failed", error=one_line(error))) from error
    block = _Block(template, kind, call.spec, interrupts, *_code_of(code), tracing, code)
    lifted = list(_lift_batches(inputs, call.spec)) if call.any_size and lifts else []
    for layouts in (*lifted, inputs):
        trace = Trace()
        examples = _make_examples(layouts, [tensor.device for tensor in inputs], call.any_size)
        try:
            with _free_at_end(examples), _example_weights(weights, kind) as weight_examples:
                tensors = (*weight_examples, *examples)
                artifact, fixed = _compile(block, tensors, call.any_size, compiler, trace)
            break
        except CompileFailed as failed:
            if layouts is inputs or not failed.is_of_compiler or trace.is_whole:
                raise
            log.debug("%s is not traced at larger sizes: %s", kind.name, failed.reason)
    unread = None if code is None else find_unread_code(trace.codes, code.codes | tree_spec.makers(call.spec))
    if unread is not None:
        artifact.release()
        file = os.path.basename(unread.co_filename)
        raise CompileFailed(Reason("code_unread", function=unread.co_name, file=file))
    sizes = ((at, d, size) for at, weight in enumerate(weights) for d, size in enumerate(weight.shape))
    weight_sizes = [item for item in sizes if item[:2] not in kind.varying]  # a host may have put others there since
    facts = Facts(
        static_ones=tuple(
            (at, d)
            for at, layout in enumerate(layouts, len(weights))
            for d, size in enumerate(layout.shape)
            if size == 1
        ),
        weights=len(weights),
        changed=tuple(at - len(weights) for at in trace.changed) if trace.calls else tuple(range(len(inputs))),
        dynamic=call.any_size,
        values=call.values,
        fixed=(*weight_sizes, *(item for item in fixed if item[0] >= len(weights))),
        grown=tuple(
            (at, 0, tensor.shape[0])
            for at, (tensor, larger) in enumerate(zip(inputs, layouts, strict=True), len(weights))
            if tensor.ndim and tensor.shape[0] > 1 and larger.shape[0] == 2 * tensor.shape[0]
        ),
    )
    block.general = trace if trace.calls else None  # of a backend that does not trace
    block.code = None  # it refers to the model, as no graph may
    return _make_graph(artifact, facts, block, template if savable else None)


def load_block(
    template: torch.nn.Module,
    call: Call,
    data: bytes,
    facts: Facts,
    interrupts: tuple[type[BaseException], ...] = (),
    code: ReadCode | None = None,
    tracing: Tracing = nullcontext,
) -> CompiledGraph:
    """The graph whose `save` gave these bytes, without tracing or compiling anything.

    data: code, so it must have been checked. facts: the graph's. The others are as for `compile_block`.
    Raises Exception: of any type; the bytes are of another torch, or this system cannot load them.
    """
    leave_to_library(template)
    with _one_at_a_time, random_numbers_kept(call.devices), tracing():  # operators are defined there
        artifact = backend_named(call.backend).load(data, template)  # type: ignore[misc]  # TypeError without one
    block = _Block(template, call.kind, call.spec, interrupts, *_code_of(code), tracing)
    return _make_graph(artifact, facts, block, template=None)


def _code_of(code: ReadCode | None) -> tuple[frozenset[types.CodeType], frozenset[str] | None]:
    """The code in and around a model's blocks, and the settings of torch that are watched; a graph may keep both."""
    return (frozenset(), None) if code is None else (code.codes | code.around, code.settings)


def take_code(graph: CompiledGraph, devices: Iterable[torch.device]) -> None:
    """Load a graph's code that another process has made. devices: of a call. Raises Exception, of any type."""
    with _one_at_a_time, random_numbers_kept(devices):
        graph.take_code()


def _make_graph(artifact: Artifact, facts: Facts, block: _Block, template: torch.nn.Module | None) -> CompiledGraph:
    """The graph of an artifact. template: what saving the graph needs; None where it is not to be saved."""
    save = None if artifact.save is None or template is None else partial(artifact.save, template)
    fields = artifact.run, artifact.guards, facts, artifact.nbytes, save
    graph = CompiledGraph(*fields, with_ones=block.find_conditions_on_ones, pending=artifact.pending)
    weakref.finalize(graph, artifact.release).atexit = False
    return graph


@dataclass(eq=False)
class _Block:
    """A block and one kind of its calls, for later traces. The fields are as for `compile_block`.

    general: the trace of the block at sizes that are not 1; None before the first.
    """

    template: torch.nn.Module
    kind: Kind
    spec: tree_spec.Spec
    interrupts: tuple[type[BaseException], ...]
    codes: frozenset[types.CodeType]
    settings: frozenset[str] | None
    tracing: Tracing
    code: ReadCode | None = None
    general: Trace | None = None

    def find_conditions_on_ones(self, ones: Sequence[torch.Tensor], twos: Sequence[torch.Tensor]) -> str | None:
        """Conditions on other sizes (`Trace.asked`) under which the block treats 1 like any size; None if it does not.

        ones: weights and inputs. twos: the same with 2 in place of each such 1, wherever the inputs are.
        """
        devices = [tensor.device for tensor in ones[len(self.kind.tensors) :]]
        try:
            self.general = self.general or self._trace(twos, devices)
            traced = self._trace(ones, devices)
        except CompileFailed as failed:
            log.debug("%s is not traced with sizes of 1: %s", self.kind.name, failed.reason)
            return None
        return traced.asked if traced.does_as(self.general, ones) else None

    def _trace(self, tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> Trace:
        trace, count = Trace(), len(self.kind.tensors)
        examples = _make_examples(tensors[count:], devices, True)
        with self.tracing(), _free_at_end(examples), _example_weights(tensors[:count], self.kind) as weights:
            artifact, _ = _compile(self, (*weights, *examples), True, backend_named("eager"), trace, is_kept=False)
        artifact.release()
        emit("block_traced", name=self.kind.name)  # lets counters of torch's graphs leave this one out
        return trace


def _compile(  # type: ignore[return]  # the last round returns or raises
    block: _Block,
    tensors: Sequence[torch.Tensor],
    any_size: bool,
    backend: Backend,
    trace: Trace,
    is_kept: bool = True,
) -> tuple[Artifact, tuple[tuple[int, int, int], ...]]:
    """The artifact, and the sizes that it is specialised on; the trace is filled. is_kept: whether it will be used.

    A size of 1 is traced like others where tracing can answer all questions without it.
    """
    torch_internals.keep_device_guard()
    for oblivious in (True, False) if any_size else (False,):
        function = _block_function(block, trace, is_kept)
        try:
            devices = (tensor.device for tensor in tensors)
            with _one_at_a_time, random_numbers_kept(devices), _set_trace_options(any_size, oblivious, block.settings):
                return backend.compile(function, tensors), trace.find_fixed_sizes(tensors)
        except Exception as error:
            pass_on(error, (*block.interrupts, torch.OutOfMemoryError))
            if cause_among(error, (MemoryError,)) is not None:
                raise torch.OutOfMemoryError("the process got no more memory") from error
            refusal = cause_among(error, (KeepsState, CompileFailed))
            if refusal is not None:
                kept_state = Reason("keeps_state", place=str(refusal))
                raise CompileFailed(refusal.reason if isinstance(refusal, CompileFailed) else kept_state) from error
            if not oblivious or not any(words in str(error) for words in _OPEN_QUESTIONS):
                raise CompileFailed(_reason_of(error)) from error


def _reason_of(error: Exception) -> Reason:
    """Why torch did not compile: what it cannot trace, and in whose code; else the error's text."""
    unsupported = cause_among(error, (torch_internals.UNSUPPORTED.get(()),))
    frames = [at for at in getattr(unsupported, "real_stack", None) or () if not is_of_program(at.filename)]
    if not frames:
        return Reason("compile_failed", error=one_line(error))
    named = re.search(r"Explanation: [^`\n]*`(?:<unknown module>\.)?([^`\n]+?)\.?`", str(unsupported))
    what = one_line(unsupported or error) if named is None else named[1]
    return Reason("untraceable", what=what, function=frames[-1].name, owner=owner_of(frames[-1].filename))


def _assume_bounds(inputs: Sequence[torch.Tensor]) -> None:
    """Bound all sizes: inductor could not tell whether a slice to the end goes past the end."""
    for tensor in inputs:
        for size in tensor.shape:
            torch._check(size <= LARGEST_SIZE)


def _make_ends(trace: Trace, block: _Block, weights: int, is_kept: bool) -> tuple[Callable, Callable]:
    """The traced function's first and last calls, which torch runs while tracing and leaves out of the graph."""

    @torch.compiler.assume_constant_result
    def begin() -> None:
        trace.begin()

    @torch.compiler.assume_constant_result
    def end(has_own_weights: bool, has_given_arguments: bool) -> None:
        trace.end(asks=not is_kept)
        if not has_own_weights or any(at < weights for at in trace.changed):
            raise CompileFailed(Reason("changes_own"))  # a graph or a comparison would do so again
        if not has_given_arguments:
            raise CompileFailed(Reason("changes_list"))
        refuse_kept_state(trace.codes, block.codes, block.template)
        if block.code is not None:
            refuse_unwatched(block.code, weights)
        with suppress(Exception):  # of a torch that keeps them differently
            forget_guards()
        if is_kept:
            emit("compile_stage", stage=GENERATE)

    return begin, end


def _block_function(of: _Block, trace: Trace, is_kept: bool) -> Callable:
    template, spec, forms, count = of.template, of.spec, of.kind.forms, len(of.kind.tensors)
    named = dict(chain(template.named_parameters("", True, False), template.named_buffers("", True, False)))
    of_names = {name: at for at, name in enumerate(of.kind.weights)}
    at_names = {id(named.get(name)): at for name, at in of_names.items()}
    # With other names of the same, which torch would look for in each trace.
    places = tuple((of_names | {n: at_names[id(t)] for n, t in named.items() if id(t) in at_names}).items())
    is_changed = {"weights": False, "given": False}

    def stored(*tensors):
        args, kwargs = tree_spec.rebuild(spec, tensors[count:], closed_over := [])
        own = list(restore_weights(forms, tensors[:count]))
        weights = {name: own[at] for name, at in places}
        tables = nullcontext() if type(tensors[0]) in PLAIN_TENSORS else _TablesAsNumbers()
        with tables, nullcontext() if trace.is_whole else trace.recorder():
            out = torch.func.functional_call(template, weights, args, kwargs, tie_weights=False)
        is_changed["weights"] |= any(weights[name] is not own[at] for name, at in places)
        is_changed["given"] |= not tree_spec.is_unchanged(spec, (args, kwargs), tensors[count:], closed_over)
        return out

    def block(*tensors):
        begin()  # noqa: F821 of its own scope, below
        bound_sizes(tensors[count:])  # noqa: F821
        args, kwargs = tree_spec.rebuild(spec, tensors[count:], closed_over := [])
        weights = {name: tensors[at] for name, at in places}
        out = torch.func.functional_call(template, weights, args, kwargs, tie_weights=False)
        own = all([weights[name] is tensors[at] for name, at in places])  # noqa: C419
        end(own, tree_spec.is_unchanged(spec, (args, kwargs), tensors[count:], closed_over))  # noqa: F821
        return out

    def block_of_stored(*tensors):
        begin()  # noqa: F821
        bound_sizes(tensors[count:])  # noqa: F821
        out = run(*tensors)  # noqa: F821
        end_of_stored()  # noqa: F821
        return out

    # A code object of its own: torch counts recompilations for each. Globals of its own: torch leaves compiled code
    # there, which must go with the graph. A name of its own: by that torch remembers the sizes of other calls.
    begin, end = _make_ends(trace, of, count, is_kept)
    scope = {"__builtins__": __builtins__, "__name__": __name__, "torch": torch, "tree_spec": tree_spec}
    scope |= {"bound_sizes": _assume_bounds, "begin": begin, "end": end}
    function = block
    if forms:
        # Dynamo follows little of what classes of tensors do; the stage after it runs their code.
        scope["run"] = torch.compiler.allow_in_graph(stored)
        ended = torch.compiler.assume_constant_result
        scope["end_of_stored"] = ended(lambda: end(not is_changed["weights"], not is_changed["given"]))
        function = block_of_stored
    code = function.__code__.replace(co_name=f"block_{next(_numbers)}")
    return types.FunctionType(code, scope, "block", None, function.__closure__)


class _TablesAsNumbers(TorchFunctionMode):
    """In a trace of stored weights, makes a table that the code holds out of its numbers, since a trace takes no other
    tensors with values. The kind tells tables apart, as all constants of code."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._make_plain, (args, kwargs or {}))
        return function(*args, **kwargs)

    @staticmethod
    def _make_plain(tensor: torch.Tensor) -> torch.Tensor:
        is_table = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
        return torch.tensor(tensor.tolist(), dtype=tensor.dtype) if is_table else tensor


@contextmanager
def _example_weights(weights: Sequence[torch.Tensor], kind: Kind) -> Iterator[list[torch.Tensor]]:
    """The weights, with unfilled stand-ins for those that share memory with an earlier one or vary in size.

    A streamed layer's weight and bias are in one place, and torch counts a second view of it as one that was changed.
    """
    examples, stand_ins, seen = list(weights), [], set()
    varying = {index for index, _ in kind.varying}
    for index, weight in enumerate(weights):
        storage = storage_of(weight)
        if storage in seen or index in varying:
            stand_in = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
            examples[index] = stand_in
            stand_ins.append(stand_in)
        seen.add(storage)
    for index, dimension in kind.varying:
        torch_internals.MARK_DYNAMIC.get()(examples[index], dimension)
    with _free_at_end(stand_ins):
        yield examples


def _lift_batches(inputs: Sequence[torch.Tensor], spec: tree_spec.Spec) -> Iterator[list[torch.Tensor]]:
    """Layouts of the inputs with the batch of 1 doubled, the likeliest first; none where the batch is not 1.

    The compiler would specialise on a 1. The batch is the first dimension of the first input, and of each other input
    where it is 1 or 2 (two rows for an image); or 1 alone; or 1 in all but one argument, such as positions.
    """
    first = next((at for at, tensor in enumerate(inputs) if tensor.ndim and tensor.numel()), None)
    if first is None or inputs[first].shape[0] != 1:
        return
    single, double = (
        {at for at, tensor in enumerate(inputs) if tensor.shape[:1] == (rows,) and (rows == 1 or tensor.numel())}
        for rows in (1, 2)
    )
    arguments = [set(indices) for indices in tree_spec.tensors_by_argument(spec) if first not in indices]
    grown = [single | double, single, *(single - indices for indices in arguments if single & indices)]
    for chosen in grown if double else grown[1:]:
        shapes = [(2 * t.shape[0], *t.shape[1:]) if at in chosen else t.shape for at, t in enumerate(inputs)]
        yield [empty_dense_like(tensor, shape, "meta") for tensor, shape in zip(inputs, shapes, strict=True)]


def _make_examples(
    layouts: Sequence[torch.Tensor], devices: Sequence[torch.device], dynamic: bool
) -> list[torch.Tensor]:
    """Unfilled tensors of these layouts; where dynamic, their sizes above 1 are marked so."""
    examples = [empty_dense_like(tensor, device=device) for tensor, device in zip(layouts, devices, strict=True)]
    for example in examples if dynamic else ():
        for dimension, size in enumerate(example.shape):
            if size > 1:
                torch_internals.MARK_DYNAMIC.get()(example, dimension)
    return examples


@contextmanager
def _free_at_end(examples: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Frees the examples' memory at the end: torch leaves them in cycles, which may outlast the image."""
    try:
        yield examples
    finally:
        with torch.inference_mode():  # where any tensor may be changed
            for example in examples:
                example.set_()


@contextmanager
def _set_trace_options(dynamic: bool, oblivious: bool, watched: frozenset[str] | None):
    """Torch's settings for one compilation: equal sizes are a coincidence, and 1 is a size like others (oblivious)."""
    dynamo, symbols = torch._dynamo.config, torch.fx.experimental._config
    settings = {"use_duck_shape": False, "backed_size_oblivious": oblivious} if dynamic else {}
    numpy = {"use_numpy_random_stream": True}  # else its random numbers become torch's, which others then miss
    with (
        dynamo.patch({name: value for name, value in numpy.items() if hasattr(dynamo, name)}),
        symbols.patch({name: value for name, value in settings.items() if hasattr(symbols, name)}),
        _norms_in_one_step(),
        _repeat_at_any_size(),
        _slices_as_defaults(),
        switches.treat_as_constants(watched),
    ):
        yield


@contextmanager
def _replace_item(table: dict, key: Any, value: Any) -> Iterator[None]:
    """A context in which one of torch's tables has another item, or one more."""
    before = table.get(key)
    table[key] = value
    try:
        yield
    finally:
        table[key] = before
        if before is None:
            del table[key]


def _norms_in_one_step() -> AbstractContextManager[None]:
    """A context in which torch finds the shape of a group norm's result without its steps: with sizes left open, they
    are a fifth of a UNet's trace."""
    table, norm = torch_internals.DECOMPOSITIONS.get({}), torch.ops.aten.native_group_norm.default
    if (original := table.get(norm)) is None:
        return nullcontext()

    def find_shapes(x, weight, bias, batch, channels, size, groups, eps):
        if x.device.type == "cpu":  # where the result has the input's order in memory
            return original(x, weight, bias, batch, channels, size, groups, eps)
        torch._check(channels % groups == 0)
        return x.new_empty(x.shape), x.new_empty((batch, groups)), x.new_empty((batch, groups))

    return _replace_item(table, norm, find_shapes)


@contextmanager
def _repeat_at_any_size():
    """A context in which repeating a mask for every head leaves its size dynamic; torch would fix it by a check."""
    original, is_inherited = torch.Tensor.repeat_interleave, "repeat_interleave" not in vars(torch.Tensor)

    def repeat_interleave(tensor, repeats, dim=None, *, output_size=None):
        if not isinstance(repeats, torch.Tensor):
            output_size = None  # follows from the others
        return original(tensor, repeats, dim, output_size=output_size)

    torch.Tensor.repeat_interleave = repeat_interleave
    try:
        yield
    finally:
        torch.Tensor.repeat_interleave = original
        if is_inherited:
            del torch.Tensor.repeat_interleave


def _slices_as_defaults() -> AbstractContextManager[None]:
    """A context in which torch traces a slice that is the default of a method's argument.

    Otherwise it does so for objects from outside a graph alone; LTX 2 makes its time steps inside."""
    tracers, traced = torch_internals.CONSTANT_TRACERS.get({}), torch_internals.TRACED_SLICE.get(None)
    if traced is None or slice in tracers:
        return nullcontext()

    def trace(translator: Any, value: slice) -> Any:
        create = tracers[type(None)]
        return traced([create(translator, part) for part in (value.start, value.stop, value.step)], translator)

    return _replace_item(tracers, slice, trace)
