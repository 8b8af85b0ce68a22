"""Casts that Triton lacks on older cards become an operator of torch; see also tests/fakecuda/test_fp8.py."""

import pytest
import torch
from comfy_accel.accel.core.errors import one_line
from comfy_accel.accel.kernels import casts


@pytest.mark.parametrize(
    ("given", "wanted", "is_left"),
    [
        (torch.float8_e4m3fn, torch.float16, True),
        (torch.bfloat16, torch.float8_e4m3fn, True),
        (torch.float8_e5m2, torch.float16, False),
        (torch.float16, torch.float32, False),
    ],
)
def test_casts_from_and_to_e4m3_are_left_to_torch_and_give_the_same(given, wanted, is_left):
    casts.define()
    x = torch.randn(6, 4).to(given)
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = x
    graph.output(graph.call_function(torch.ops.prims.convert_element_type.default, (node, wanted)))
    casts.leave_casts(graph)
    assert any(node.target is torch.ops.accel.cast_by_torch.default for node in graph.nodes) == is_left
    out = torch.fx.GraphModule({}, graph)(x)
    assert out.dtype == wanted and torch.equal(out.float(), x.to(wanted).float())


def test_what_triton_says_is_in_its_last_line():
    errors = pytest.importorskip("triton.compiler.errors", reason="torch has no Triton on this system")
    error = errors.CompilationError("x = 1\n", type("Node", (), {"lineno": 1, "col_offset": 0})(), "no fp8e4nv here")
    assert one_line(error) == "CompilationError: no fp8e4nv here"
