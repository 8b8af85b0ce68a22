"""Whether two ways of making one call gave the same output but for rounding: graph and block, replay and call.

A block of a transformer returns what it was given and something it adds. A few channels of that stream are 10 to 1000
times larger than the rest, so that whatever is compared with the largest value passes: a block that adds nothing too.
Judged is therefore what is added: the output less the input of its shape and type that is nearest, or the output itself
where no input is nearer than zeros.

A difference d may have come of rounding if d² is about

    (tolerance · added)² + (step · output)²

where a step is the spacing of the coarsest numbers that the call computes with, and either square is of the value
itself plus the mean of its channel. The ratio of the two is averaged over everything and over each slice along each
dimension (a token, a channel, a row, a sample), and is looked at for each value.

The limits are measured, over the blocks of forty models in half precision, with two channels of 1 to 1000, against the
same blocks in float32 with rounded outputs, which are farther than other orders of sums are. At most 0.29 of what is
allowed comes over everything, 0.13 in a slice and 0.03 in a value, whatever the channels; 0.6, 0.5 and 0.2 where those
of 1000 enter an attention without a norm. The wrong blocks of the tests begin at 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

STEPS, LEAST = 4.0, 2**-7
"""What a block adds may be off by so many steps, and by this part of it however short they are: TF32, Winograd's
convolutions and approximate functions are within, while wrong blocks are off by a twentieth and more."""

STORED = 3.0
"""What a block adds may be off by so much where the call quantises what it computes, in units of √(step · step of the
quantised): a value that one way rounds up the other rounds down, seldom and by much. At most 1.2 was measured, where
both are of four bits."""

IN_SLICE, IN_VALUE = 5.0, 3.0
"""How much farther off a slice may be than everything, and a value than what its channel adds."""

_PIECES, _SMALLEST_PIECE = 32, 1 << 16
"""A tensor is compared in so many pieces, so that float copies take a part of its memory; small ones in fewer."""


def beyond_rounding(
    out: Any,
    expected: Any,
    inputs: Sequence[torch.Tensor] = (),
    types: Iterable[torch.dtype] = (),
    depth: int = 1,
) -> float | None:
    """How many times as much as rounding explains two outputs (tensors, or nested tuples of them) differ.

    None where rounding explains it. Infinite where one is no number and the expected one is; where that is none either,
    the model itself overflows, which says nothing.
    inputs: of the call, as they were before it. types: of whatever tensors it takes, weights included. depth: how many
        blocks run one after the other, whose differences add up.
    """
    if isinstance(expected, (tuple, list)):
        known = tuple(types)
        found = [beyond_rounding(one, other, inputs, known, depth) for one, other in zip(out, expected, strict=True)]
        return max((value for value in found if value is not None), default=None)
    if not isinstance(expected, torch.Tensor):
        return None
    if out.shape != expected.shape or out.dtype != expected.dtype:
        return math.inf
    if not expected.is_floating_point() or not expected.numel():
        return None
    alike = [tensor for tensor in inputs if _spec(tensor) == _spec(expected)] if expected.ndim else []
    limits = _steps((expected.dtype, *types))
    step, tolerance = (limit * math.sqrt(depth) for limit in limits)
    value = _worst(torch.atleast_1d(out), torch.atleast_1d(expected), alike, step, tolerance)
    return None if value <= 1 else (math.inf if math.isnan(value) else value)


def _spec(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device


def _steps(dtypes: Iterable[torch.dtype]) -> tuple[float, float]:
    """The step of the numbers that a call with tensors of these types computes with, and the tolerance of what it adds,
    both relative."""
    dtypes = set(dtypes)
    computed = {dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1}
    stored = {dtype for dtype in dtypes if dtype.itemsize == 1 and dtype is not torch.bool}
    step = max(torch.finfo(dtype).eps for dtype in computed)
    if torch.float16 in computed and getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False):
        step = max(step, torch.finfo(torch.bfloat16).eps)  # of hundreds of sums each is rounded
    tolerance = max(STEPS * step, LEAST)
    if stored:
        is_packed = any(not dtype.is_floating_point for dtype in stored)  # in four bits, maybe
        of_stored = 1.0 if is_packed else torch.finfo(torch.float8_e4m3fn).eps
        tolerance = max(tolerance, STORED * math.sqrt(step * of_stored))
    return step, tolerance


def _worst(
    out: torch.Tensor, expected: torch.Tensor, alike: Sequence[torch.Tensor], step: float, tolerance: float
) -> float:
    """The largest ratio of a difference to what is allowed; above 1 is too large, and so is NaN."""
    base, typical = _typical(expected, alike, step, tolerance)
    largest: list[torch.Tensor] = []
    sums: list[list[torch.Tensor]] = [[] for _ in expected.shape]
    for made, right, given, usual in _pieces(out, expected, base, typical.expand_as(expected)):
        allowed = (tolerance * (right - given)).square_().add_((step * right).square_()).add_(usual)
        ratio = (made - right).square_().div_(allowed.clamp_min_(torch.finfo(allowed.dtype).tiny))
        ratio = torch.where(right.isfinite(), ratio, 0)
        largest.append(ratio.amax())
        for dimension, parts in enumerate(sums):
            parts.append(_sum_along(ratio, dimension))
    slices = [_joined(parts, dimension, expected) for dimension, parts in enumerate(sums)]
    ratios = [
        slices[0].mean().sqrt(),
        torch.cat(slices).amax().sqrt() / IN_SLICE,
        torch.stack(largest).amax().sqrt() * (tolerance / IN_VALUE),
    ]
    return torch.stack(ratios).amax().item()


def _typical(
    expected: torch.Tensor, alike: Sequence[torch.Tensor], step: float, tolerance: float
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Which of the tensors the output adds to, None for none of them; and what rounding makes of it in each channel,
    squared, of a shape to be broadcast.

    Channels are the last dimension, or of pictures whichever of the two usual ones the values differ along. One that
    adds little is taken for an ordinary one: its sums round as theirs do.
    """
    dimensions = (1, expected.ndim - 1) if expected.ndim > 3 else (expected.ndim - 1,)
    sums: list[list[list[torch.Tensor]]] = [[[] for _ in range(1 + len(alike))] for _ in dimensions]
    for right, *given in _pieces(expected, *alike):
        known = right.isfinite()
        for number, base in enumerate((0, *given)):
            square = torch.where(known, right - base, 0).square_()
            for dimension, parts in zip(dimensions, sums, strict=True):
                parts[number].append(_sum_along(square, dimension))
    means = [
        torch.stack([_joined(parts, dimension, expected) for parts in of_each])
        for dimension, of_each in zip(dimensions, sums, strict=True)
    ]
    differ = torch.stack([mean[0].amax() / mean[0].mean() for mean in means])
    *far, spread, other = torch.cat([means[0].mean(1), differ[:1], differ[-1:]]).tolist()
    nearest = min(range(len(far)), key=lambda number: math.inf if math.isnan(far[number]) else far[number])
    which = int(len(means) > 1 and other > spread)
    adds = means[which][nearest]
    usual = tolerance**2 * torch.maximum(adds, adds.median()) + step**2 * means[which][0]
    shape = [1] * expected.ndim
    shape[dimensions[which]] = -1
    return (None, *alike)[nearest], usual.view(shape)


