"""Which sizes a graph is specialised on, though it was meant to serve any.

Two things are asked. `TracedSizes`: which sizes did torch fix while it traced? Code that loops over the batch, or
compares a size with a number, is traced for that size. Torch leaves such a size to its guards on tensors, which a graph
of ours has not: they ask for much that is in its key. `trace_ops`: does the block do the same at another size? Guards
against a size of 1 are mostly needless, and a run on tensors without values tells which.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import torch_internals
from ..core.errors import pass_on
from ..signature.tensors import PLAIN_TENSORS, tensors_in

_PLAIN = (bool, float, str, type(None), torch.dtype)


class TracedSizes:
    """What torch knows of one function, and of the sizes of its tensors, once it has traced it.

    codes: all code that it traced; empty where this torch does not say.
    """

    def __init__(self) -> None:
        self._shape_env: Any = None
        self.codes: Sequence[types.CodeType] = ()

    def observer(self) -> Callable[[], None]:
        """A function for the traced one to call: torch calls it while it traces, and leaves it out of the graph."""

        tracing_context = torch_internals.TRACING_CONTEXT.get()

        @torch.compiler.assume_constant_result
        def observe() -> None:
            context = tracing_context.try_get()
            self._shape_env = None if context is None else context.fake_mode.shape_env
            self.codes = getattr(context, "traced_code", ())  # a list that torch goes on filling

        return observe

    def fixed(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int, int], ...]:
        """(tensor, dimension, size) of the sizes that torch fixed, given the function's examples. To be asked once."""
        shape_env, self._shape_env = self._shape_env, None  # it is large
        if shape_env is None:
            return ()

        def is_fixed(source: str) -> bool:
            symbol = shape_env.source_to_var.get(source)
            return symbol is not None and bool(shape_env.replace(symbol).is_number)

        return tuple(
            (index, dimension, size)
            for index, tensor in enumerate(tensors)
            for dimension, size in enumerate(tensor.shape)
            if is_fixed(f"L['tensors'][{index}].size()[{dimension}]")
        )


@dataclass(frozen=True)
class OpTrace:
    """What a block does with tensors of some sizes.

    calls: every function of torch that returned tensors, with its plain arguments except whole numbers, which may be
        sizes. shapes: of the returned tensors. changed: indices of the inputs that the block writes to.
    """

    calls: tuple[tuple, ...]
    shapes: tuple[torch.Size, ...]
    changed: tuple[int, ...]


class _Recorder(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []
        self.shapes: list[torch.Size] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function == torch.Tensor.data.__get__ and type(args[0]) in PLAIN_TENSORS:
            return args[0].detach()  # the same, but for that what is written to it is counted
        if function == torch.Tensor.data.__set__:
            raise NotImplementedError("nothing counts that")
        out = function(*args, **kwargs)
        shapes = [tensor.shape for tensor in tensors_in(out)]
        if shapes:
            plain = (repr(item) for item in (*args, *sorted(kwargs.items(), key=str)) if type(item) in _PLAIN)
            self.calls.append((getattr(function, "__name__", repr(function)), len(shapes), *plain))
            self.shapes.extend(shapes)
        return out


def trace_ops(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], interrupts: tuple[type[BaseException], ...] = ()
) -> OpTrace | None:
    """The operations of `function(*inputs)`, run without values; None where it needs values.

    inputs: on any device; only their layouts are used.
    interrupts: exceptions that mean "stop the run", and are never swallowed.
    """
    recorder = _Recorder()
    with torch.inference_mode(False), torch.no_grad():
        # Fresh tensors count their own changes, wherever this is called.
        given = [torch.empty_strided(i.shape, i.stride(), dtype=i.dtype, device="meta") for i in inputs]
        before = [tensor._version for tensor in given]
        try:
            with recorder:
                function(*given)
        except Exception as error:
            pass_on(error, interrupts)
            return None
        changed = tuple(index for index, tensor in enumerate(given) if tensor._version != before[index])
    return OpTrace(tuple(recorder.calls), tuple(recorder.shapes), changed)


class _Flow(TorchDispatchMode):
    """Writes down every operation with all of its arguments. Tensors are numbered: those that are known, then what
    operations make of them. Any other, such as a constant, has values that nobody sees, and equals nothing."""

    def __init__(self, known: Sequence[torch.Tensor]):
        super().__init__()
        self.steps: list[Any] = []
        self._met: dict[int, tuple[int, torch.Tensor]] = {}
        self.described(known, is_made=True)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = self.described((args, kwargs or {}))
        out = function(*args, **(kwargs or {}))
        self.steps.append((str(function), given, self.described(out, is_made=True)))
        return out

    def described(self, value: Any, is_made: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            if is_made:
                self._met.setdefault(id(value), (len(self._met), value))
            if id(value) in self._met:
                return self._met[id(value)][0]
            is_constant = type(value) is torch.Tensor and value.device.type == "cpu" and value.numel() <= _MOST_NUMBERS
            return (value.dtype, value.shape, repr(value.tolist())) if is_constant else object()
        if isinstance(value, (tuple, list)):
            return (type(value), *(self.described(item, is_made) for item in value))
        if isinstance(value, dict):
            return tuple((key, self.described(item, is_made)) for key, item in value.items())
        return (type(value), repr(value)) if type(value) in _KNOWN else object()


_KNOWN = (*_PLAIN, int, torch.layout, torch.memory_format, torch.device)
_MOST_NUMBERS = 4096
"""A constant of more is not compared."""


def flow_of(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    interrupts: tuple[type[BaseException], ...] = (),
) -> tuple | None:
    """All that `function(*inputs)` computes, step by step: equal where two functions do the same with tensors of these
    sizes. None where it needs their values. inputs, weights: without values; interrupts: as for `trace_ops`.
    """
    flow = _Flow((*inputs, *weights))
    with torch.inference_mode(False), torch.no_grad():
        try:
            with flow:
                out = function(*inputs)
        except Exception as error:
            pass_on(error, interrupts)
            return None
    return (*flow.steps, flow.described(out))


def scales_evenly(traces: Sequence[OpTrace | None]) -> bool:
    """Whether runs at sizes 1, 2 and 3 make the same calls, whose output sizes grow by equal steps.

    A size that stops growing (a slice of at most two rows) is not even.
    """
    one, two, three = traces
    if one is None or two is None or three is None or not one.calls == two.calls == three.calls:
        return False
    return all(
        len(a) == len(b) == len(c) and all(y - x == z - y for x, y, z in zip(a, b, c, strict=True))
        for a, b, c in zip(one.shapes, two.shapes, three.shapes, strict=True)
    )
