"""What `bench kernels` counts of a whole model that is compiled as core compiles it."""

import pytest
import torch

from dev import Problem
from dev.bench import kernels


def counted(call, *sizes):
    """What a call with the last number of tokens launches, and whether the same graph then serves another number."""

    def with_tokens(tokens):
        call(torch.empty(2, tokens, 64).half().cuda())

    with torch.inference_mode(), kernels._fresh_kernels():
        launches, _ = kernels.last_size(with_tokens, sizes)
        with torch.compiler.set_stance("fail_on_recompile"):
            try:
                with_tokens(72)
            except RuntimeError:
                return launches, False
    return launches, True


def toy():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.SiLU()).half().cuda().requires_grad_(False)


def test_graph_of_the_second_size_is_counted_which_serves_any():
    launches, serves_any = counted(torch.compile(toy()), 24, 48)
    (kernel,) = launches.kernels
    assert kernel.instructions > 0 and launches.externs.total() == 1
    assert serves_any


def test_graph_of_a_first_size_serves_no_other():
    launches, serves_any = counted(torch.compile(toy()), 48)
    assert launches.kernels and not serves_any


def test_model_that_runs_uncompiled_is_no_row_of_zeros():
    with pytest.raises(Problem):
        counted(toy(), 24, 48)
