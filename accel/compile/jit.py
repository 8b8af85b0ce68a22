"""Compiling just in time: by calling the function once and taking what torch compiled for that call."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..signature.tensors import PLAIN_TENSORS
from . import generated_code
from .ahead_of_time import keep_size_guards, own_noise
from .backend import Artifact


def compile_by_running(
    function: types.FunctionType, tensors: Sequence[torch.Tensor], backend: str | Callable
) -> Artifact:
    """An artifact like one made ahead of time, but not to be saved.

    The compiled code is taken out of torch's cache and called by itself, so that no later call compiles again.
    """
    options = {"guard_filter_fn": keep_size_guards}
    with generated_code.collected() as modules, own_noise():
        # The function runs, and might write to the weights.
        torch.compile(function, fullgraph=True, backend=backend, options=options)(*map(_stand_in, tensors))
    (made,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
    call = types.FunctionType(made.code, function.__globals__, "block", None, function.__closure__)
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    scope = dict(zip(function.__code__.co_freevars, cells, strict=True))
    check = made.guard_manager.check

    def guards(tensors: Sequence[torch.Tensor]) -> bool:
        return check({**scope, "tensors": tuple(tensors)})

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        return call(*tensors)

    release = functools.partial(generated_code.release, function.__globals__, modules)
    return Artifact(run, guards, generated_code.bytes_of(modules), release=release)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """An unfilled tensor of the same layout and marks; the tensor itself where it is of a class of its own."""
    if type(tensor) not in PLAIN_TENSORS:
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    for dimension in getattr(tensor, "_dynamo_weak_dynamic_indices", ()):
        torch._dynamo.maybe_mark_dynamic(made, dimension)
    return made
