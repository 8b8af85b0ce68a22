"""Casts of numbers of 8 bits that Triton has for newer cards alone: on older ones they stay torch's own operators.

Below capability 8.9 (RTX 20 and 30, A100) Triton can neither read nor write float8_e4m3fn, as fp8 weights mostly are.
Torch's own cast can, so only that is not fused with what surrounds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx import Graph

from ..core import torch_internals
from . import operators

_FIRST_CAPABILITY = (8, 9)
_TYPE = torch.float8_e4m3fn


@contextmanager
def unknown_casts_left(device: torch.device) -> Iterator[None]:
    """A context in which inductor leaves casts to torch that Triton does not have for this device. Where a pass of
    somebody else's has that place, nothing changes."""
    is_nvidia = device.type == "cuda" and not torch.version.hip
    lacks_type = is_nvidia and torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY
    if not lacks_type or torch_internals.GRAPH_PASS.get(None) is None:
        yield
        return
    from torch._inductor import config

    if config.post_grad_custom_pre_pass is not None:
        yield
        return
    define()
    with config.patch(post_grad_custom_pre_pass=_graph_pass()):
        yield


def leave_casts(graph: Graph) -> None:
    """Replace casts from and to this type by the operator."""
    for node in list(graph.nodes):
        if node.target is not torch.ops.prims.convert_element_type.default:
            continue
        if _TYPE in (node.args[1], node.args[0].meta["val"].dtype):
            node.target = torch.ops.accel.cast_by_torch.default


def define() -> None:
    """Register the operator."""
    operators.define("cast_by_torch", "(Tensor x, ScalarType dtype) -> Tensor", _cast, _cast)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, copy=True)


def _graph_pass() -> object:
    class LeaveCasts(torch_internals.GRAPH_PASS.get()):  # type: ignore[misc]  # found at run time
        def __call__(self, graph: Graph) -> None:
            leave_casts(graph)

        def uuid(self) -> str:
            return "accel casts 1"

    return LeaveCasts()
