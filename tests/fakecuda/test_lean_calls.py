"""Kernels of Triton's that one function launches, in place of four of torch's."""

import functools
import sys
from types import SimpleNamespace

import pytest
import torch
from comfy_accel.accel.compile import lean_calls
from comfy_accel.accel.core.torch_internals import AUTOTUNED, STATIC_KERNEL, Internal
from kit import made_up_device as device
from kit.block_graphs import compiled, kind_of, on_card, saved_and_loaded, zeros
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inside = nn.GroupNorm(32, 64), nn.Conv2d(64, 64, 1)

    def forward(self, x):
        return nn.functional.gelu(self.inside(nn.functional.silu(self.norm(x)))) + x


@pytest.fixture(params=["compiled", "loaded"])
def made(request):
    """A graph with kernels of ours and inductor's, its weights, and the autotuners that it calls, by code and name."""
    block, kernels = on_card(Block(), torch.half), {}
    kind, given = kind_of(block), zeros((2, 64, 24, 40))

    def watch(frame, event, value):
        if event == "call" and frame.f_code is AUTOTUNED.get().__code__:
            scope, kernel = frame.f_back.f_globals, frame.f_locals["self"]
            kernels.update({name: (scope, kernel) for name, value in scope.items() if value is kernel})

    with torch.inference_mode():
        graph, weights = compiled(block, given, kind, backend="inductor")
        if request.param == "loaded":
            graph = saved_and_loaded(graph, block, given, kind)
        tensors = [*weights.take(), *given]
        graph.run(tensors)  # torch watches operators of ours in the first call, in a dispatch mode
        sys.setprofile(watch)
        graph.run(tensors)
        sys.setprofile(None)
    assert len(kernels) >= 3
    return SimpleNamespace(graph=graph, weights=weights.take(), kernels=kernels)


@torch.inference_mode()
def lean(made, *shape):
    out, run = lean_calls.run_watched(made.graph.run, tensors(made, *shape))
    assert out.shape == shape and run is not None
    return run


def tensors(made, *shape):
    return [*made.weights, *zeros(shape)]


def direct(made):
    """What stands for the autotuners in the generated code, one for each or none."""
    found = [scope[name] for name, (scope, kernel) in made.kernels.items() if scope[name] is not kernel]
    assert len(found) in (0, len(made.kernels)) and {type(value) for value in found} <= {lean_calls.Launched}
    return found


def entered(call):
    """How often torch's two functions for a kernel run in a call, and the launches of all kernels in it."""
    codes, counts, before = (
        [name.get().__code__ for name in (AUTOTUNED, STATIC_KERNEL)],
        [0, 0],
        device.counts().launches,
    )

    def watch(frame, event, value):
        if event == "call" and frame.f_code in codes:
            counts[codes.index(frame.f_code)] += 1

    sys.setprofile(watch)
    try:
        with torch.inference_mode():
            call()
    finally:
        sys.setprofile(None)
    return counts, device.counts().launches - before


def test_later_calls_launch_the_same_kernels_without_torchs_functions(made):
    given = tensors(made, 2, 64, 24, 40)
    (autotuned, static), launches = entered(lambda: made.graph.run(given))
    assert autotuned == static >= 3
    run = lean(made, 2, 64, 24, 40)
    assert direct(made)
    assert entered(lambda: run(given)) == ([0, 0], launches)
    assert entered(lambda: made.graph.run(given)) == ([0, 0], launches)


class Other(Block):
    def forward(self, x):
        return super().forward(x)[:, 1:]


@pytest.mark.parametrize("made", ["compiled"], indirect=True)
def test_graph_with_some_of_the_same_kernels_is_compiled_and_saved(made):
    lean(made, 2, 64, 24, 40)
    assert direct(made)
    block, given = on_card(Other(), torch.half), zeros((2, 64, 24, 40))
    with torch.inference_mode():
        graph, weights = compiled(block, given, backend="inductor")
        saved_and_loaded(graph, block, given)
        assert graph.run([*weights.take(), *given]).shape == (2, 63, 24, 40)


def passed(made, *shape):
    """What is passed for each launch of a call: by the one function, and by torch's."""
    seen, runs = [], {kernel: kernel.run for kernel in direct(made)}

    def both(kernel, run, *arguments, stream):
        (launcher,), own, torchs = kernel.launchers, [], []
        static = launcher.__globals__["runner"].__self__
        cell = run.__closure__[run.__code__.co_freevars.index("_launch")]
        launch, cell.cell_contents = cell.cell_contents, lambda *given: own.append(given)
        run(*arguments, stream=stream)
        cell.cell_contents = launch
        vars(static)["C_impl"] = SimpleNamespace(_launch_kernel=lambda *given: torchs.append(given))
        AUTOTUNED.get()(kernel.autotuner, *arguments, stream=stream)
        del vars(static)["C_impl"]
        seen.append((*own, *torchs))

    for kernel, run in runs.items():
        kernel.run = functools.partial(both, kernel, run)
    with torch.inference_mode():
        made.graph.run(tensors(made, *shape))
    for kernel, run in runs.items():
        kernel.run = run
    return seen


def test_each_launch_is_given_what_torch_would_give_it_at_any_size_and_on_any_stream(made):
    lean(made, 2, 64, 24, 40)
    stream, grids = torch.cuda.Stream(), set()
    for shape in ((2, 64, 24, 40), (1, 64, 7, 5), (3, 64, 90, 64)):
        for where in (torch.cuda.current_stream(), stream):
            with torch.cuda.stream(where):
                launches = passed(made, *shape)
            assert len(launches) >= 3
            assert all(own == torchs and own[-1] == where.cuda_stream for own, torchs in launches)
            grids.add(tuple(own[1:4] for own, _ in launches))
    assert len(grids) == 3


def test_profilers_and_modes_see_kernels_as_torch_launches_them(made):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **kwargs or {})

    lean(made, 2, 64, 24, 40)
    given = tensors(made, 2, 64, 24, 40)
    counts, launches = entered(lambda: made.graph.run(given))
    assert counts == [0, 0]
    for context in (torch.profiler.profile(), Mode()):
        with context:
            (autotuned, static), launched = entered(lambda: made.graph.run(given))
        assert autotuned == static >= 3 and launched >= launches, context
    assert direct(made)


@pytest.mark.parametrize("left", ["a name", "dumps", "AMD"])
def test_kernels_are_left_to_torch_where_it_does_more(made, left, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "dumped")])  # torch writes beside it
    if left == "a name":
        monkeypatch.setattr(lean_calls.torch_internals, "LAUNCHES", (Internal("torch", "nothing", "slower"),))
    elif left == "AMD":
        monkeypatch.setattr(torch.version, "hip", "7")
    for _, kernel in made.kernels.values() if left == "dumps" else ():
        monkeypatch.setattr(kernel, "dump_launch_params", True)
    lean(made, 2, 64, 24, 40)
    assert not direct(made)


def test_kernel_is_left_to_torch_while_that_times_its_ways(made, monkeypatch):
    name, (scope, kernel) = next(iter(made.kernels.items()))
    settle, seen = type(kernel).autotune_to_one_config, []

    def settled(self, *args, **kwargs):
        settle(self, *args, **kwargs)
        seen.append(scope[name] is not kernel)

    monkeypatch.setattr(type(kernel), "autotune_to_one_config", settled)
    kernel.launchers = [*kernel.launchers, kernel.compile_results[0].make_launcher()]
    lean(made, 2, 64, 24, 40)
    assert seen == [False] and len(kernel.launchers) == 1 and direct(made)
