"""Calls of generated code without what torch puts around it."""

import sys

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile.generated_code import LoadedCode
from comfy_accel.accel.compile.lean_calls import run_watched
from comfy_accel.accel.core import toolchain
from kit.blocks import Block, raising, runner

pytestmark = pytest.mark.skipif(toolchain.find_missing("cpu") is not None, reason="nothing is compiled here")


def two(x, weight):
    return [torch.nn.functional.gelu(x @ weight), x.shape[0] + x.sum(1)]


def one(weight, unused, x):
    return torch.nn.functional.gelu(x @ weight) * x.shape[1]


def given_back(x, weight):
    return x, x @ weight


def viewed(x, weight):
    return x[1:], x @ weight


def added_to(x, weight):
    x += x @ weight
    return x


def added_to_one(x, weight):
    x.add_(x @ weight)
    return [torch.tanh(x), x]


def written_and_not_handed_back(x, weight):
    x.mul_(2)
    return x @ weight


@pytest.fixture(scope="module")
def compiled():
    """Functions of a list of tensors, compiled for any size; how often each was called."""
    made, calls = {}, []

    def of(function):
        if function not in made:
            graph = torch.compile(function, dynamic=True, fullgraph=True)

            def run(tensors):
                calls.append(function)
                return graph(*tensors)

            made[function] = run
        calls.clear()
        return made[function], calls

    return of


def tensors(function, rows=3):
    x, weight = torch.randn(rows, 4), torch.randn(4, 4)
    return {one: (weight, torch.randn(7), x)}.get(function, (x, weight))


def equal(out, expected):
    assert type(out) is type(expected)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@torch.inference_mode()
@pytest.mark.parametrize("function", [one, two])
@pytest.mark.parametrize("rows", [3, 8])
def test_later_calls_give_the_same_without_torch_around_them(compiled, function, rows):
    run, calls = compiled(function)
    first = tensors(function, rows)
    out, lean = run_watched(run, first)
    equal(out, run(first))
    for _ in range(3):
        given = tensors(function, rows)
        expected = run(given)
        calls.clear()
        equal(lean(given), expected)
        assert not calls


@torch.inference_mode()
@pytest.mark.parametrize("function", [given_back, viewed])
def test_output_that_torch_makes_of_the_results_is_left_to_it(compiled, function):
    run, _ = compiled(function)
    out, lean = run_watched(run, tensors(function))
    assert lean is None and len(out) == 2


@pytest.mark.parametrize("function", [added_to, added_to_one, written_and_not_handed_back])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("made_in", [torch.inference_mode, torch.no_grad])
def test_calls_that_write_to_a_tensor_write_and_count_it_as_torch_does(compiled, function, mode, made_in):
    run, calls = compiled(function)
    with mode():
        with torch.inference_mode(made_in is torch.inference_mode):
            first, second = tensors(function), tensors(function, rows=8)
        run([tensor.clone() for tensor in second])  # torch watches the first call
        for given in (first, second):
            with torch.inference_mode(made_in is torch.inference_mode):
                watching = [given[0].clone(), given[1]]
            _, lean = run_watched(run, watching, [0])
            for _ in range(2):
                with torch.inference_mode(made_in is torch.inference_mode):
                    ones, others = ([given[0].clone(), given[1]] for _ in range(2))
                counted = [0 if one.is_inference() else one._version for one in (ones[0], others[0])]
                expected = run(ones)
                calls.clear()
                out = lean(others)
                assert not calls
                equal(out, expected)
                equal(others, ones)
                for one, other in ((out, others[0]), (expected, ones[0])):
                    last = one[-1] if type(one) is list else one
                    assert (last is other) == (function is not written_and_not_handed_back)
                if not ones[0].is_inference():
                    assert others[0]._version - counted[1] == ones[0]._version - counted[0]


@torch.inference_mode()
def test_what_torch_writes_after_the_call_is_left_to_it():
    code = LoadedCode(None)
    code.current_callable = lambda inputs: [inputs[0] + 1, inputs[0] * 2]

    def run(given):
        changed, out = code(list(given))
        given[0].copy_(changed)
        return out

    x = torch.ones(2)
    out, lean = run_watched(run, (x,), [0])
    assert lean is None and x.tolist() == [2.0, 2.0] and out.tolist() == [2.0, 2.0]


@torch.inference_mode()
def test_code_that_was_loaded_is_called_so_too():
    code = LoadedCode(None)
    code.current_callable = lambda inputs: [inputs[0] + 1]
    calls = []

    def run(given):
        calls.append(given)
        return code(list(given))[0]

    out, lean = run_watched(run, (torch.ones(2),))
    assert lean((out,)).tolist() == [3.0, 3.0] and len(calls) == 1


def test_call_with_gradients_or_a_profiler_goes_through_torch(compiled):
    run, calls = compiled(one)
    with torch.no_grad():
        _, lean = run_watched(run, tensors(one))
        lean(tensors(one))
        assert len(calls) == 1
        with torch.profiler.profile():
            lean(tensors(one))
        assert len(calls) == 2
    assert not lean(tensors(one)).requires_grad and len(calls) == 3


@torch.no_grad()
def test_nothing_is_watched_under_autocast_or_another_profiler(compiled):
    run, _ = compiled(one)

    def mine(*event):
        pass

    sys.setprofile(mine)
    try:
        assert run_watched(run, tensors(one))[1] is None and sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    with torch.autocast("cpu", torch.bfloat16):
        assert run_watched(run, tensors(one))[1] is None


@torch.no_grad()
def test_call_that_fails_fails_as_it_would_and_leaves_no_profiler(compiled):
    with pytest.raises(ValueError, match="as it would"):
        run_watched(raising(ValueError("as it would")), tensors(one))
    assert sys.getprofile() is None


def test_block_in_a_run_leaves_out_what_torch_puts_around_from_its_third_call_on():
    block, cache, calls = Block().eval(), GraphCache(), []
    stand_in = runner(block, cache, backend="inductor")

    def call():
        block.first.weight.data = torch.randn(4, 4)  # is what the graph takes
        x = torch.randn(2, 4)
        torch.testing.assert_close(stand_in(block.forward, x), block(x))

    with torch.inference_mode():
        call()
        (graph,) = cache.entries()[0].graphs
        run = graph.run
        graph.run = lambda tensors: calls.append(1) or run(tensors)
        for _ in range(5):
            call()
    assert len(calls) == 2
