"""Calls of generated code without what torch puts around it.

Around the code that inductor generates, torch computes sizes, orders arguments and restores the output's form in each
call: 16 to 32 µs of Python a block. For tensors of known sizes all of that comes out the same in every call, so it is
watched once and then left out. The same goes for kernels of Triton's that torch launches itself: four functions of
Python for each, 6 to 7 µs, of which one is left.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..core import torch_internals
from ..signature.argument_guard import items_at
from .generated_code import LoadedCode

Run = Callable[[Sequence[torch.Tensor]], Any]


def run_watched(run: Run, tensors: Sequence[torch.Tensor], changed: Sequence[int] = ()) -> tuple[Any, Run | None]:
    """What `run` returns for the tensors, and what does the same for others of their sizes, strides and types with less
    Python; None where torch does more around its generated code than to choose and to order.

    run: of a graph that writes to the tensors at `changed` alone. It still serves calls that the profiler watches, and
    calls with gradients, which torch turns off in there.
    """
    code = getattr(torch_internals.GENERATED_CALL.get(None), "__code__", None)
    if code is None or sys.getprofile() is not None or torch_internals.ANY_AUTOCAST.get(lambda: True)():
        return run(tensors), None
    codes = code, LoadedCode.__call__.__code__
    calls: list[tuple[Callable, list[Any]]] = []
    results: list[Any] = []
    is_nvidia = torch.version.hip is None and any(tensor.is_cuda for tensor in tensors)
    is_launched = is_nvidia and torch_internals.find_missing(torch_internals.LAUNCHES) is None
    kernel = torch_internals.STATIC_KERNEL.get().__code__ if is_launched else None

    def watch(frame: Any, event: str, value: Any) -> None:
        if frame.f_code is kernel and event == "c_call" and value.__name__ == "_launch_kernel":
            with suppress(Exception):  # of a torch that keeps these differently
                _launch_directly(frame, value)
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
    generated, called_with = calls[0]
    arguments, output = _arguments(called_with, tensors), _output(out, results[0], tensors, changed)
    if arguments is None or output is None:
        return out, None
    profiler, is_grad_enabled = torch.autograd.profiler, torch.is_grad_enabled
    increment_version = torch.autograd.graph.increment_version

    def lean(tensors: Sequence[torch.Tensor]) -> Any:
        if profiler._is_profiler_enabled or is_grad_enabled():
            return run(tensors)
        if changed:  # Generated code writes by address, which autograd does not see.
            increment_version([tensors[at] for at in changed])
        return output(generated(list(arguments(tensors))), tensors)  # in a list, which generated code empties

    return out, lean


def _arguments(given: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Callable | None:
    """Gives generated code's arguments for such tensors, as a function; None where it got others, or what is no
    size."""
    places = {id(tensor): at for at, tensor in enumerate(tensors)}
    if len(places) < len(tensors):  # which of two that are the same is meant cannot be seen
        return None
    sizes = tuple(value for value in given if type(value) is int)
    at_size = iter(range(len(tensors), len(tensors) + len(sizes)))
    order: list[Any] = [next(at_size) if type(value) is int else places.get(id(value)) for value in given]
    if None in order:
        return None
    choose = items_at(order)
    return lambda tensors: choose((*tensors, *sizes))


def _output(out: Any, results: Any, tensors: Sequence[torch.Tensor], changed: Sequence[int]) -> Callable | None:
    """A function that gives the graph's output, of generated code's results and of the tensors that the graph writes
    to; None where it is neither one of these nor a tuple or list of them.

    None too where a result is no output, or is there twice: torch writes that to a tensor after the call.
    """
    made = [value for value in results or () if isinstance(value, torch.Tensor)]
    places = {id(value): at for at, value in enumerate(results or ())}
    parts = out if type(out) in (tuple, list) else (out,)
    if {id(value) for value in made} - {id(part) for part in parts} or len({*map(id, made)}) < len(made):
        return None
    places |= {id(tensors[at]): at - len(tensors) for at in changed if id(tensors[at]) not in places}
    if any(id(part) not in places for part in parts):
        return None
    order = [places[id(part)] for part in parts]
    take = items_at(order) if parts is out else operator.itemgetter(*order)
    choose = (lambda values: list(take(values))) if type(out) is list else take
    if min(order, default=0) >= 0:
        return lambda results, tensors: choose(results)
    if max(order) < 0:
        return lambda results, tensors: choose(tensors)
    return lambda results, tensors: choose((*results, *tensors))


_LAUNCHER = """# in which torch has the sizes of a grid as text; it loads this as it does its own code
def launcher(_profiler, _modes, _torchs, _launch, _function, _warps, _shared, _types):
    def run({names}, stream):
        if _profiler._is_profiler_enabled or _modes():
            return _torchs({names}, stream=stream)
        {prefix}
        _launch(_function, {grid.x_grid}, {grid.y_grid}, {grid.z_grid}, _warps, _shared, _types, ({values},), stream)
    return run
"""


class Launched:
    """Stands for torch's autotuner in generated code; torch saves that itself with other graphs, as it is."""

    def __init__(self, autotuner: Any, run: Callable):
        self.autotuner, self.run = autotuner, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.autotuner, name)


def _launch_directly(frame: Any, launch: Callable) -> None:
    """Have generated code launch a kernel by one function, where torch has settled on how and that passes on the same.

    frame: of `STATIC_KERNEL`, as it calls `launch`. Where a profiler or a dispatch mode sees kernels, torch's own
    function still runs. Any exception means that nothing has changed.
    """
    launcher, of_autotuner, kernel = frame.f_back, frame.f_back.f_back, frame.f_locals["self"]
    autotuner, torchs = of_autotuner.f_locals["self"], torch_internals.AUTOTUNED.get()
    (settled,) = autotuner.launchers  # it times several
    is_settled = of_autotuner.f_code is torchs.__code__ and launcher.f_code is settled.__code__
    does_more = type(autotuner).run is not torchs or autotuner.dump_launch_params or autotuner.dump_launch_tensors
    if does_more or not is_settled:
        return
    variables, passed = frame.f_locals, []
    names = settled.__code__.co_varnames[: settled.__code__.co_argcount - 1]  # then comes the stream
    values = [name for at, name in enumerate(kernel.arg_names) if at not in kernel.full_constexprs]
    values += ["None"] * (len(variables["args"]) - len(values))  # memory that torch launches no kernel statically with
    grid = torch_internals.GRID.get()(autotuner.inductor_meta, settled.config)
    parts = {"names": ", ".join(names), "values": ", ".join(values), "prefix": "\n        ".join(grid.prefix)}
    launched = torch_internals.LOADED_CODE.get()(_LAUNCHER.format(grid=grid, **parts)).launcher
    constants = kernel.num_warps, kernel.shared, variables["arg_tys"]
    seen_by = torch.autograd.profiler, torch_internals.DISPATCH_MODES.get()
    tried = launched(*seen_by, None, lambda *arguments: passed.append(arguments), kernel.function, *constants)
    tried(*[launcher.f_locals[name] for name in names], stream=variables["stream"])
    function = variables.get("function", kernel.function)  # newer torch may have one for each device
    sizes = variables["grid_x"], variables["grid_y"], variables["grid_z"]
    if passed == [(function, *sizes, *constants, variables["args"], variables["stream"])]:
        run = launched(*seen_by, torchs.__get__(autotuner), launch, function, *constants)
        generated = of_autotuner.f_back.f_globals
        for name in [name for name, value in generated.items() if value is autotuner]:
            generated[name] = Launched(autotuner, run)