def _longest(tensor: torch.Tensor) -> int:
    return max(range(tensor.ndim), key=tensor.shape.__getitem__)


def _pieces(*tensors: torch.Tensor | None) -> Iterator[list[torch.Tensor | int]]:
    """Tensors of one shape piece by piece, in float; 0 for None."""
    first = tensors[0]
    wide, dimension = torch.promote_types(first.dtype, torch.float32), _longest(first)
    count = min(_PIECES, first.shape[dimension], max(1, first.numel() // _SMALLEST_PIECE))
    chunks = [[0] * count if tensor is None else tensor.tensor_split(count, dimension) for tensor in tensors]
    for parts in zip(*chunks, strict=True):
        yield [part if isinstance(part, int) else part.to(wide) for part in parts]


def _sum_along(values: torch.Tensor, dimension: int) -> torch.Tensor:
    """The sum of each slice along a dimension."""
    others = [other for other in range(values.ndim) if other != dimension]
    return values.sum(others) if others else values


def _joined(parts: Sequence[torch.Tensor], dimension: int, whole: torch.Tensor) -> torch.Tensor:
    """The mean of each slice along a dimension, from the sums of its pieces."""
    sums = torch.cat(list(parts)) if dimension == _longest(whole) else torch.stack(list(parts)).sum(0)
    return sums * (whole.shape[dimension] / whole.numel())
