"""Generated code that checks weights together: asserts once, and still refuses what they refuse."""

import pytest
import torch
from comfy_accel.accel.compile.inductor import Inductor
from comfy_accel.accel.kernels import input_checks
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.wrapper import PythonWrapperCodegen


def chain(*tensors):
    *weights, x = tensors
    for weight in weights:
        x = x @ weight
    return x


def test_weights_are_asserted_once_and_those_of_another_layout_refused():
    weights, x = [torch.randn(8, 8) for _ in range(5)], torch.randn(3, 8)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    before = set(map(id, PyCodeCache.modules))
    artifact = Inductor("inductor").compile(chain, [*weights, x])
    (module,) = (made for made in PyCodeCache.modules if id(made) not in before and hasattr(made, "known_inputs"))
    asserted, assert_size_stride = [], module.assert_size_stride

    def noting(tensor, *layout):
        asserted.append(tensor)
        assert_size_stride(tensor, *layout)

    module.assert_size_stride = noting

    def of(weights, rows):
        asserted.clear()
        x = torch.randn(rows, 8)
        torch.testing.assert_close(artifact.run([*weights, x]), chain(*weights, x))
        return len(asserted)

    assert of(weights, 3) == 6
    assert of(weights, 4) == 1
    others = [torch.randn(8, 8) for _ in range(5)]
    assert of(others, 5) == 1
    for odd in (torch.randn(8, 8).t(), torch.randn(8, 9)[:, :8], torch.randn(4, 8)):
        with pytest.raises(AssertionError):
            artifact.run([*others[:2], odd, *others[3:], x])
        others[2].data, kept = odd, others[2].data
        with pytest.raises(AssertionError):
            artifact.run([*others, x])
        others[2].data = kept
    assert of(others, 2) == 1


@pytest.mark.parametrize("lost", ["the method", "the guard"])
def test_of_a_torch_that_has_not_what_it_takes_nothing_changes(lost, monkeypatch):
    if lost == "the method":
        monkeypatch.delattr(PythonWrapperCodegen, "codegen_input_size_asserts")
    else:
        monkeypatch.setattr(input_checks, "has_native_guard", lambda: False)
    before = dict(vars(PythonWrapperCodegen))
    with input_checks.checked_together():
        assert dict(vars(PythonWrapperCodegen)) == before
