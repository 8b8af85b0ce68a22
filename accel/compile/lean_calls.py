"""Calls of generated code without what torch puts around it.

Around the code that inductor generates, torch computes sizes, orders arguments and restores the output's form in each
call: 16 to 32 µs of Python a block. For tensors of known sizes all of that comes out the same in every call, so it is
watched once and then left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..core.torch_internals import ANY_AUTOCAST, GENERATED_CALL
from ..signature.argument_guard import items_at
from .generated_code import LoadedCode

Run = Callable[[Sequence[torch.Tensor]], Any]


def watched(run: Run, tensors: Sequence[torch.Tensor]) -> tuple[Any, Run | None]:
    """What `run` returns for the tensors, and what does the same for others of their sizes, strides and types with less
    Python; None where torch does more around its generated code than to choose and to order.

    run: of a graph that writes to none of the tensors. It still serves calls that the profiler watches, and calls with
    gradients, which torch turns off in there.
    """
    code = getattr(GENERATED_CALL.get(None), "__code__", None)
    if code is None or sys.getprofile() is not None or ANY_AUTOCAST.get(lambda: True)():
        return run(tensors), None
    codes = code, LoadedCode.__call__.__code__
    calls: list[tuple[Callable, list[Any]]] = []
    results: list[Any] = []

    def watch(frame: Any, event: str, value: Any) -> None:
        if frame.f_code not in codes:
            return
        if event == "return":
            results.append(value)
        elif event == "call":
            with suppress(Exception):  # of a torch that has other names for these; it would end the call
                calls.append((frame.f_locals["self"].current_callable, list(frame.f_locals["inputs"])))

    sys.setprofile(watch)  # of this thread, for one call
    try:
        out = run(tensors)
    finally:
        sys.setprofile(None)
    if len(calls) != 1 or len(results) != 1:
        return out, None
    generated, given = calls[0]
    arguments, output = _arguments(given, tensors), _output(out, results[0])
    return out, None if None in (arguments, output) else _lean(run, generated, arguments, output)


def _lean(run: Run, generated: Callable, arguments: Callable, output: Callable) -> Run:
    profiler, is_grad_enabled = torch.autograd.profiler, torch.is_grad_enabled

    def lean(tensors: Sequence[torch.Tensor]) -> Any:
        if profiler._is_profiler_enabled or is_grad_enabled():
            return run(tensors)
        return output(generated(list(arguments(tensors))))  # in a list, which generated code empties

    return lean


def _arguments(given: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Callable | None:
    """What finds generated code's arguments in such tensors; None where it was given others, or what is no size."""
    places = {id(tensor): at for at, tensor in enumerate(tensors)}
    if len(places) < len(tensors):  # which of two that are the same is meant cannot be seen
        return None
    sizes = tuple(value for value in given if type(value) is int)
    at_size = iter(range(len(tensors), len(tensors) + len(sizes)))
    order = [next(at_size) if type(value) is int else places.get(id(value)) for value in given]
    if None in order:
        return None
    choose = items_at(order)
    return lambda tensors: choose((*tensors, *sizes))


def _output(out: Any, results: Any) -> Callable | None:
    """What finds the graph's output in generated code's results; None where it is no tensor of these, or tuple or list
    of them."""
    places = {id(value): at for at, value in enumerate(results or ()) if isinstance(value, torch.Tensor)}
    parts = out if type(out) in (tuple, list) else (out,)
    order = [places.get(id(part)) for part in parts]
    if None in order:
        return None
    if parts is not out:
        (at,) = order
        return lambda results: results[at]
    choose = items_at(order)
    return choose if type(out) is tuple else lambda results: list(choose(results))
