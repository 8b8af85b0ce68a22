"""Compiles a block into a graph, given an example call.

A graph takes the block's weights as inputs beside the call's own tensors, so it serves every block of the kind. The
caller owns it, to count, drop and save it, where plain `torch.compile` keeps compiling at later calls, up to a limit of
its own.
"""

from __future__ import annotations

import itertools
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..core import torch_internals
from ..core.errors import cause_among, one_line, pass_on
from ..core.events import emit, log
from ..core.reasons import Reason
from ..fingerprint.block_call import Call
from ..fingerprint.code_hash import unread_code
from ..fingerprint.kept_state import KeepsState, refuse_kept_state, without_others_state
from ..fingerprint.kinds import Kind
from ..modules.stored_form import restored
from ..signature import tree_spec
from ..signature.tensors import PLAIN_TENSORS, empty_dense_like
from .backend import Artifact, Backend
from .compiled_graph import CompiledGraph, CompileFailed, Facts
from .convolution import leave_to_library
from .generated_code import GENERATE
from .registry import backend_named
from .specialization import OpTrace, TracedSizes, flow_of, trace_ops

LARGEST_SIZE = 2**31 - 1
"""No dimension of a call's tensors is larger: it fits an index of 32 bits."""

_OPEN_QUESTIONS = ("data-dependent", "unbacked symbols", "shape error in scatter op", "LoweringException")
"""What torch says where tracing must know whether a size is 1, and inductor how long a slice is."""

_one_at_a_time = threading.Lock()
"""Torch compiles one graph at a time in a process anyway; backends rely on it to tell whose generated code is new."""


Tracing = Callable[[], AbstractContextManager[None]]

_numbers = itertools.count()
"""Numbers for the functions that are compiled."""


def compile_block(
    template: torch.nn.Module,
    call: Call,
    larger: Sequence[Sequence[int]] | None = None,
    interrupts: tuple[type[BaseException], ...] = (),
    savable: bool = True,
    codes: frozenset[types.CodeType] | None = None,
    tracing: Tracing = nullcontext,
) -> CompiledGraph:
    """The graph for calls like this one; of its tensors only shapes, strides, dtypes and devices are used.

    template: the block with its weights on the meta device (`kinds.template_of`); it is changed.
    larger: sizes of the inputs in a call where only what is always 1 is 1; None where they are not known.
    interrupts: exceptions that mean "stop the run"; one that the compiler met is raised as it was.
    savable: the graph is going to be saved if it can be.
    codes: of the functions that the kind was told by: nothing is kept of other code. None asks for nothing.
    tracing: makes the context that the block is traced in.

    Raises:
        CompileFailed: the compiler is missing, failed, or met an operator it does not know.
        torch.OutOfMemoryError: there was too little memory for it now, on a device or in the process.
    """
    compiler, kind, spec, weights, inputs = backend_named(call.backend), call.kind, call.spec, call.weights, call.inputs
    device = next((tensor.device.type for tensor in (*inputs, *weights) if tensor.ndim), None)
    if (missing := compiler.missing(device)) is not None:
        raise CompileFailed(missing)
    changed_lists: list[Any] = []
    trace = _Tracer(template, kind, spec, interrupts, tracing, changed_lists)
    try:
        leave_to_library(template)
    except Exception as error:  # a class that no other can be derived from
        raise CompileFailed(Reason("not_copied", error=one_line(error))) from error
    larger_ones = list(_lifted(inputs, larger, spec)) if call.any_size else []
    devices = [tensor.device for tensor in inputs]
    ops = trace((*weights, *inputs))
    if trace.may_keep:  # tracing tells, and runs nothing
        as_it_is, eager = replace(call, any_size=False), backend_named("eager")
        for given in (inputs, *larger_ones[:1]):  # it may do so for some sizes only
            try:
                with _released(_examples(given, devices, False)[0]) as examples:
                    found, *_ = _compile(template, as_it_is, (*weights, *examples), eager, interrupts, False)
            except CompileFailed as failed:
                log.debug("%s may keep something: %s", type(template).__name__, failed.reason)
                raise CompileFailed(Reason("keeps_state")) from failed
            found.release()
        trace.keeps_nothing = tuple(tensor.shape for tensor in inputs)
        ops = trace((*weights, *inputs))
    if trace.changes_own:
        raise CompileFailed(Reason("changes_own"))
    if changed_lists or ops is None and tree_spec.has_lists(spec):
        raise CompileFailed(Reason("changes_list"))
    lifted = next((given for given in larger_ones if ops is None or trace((*weights, *given)) is not None), None)
    examples, static_ones = _examples(lifted or inputs, devices, call.any_size)
    with _released(examples):
        tensors = (*_example_weights(weights, kind), *examples)
        artifact, fixed, traced_code = _compile(template, call, tensors, compiler, interrupts, savable)
    unread = None if codes is None else unread_code(traced_code, codes | tree_spec.makers(spec))
    if unread is not None:
        artifact.release()
        file = os.path.basename(unread.co_filename)
        raise CompileFailed(Reason("code_unread", function=unread.co_name, file=file))
    facts = Facts(
        static_ones=tuple((i + len(weights), d) for i, d in static_ones),
        weights=len(weights),
        changed=tuple(range(len(inputs))) if ops is None else ops.changed,
        dynamic=call.any_size,
        values=call.values,
        fixed=tuple(item for item in fixed if item[0] >= len(weights)),
        grown=tuple((i + len(weights), d, size) for i, d, size in _grown(inputs, lifted)),
    )
    return _graph(artifact, facts, template, trace)


def load_block(
    template: torch.nn.Module,
    call: Call,
    data: bytes,
    facts: Facts,
    interrupts: tuple[type[BaseException], ...] = (),
    tracing: Tracing = nullcontext,
) -> CompiledGraph:
    """The graph whose `save` gave these bytes, without tracing or compiling anything.

    template, interrupts, tracing: as for `compile_block`. data: code, so it must have been checked.
    facts: the graph's.

    Raises Exception: of any type; the bytes are of another torch, or this system cannot load them.
    """
    leave_to_library(template)
    with _one_at_a_time, tracing():  # operators are defined there
        artifact = backend_named(call.backend).load(data, template)
    trace = _Tracer(template, call.kind, call.spec, interrupts, tracing, keeps_nothing=None)  # or it had no graph
    return _graph(artifact, facts, None, trace)


def _graph(artifact: Artifact, facts: Facts, template: torch.nn.Module | None, trace: _Tracer) -> CompiledGraph:
    """template: what saving the graph needs; None where it is not to be saved."""
    save = None if artifact.save is None or template is None else lambda: artifact.save(template)
    how = {"trace": trace if facts.dynamic else None, "save": save, "does_the_same": trace.does_the_same}
    graph = CompiledGraph(artifact.run, artifact.guards, facts, artifact.nbytes, **how)
    weakref.finalize(graph, artifact.release).atexit = False
    return graph


@dataclass
class _Tracer:
    """Runs a block without values; the fields are as for `compile_block`.

    changed_lists: gets the arguments of calls that changed a list or dict.
    keeps_nothing: sizes of inputs with which others' code in the block is known to keep nothing, as it does with larger
        ones that the graph's guards let through; None for any. No other run goes on where it may keep something.
    may_keep: a run ended there.
    """

    template: torch.nn.Module
    kind: Kind
    spec: tree_spec.Spec
    interrupts: tuple[type[BaseException], ...]
    tracing: Tracing
    changed_lists: list[Any] | None = None
    keeps_nothing: Sequence[torch.Size] | None = ()
    may_keep: bool = False
    changes_own: bool = False
    """A run wrote to weights or buffers of the block, or set them: a graph or a comparison would do so again."""

    def __call__(self, tensors: Sequence[torch.Tensor]) -> OpTrace | None:
        """The block's operations, given a call's weights and inputs."""
        with self.tracing(), self._kept_alone(tensors):
            block = self._block(self._weights(tensors, "meta"))
            return trace_ops(block, tensors[len(self.kind.tensors) :], self.interrupts)
        return None

    @contextmanager
    def _kept_alone(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        pairs = zip(tensors[len(self.kind.tensors) :], self.keeps_nothing or (), strict=bool(self.keeps_nothing))
        ones = (size == 1 != known for tensor, sizes in pairs for size, known in zip(tensor.shape, sizes, strict=True))
        is_known = self.keeps_nothing != () and not any(ones)
        try:
            with nullcontext() if is_known else without_others_state(self.template, not self.kind.forms):
                yield
        except KeepsState:
            self.may_keep = True

    def does_the_same(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> bool:
        """Whether it computes the same with these `Kind.numbers` as with the template's own."""
        mode = torch_internals.FAKE_MODE.get(None)
        if mode is None:
            return False
        settings = [self.template.get_submodule(path) for path, _ in self.kind.numbers]
        count, kept, self.changed_lists = len(self.kind.tensors), self.changed_lists, []
        # On the devices of the call: code asks for them, and so does autocast.
        with self.tracing(), mode(allow_non_fake_inputs=True), self._kept_alone(tensors):
            inputs = [empty_dense_like(tensor) for tensor in tensors[count:]]
            weights = self._weights(tensors)
            given = self._block(weights), inputs, weights, self.interrupts
            flow = flow_of(*given)
            own = [part.__dict__[name] for part, (_, name) in zip(settings, self.kind.numbers, strict=True)]
            try:
                self._number(settings, numbers)
                return flow is not None and flow == flow_of(*given) and not self.changed_lists
            finally:
                self.changed_lists = kept
                self._number(settings, own)
        return False

    def _number(self, parts: Sequence[torch.nn.Module], numbers: Sequence[int]) -> None:
        for part, (_, name), number in zip(parts, self.kind.numbers, numbers, strict=True):
            part.__dict__[name] = number

    def _weights(self, tensors: Sequence[torch.Tensor], device: str | None = None) -> list[torch.Tensor]:
        # The template's own are those of the block that the graph was made for, and the call may be another one's.
        with torch.inference_mode(False):  # they count their changes
            return [
                torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)
                for tensor in tensors[: len(self.kind.tensors)]
            ]

    def _block(self, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
        def call(*inputs: torch.Tensor) -> Any:
            args, kwargs = tree_spec.rebuild(self.spec, inputs)
            before = tree_spec.outline((args, kwargs))
            weights = dict(zip(self.kind.weights, restored(self.kind.forms, examples), strict=True))
            own, versions = list(weights.values()), [tensor._version for tensor in examples]
            out = torch.func.functional_call(self.template, weights, args, kwargs)
            is_same = all(one is other for one, other in zip(weights.values(), own, strict=True))
            self.changes_own |= not is_same or [tensor._version for tensor in examples] != versions
            if self.changed_lists is not None and tree_spec.outline((args, kwargs)) != before:
                self.changed_lists.append((args, kwargs))
            return out

        return call


def _compile(
    template: torch.nn.Module,
    call: Call,
    tensors: Sequence[torch.Tensor],
    backend: Backend,
    interrupts: tuple[type[BaseException], ...],
    savable: bool,
) -> tuple[Artifact, tuple[tuple[int, int, int], ...], Sequence[types.CodeType]]:
    """The artifact, the sizes that it is specialised on, and the code that was traced.

    A size of 1 is traced like others where that leaves no question open that tracing must answer.
    """
    torch_internals.keep_device_guard()
    for oblivious in (True, False) if call.any_size else (False,):
        sizes = TracedSizes()
        function = _block_function(template, call.kind, call.spec, sizes)
        try:
            with _one_at_a_time, _tracing(call.any_size, oblivious):
                return backend.compile(function, tensors, savable), sizes.fixed(tensors), sizes.codes
        except Exception as error:
            if cause_among(error, (KeepsState,)) is not None:
                raise CompileFailed(Reason("keeps_state")) from error
            pass_on(error, (*interrupts, torch.OutOfMemoryError))
            if cause_among(error, (MemoryError,)) is not None:
                raise torch.OutOfMemoryError("the process got no more memory") from error
            if not oblivious or not any(words in str(error) for words in _OPEN_QUESTIONS):
                raise CompileFailed(Reason("compile_failed", error=one_line(error))) from error


def _bound_sizes(inputs: Sequence[torch.Tensor]) -> None:
    """Inductor asks whether a slice to the end goes past the end, which nothing says of a size without bound."""
    for tensor in inputs:
        for size in tensor.shape:
            torch._check(size <= LARGEST_SIZE)


def _at_the_end(sizes: TracedSizes, template: torch.nn.Module) -> Callable[[], None]:
    """A function for torch to call at the end of tracing, which leaves it out of the graph."""

    @torch.compiler.assume_constant_result
    def traced() -> None:
        refuse_kept_state(sizes.codes, template)
        emit("compile_stage", stage=GENERATE)

    return traced


def _block_function(template: torch.nn.Module, kind: Kind, spec: tree_spec.Spec, sizes: TracedSizes) -> Callable:
    names, forms, count = kind.weights, kind.forms, len(kind.tensors)

    def stored(*tensors):
        args, kwargs = tree_spec.rebuild(spec, tensors[count:])
        weights = dict(zip(names, restored(forms, tensors[:count]), strict=True))
        tables = nullcontext() if type(tensors[0]) in PLAIN_TENSORS else _TablesAsNumbers()
        with tables, without_others_state(template, False):
            return torch.func.functional_call(template, weights, args, kwargs)

    def block(*tensors):
        observe_sizes()  # noqa: F821 of its own scope, below
        bound_sizes(tensors[count:])  # noqa: F821
        args, kwargs = tree_spec.rebuild(spec, tensors[count:])
        out = torch.func.functional_call(template, dict(zip(names, tensors[:count])), args, kwargs)  # noqa: B905
        traced()  # noqa: F821
        return out

    def block_of_stored(*tensors):
        observe_sizes()  # noqa: F821
        bound_sizes(tensors[count:])  # noqa: F821
        out = run(*tensors)  # noqa: F821
        traced()  # noqa: F821
        return out

    # A code object and globals of its own: torch counts recompilations per code object, which kinds must
    # not share, and leaves what it compiled in the function's globals, which must go when the graph goes. Its name is
    # nobody else's in this process: by that torch knows what sizes other calls had.
    scope = {"__builtins__": __builtins__, "__name__": __name__, "torch": torch, "tree_spec": tree_spec}
    scope |= {"bound_sizes": _bound_sizes, "observe_sizes": sizes.observer(), "traced": _at_the_end(sizes, template)}
    function = block
    if forms:
        # Dynamo follows little of what classes of tensors do; the stage after it runs their code.
        scope["run"] = torch.compiler.allow_in_graph(stored)
        function = block_of_stored
    code = function.__code__.replace(co_name=f"block_{next(_numbers)}")
    return types.FunctionType(code, scope, "block", None, function.__closure__)


class _TablesAsNumbers(TorchFunctionMode):
    """In a trace of stored weights: a tensor of the code's own, as a table of codes, is made there of its numbers.

    A trace takes no other tensors with values. The kind tells one table from another, as all constants of code.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._made, (args, kwargs or {}))
        return function(*args, **kwargs)

    @staticmethod
    def _made(tensor: torch.Tensor) -> torch.Tensor:
        is_table = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
        return torch.tensor(tensor.tolist(), dtype=tensor.dtype) if is_table else tensor


def _example_weights(weights: Sequence[torch.Tensor], kind: Kind) -> list[torch.Tensor]:
    """The weights, with an unfilled and marked stand-in for each whose sizes vary within the kind."""
    examples = list(weights)
    for index, dimension in kind.varying:
        weight = weights[index]
        if examples[index] is weight:
            made = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
            examples[index] = made
        torch_internals.MARK_DYNAMIC.get()(examples[index], dimension)
    return examples


def _lifted(
    inputs: Sequence[torch.Tensor], larger: Sequence[Sequence[int]] | None, spec: tree_spec.Spec
) -> Iterator[list[torch.Tensor]]:
    """Layouts of the inputs at larger sizes, without a 1 on which the compiler would specialise, the likeliest first;
    none where the batch is not 1.

    Where these are not known, or wrong, as for a cache that the model keeps, the batch is taken to be the first
    dimension of the first input, and of each other input in which it is 1 too; but for one argument, such as positions.
    """
    if larger is not None:
        yield [empty_dense_like(tensor, shape, "meta") for tensor, shape in zip(inputs, larger, strict=True)]
    first = next((at for at, tensor in enumerate(inputs) if tensor.ndim and tensor.numel()), None)
    if first is None or inputs[first].shape[0] != 1:
        return
    single = {at for at, tensor in enumerate(inputs) if tensor.shape[:1] == (1,)}
    for left in ((), *tree_spec.tensors_by_argument(spec)):
        if not left or (first not in left and single.intersection(left)):
            grown = single.difference(left)
            shapes = ((2, *tensor.shape[1:]) if at in grown else tensor.shape for at, tensor in enumerate(inputs))
            yield [empty_dense_like(tensor, shape, "meta") for tensor, shape in zip(inputs, shapes, strict=True)]


def _grown(inputs: Sequence[torch.Tensor], lifted: Sequence[torch.Tensor] | None) -> Iterator[tuple[int, int, int]]:
    """(input, dimension, size) of the numbers of rows above 1 that are twice as large in the lifted inputs.

    Other dimensions may be larger there because a small latent is.
    """
    for index, (tensor, larger) in enumerate(zip(inputs, lifted or inputs, strict=True)):
        if tensor.ndim and tensor.shape[0] > 1 and larger.shape[0] == 2 * tensor.shape[0]:
            yield index, 0, tensor.shape[0]


def _examples(
    layouts: Sequence[torch.Tensor], devices: Sequence[torch.device], dynamic: bool
) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Unfilled tensors of these layouts, dynamic dimensions marked; and the (input, dimension) pairs that are 1."""
    examples, ones = [], []
    for index, (tensor, device) in enumerate(zip(layouts, devices, strict=True)):
        example = empty_dense_like(tensor, device=device)
        for dimension, size in enumerate(tensor.shape):
            if size == 1:
                ones.append((index, dimension))
            elif dynamic and size:
                torch_internals.MARK_DYNAMIC.get()(example, dimension)
        examples.append(example)
    return examples, ones


@contextmanager
def _released(examples: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Frees their memory at the end: torch leaves them in cycles, which may outlast the image."""
    try:
        yield examples
    finally:
        with torch.inference_mode():  # where any tensor may be changed
            for example in examples:
                example.set_()


@contextmanager
def _tracing(dynamic: bool, oblivious: bool):
    """Torch's settings for one compilation: equal sizes are a coincidence, and 1 is a size like others (oblivious)."""
    config = torch.fx.experimental._config
    settings = {"use_duck_shape": False, "backed_size_oblivious": oblivious} if dynamic else {}
    with (
        config.patch({name: value for name, value in settings.items() if hasattr(config, name)}),
        _repeated_at_any_size(),
        _slices_as_defaults(),
        _sizes_among_numbers(),
    ):
        yield


@contextmanager
def _repeated_at_any_size():
    """A context in which repeating a mask for every head leaves its size dynamic; torch would fix it by a check."""
    own, is_inherited = torch.Tensor.repeat_interleave, "repeat_interleave" not in vars(torch.Tensor)

    def repeat_interleave(tensor, repeats, dim=None, *, output_size=None):
        if not isinstance(repeats, torch.Tensor):
            output_size = None  # follows from the others
        return own(tensor, repeats, dim, output_size=output_size)

    torch.Tensor.repeat_interleave = repeat_interleave
    try:
        yield
    finally:
        torch.Tensor.repeat_interleave = own
        if is_inherited:
            del torch.Tensor.repeat_interleave


def _stepped(start: int, stop: int, step: int) -> list[int]:
    """`range(start, stop, step)`, of which torch would fix all three; so it fixes only how many numbers there are."""
    if step == 0:
        raise ValueError("range() arg 3 must not be zero")
    numbers = []
    while (start < stop) if step > 0 else (start > stop):
        numbers.append(start)
        start = start + step
    return numbers


def _linspace(start: float, end: float, steps: int, *, dtype=None, device=None) -> torch.Tensor:
    """`torch.linspace`, as its own kernels compute it, of any number of steps: torch would fix it."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    index = torch.arange(steps, dtype=exact, device=device)
    step = (end - start) / max(steps - 1, 1)
    from_start = index < max(steps // 2, 1)
    positions = torch.where(from_start, start + step * index, end - step * (steps - 1 - index))
    return positions.to(torch.get_default_dtype() if dtype is None else dtype)


@contextmanager
def _sizes_among_numbers():
    """A context in which functions that take a size as a plain number are traced for any, where torch would fix it."""
    kinds = torch_internals.BUILTINS.get(None), torch_internals.TORCH_FUNCTIONS.get(None)
    if None in kinds:
        yield
        return
    own = [kind.call_function for kind in kinds]

    def replaced(value: Any, call: Callable) -> Callable:
        def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            function = getattr(self, value)
            given = {type(arg.realize()).__name__ for arg in (*args, *kwargs.values())}
            if "SymNodeVariable" in given and "TensorVariable" not in given:
                if function is range and len(args) == 3:
                    return self.build(tx, _stepped).call_function(tx, args, kwargs)
                dtype = kwargs["dtype"].as_python_constant() if "dtype" in kwargs else None
                is_like = kwargs.keys() <= {"steps", "dtype", "device"} and (dtype is None or dtype.is_floating_point)
                if function is torch.linspace and is_like:
                    return self.build(tx, _linspace).call_function(tx, args, kwargs)
            return call(self, tx, args, kwargs)

        return call_function

    for kind, value, call in zip(kinds, ("fn", "value"), own, strict=True):
        kind.call_function = replaced(value, call)
    try:
        yield
    finally:
        for kind, call in zip(kinds, own, strict=True):
            kind.call_function = call


@contextmanager
def _slices_as_defaults():
    """A context in which torch traces a slice that is the default of a method's argument.

    Otherwise it does so for objects from outside a graph alone; LTX 2 makes its time steps inside."""
    tracers, traced = torch_internals.CONSTANT_TRACERS.get({}), torch_internals.TRACED_SLICE.get(None)
    if traced is None or slice in tracers:
        yield
        return

    def trace(translator: Any, value: slice) -> Any:
        create = tracers[type(None)]
        return traced([create(translator, part) for part in (value.start, value.stop, value.step)], translator)

    tracers[slice] = trace
    try:
        yield
    finally:
        del tracers[slice]
