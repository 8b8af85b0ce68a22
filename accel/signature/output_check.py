"""Whether two ways of making one call gave the same output but for rounding: graph and block, replay and call.

A block of a transformer returns what it was given and something it adds. A few channels of that stream are 10 to 1000
times larger than the rest, so that whatever is compared with the largest value passes: a block that adds nothing too.
Judged is therefore what is added: the output less the input of its shape and type that is nearest, or the output itself
where no input is nearer than zeros.

A difference d may have come of rounding if d² is about

    allowed² = tolerance² · (added² + its mean in the channel) + (step · output)²

where a step is the spacing of the coarsest numbers that the call computes with. The step is of the value itself and not
of its channel: where a block adds little, its faults show in the values near zero, whose steps are short. The ratio of
the two is averaged over everything and over each slice along each dimension (a token, a channel, a row, a sample), and
is looked at for each value.

A part that is missing everywhere may be smaller than rounding and is yet unlike it: it goes with what is added, as
rounding hardly does. Over n values, which are everything or a slice, a right graph has

    |Σ d · added / allowed²|  ≤  tolerance · Σ (added / allowed)² + √Σ (added / allowed)² + n · LOST

for a slope within the tolerance, for chance, and for what steps lose. Signed means of d would find no more of the wrong
blocks: all tokens may lose the same part of what is added to a channel, up to half a step, which is not less.

The limits are measured, over the blocks of forty models in half precision, with two channels of 1 to 1000 and the rest
of 1 to 30, against the same blocks in float32 with rounded outputs, which are farther than other orders of sums are. At
most 0.43 of what is allowed comes over everything (0.14 along what is added), 0.18 in a slice (0.47) and 0.03 in a
value; 0.92, 0.99 and 0.2 where channels of 1000 enter an attention without a norm. Rounding grows with the sums that
follow one another: a block may make 20 of them. Wrong blocks of the tests begin at 1.2. What passes in bf16 is an error
without a slope that is within the tolerance, or no larger than the rounding of what is added, and a single wrong value.
"""

from __future__ import annotations

import dataclasses
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

SHARE = 0.02
"""The part of what are no floating-point numbers that may be other ones, and one more."""

LOST = 0.5
"""The mean of d · added / allowed² where much is shorter than half a step, which a sum may lose: then d is what is
added, up to half of what is allowed, and other sums lose other parts."""

_PIECES, _SMALLEST_PIECE = 32, 1 << 16
"""A tensor is compared in so many pieces, so that float copies take a part of its memory; small ones in fewer."""


def compare_to_rounding(
    out: Any, expected: Any, inputs: Sequence[torch.Tensor] = (), types: Iterable[torch.dtype] = (), depth: int = 1
) -> float | None:
    """How many times as much as rounding explains two outputs (tensors, or nested tuples of them) differ.

    None where rounding explains it. Infinite where one is no number and the expected one is; where that is none either,
    the model itself overflows, which says nothing.
    inputs: of the call, as they were before it. types: of whatever tensors it takes, weights included. depth: how many
        blocks run one after the other, whose differences add up.
    """
    if isinstance(expected, (tuple, list)):
        known, pairs = tuple(types), zip(out, expected, strict=True)
        found = [compare_to_rounding(*pair, inputs, known, depth) for pair in pairs]
        return max((value for value in found if value is not None), default=None)
    if dataclasses.is_dataclass(expected):
        out, expected = vars(out), vars(expected)
    if isinstance(expected, dict):
        if out.keys() != expected.keys():
            return math.inf
        return compare_to_rounding(list(out.values()), list(expected.values()), inputs, types, depth)
    if not isinstance(expected, torch.Tensor):
        return None
    if expected.is_complex() and out.is_complex():
        out, expected = torch.view_as_real(out), torch.view_as_real(expected)
    if out.shape != expected.shape or out.dtype != expected.dtype:
        return math.inf
    if not expected.numel():
        return None
    if not expected.is_floating_point():  # such as masks and indices, of values that rounding may put on either side
        others = (out != expected).sum().item() / (1 + SHARE * expected.numel())
        return others if others > 1 else None
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
    base, typical = _typical(expected, alike)
    largest: list[torch.Tensor] = []
    sums: list[list[torch.Tensor]] = [[] for _ in expected.shape]
    for made, right, given, adds in _pieces(out, expected, base, typical.expand_as(expected)):
        added, unknown = right - given, ~right.isfinite()
        allowed = added.square().add_(adds).mul_(tolerance**2).add_((step * right).square_())
        allowed.clamp_min_(torch.finfo(allowed.dtype).tiny).sqrt_()
        off, added = (values.div_(allowed).masked_fill_(unknown, 0) for values in (made - right, added))
        largest.append(off.abs().amax())
        of_each = [_sums(off.square()), _sums(off.mul_(added)), _sums(added.square_())]
        for parts, each in zip(sums, zip(*of_each, strict=True), strict=True):
            parts.append(torch.stack(each))
    slices = [_join_slices(parts, dimension, expected) for dimension, parts in enumerate(sums)]
    ratios = [_ratios(slices[0].mean(1, keepdim=True), expected.numel(), tolerance)]
    for means in slices:
        ratios.append(_ratios(means, expected.numel() // means.shape[1], tolerance) / IN_SLICE)
    ratios.append(torch.stack(largest) * (tolerance / IN_VALUE))
    return torch.cat(ratios).amax().item()


def _ratios(means: torch.Tensor, count: int, tolerance: float) -> torch.Tensor:
    """How far off slices of so many values are: by their size, or by their slope if that is more. means: [3, slices],
    of d², d · added and added², where both are parts of what is allowed."""
    off, common, added = means
    return torch.maximum(off.sqrt(), common.abs() / (tolerance * added + (added / count).sqrt() + LOST))


def _typical(expected: torch.Tensor, alike: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Which of the tensors the output adds to, None for none of them; and what it adds in each channel, squared, of a
    shape to be broadcast.

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
        torch.stack([_join_slices(parts, dimension, expected) for parts in of_each])
        for dimension, of_each in zip(dimensions, sums, strict=True)
    ]
    differ = torch.stack([mean[0].amax() / mean[0].mean() for mean in means])
    *far, spread, other = torch.cat([means[0].mean(1), differ[:1], differ[-1:]]).tolist()
    nearest = min(range(len(far)), key=lambda number: math.inf if math.isnan(far[number]) else far[number])
    which = int(len(means) > 1 and other > spread)
    adds = means[which][nearest]
    shape = [1] * expected.ndim
    shape[dimensions[which]] = -1
    return (None, *alike)[nearest], torch.maximum(adds, adds.median()).view(shape)


def _longest(tensor: torch.Tensor) -> int:
    return max(range(tensor.ndim), key=tensor.shape.__getitem__)


def _pieces(*tensors: torch.Tensor | None) -> Iterator[list[Any]]:
    """Tensors of one shape piece by piece, in float; 0 for None."""
    first = tensors[0]
    is_small = first.itemsize == 1  # torch promotes no float8
    wide, dimension = torch.float32 if is_small else torch.promote_types(first.dtype, torch.float32), _longest(first)
    count = min(_PIECES, first.shape[dimension], max(1, first.numel() // _SMALLEST_PIECE))
    chunks = [[0] * count if tensor is None else tensor.tensor_split(count, dimension) for tensor in tensors]
    for parts in zip(*chunks, strict=True):
        yield [part if isinstance(part, int) else part.to(wide) for part in parts]


def _sums(values: torch.Tensor) -> list[torch.Tensor]:
    """The sums of the slices along each dimension; whatever their number, the values are read twice."""
    last = values.ndim - 1
    rest = values.sum(last) if last else values
    return [*(_sum_along(rest, dimension) for dimension in range(last)), _sum_along(values, last)]


def _sum_along(values: torch.Tensor, dimension: int) -> torch.Tensor:
    """The sum of each slice along a dimension."""
    others = [other for other in range(values.ndim) if other != dimension]
    return values.sum(others) if others else values


def _join_slices(parts: Sequence[torch.Tensor], dimension: int, whole: torch.Tensor) -> torch.Tensor:
    """The mean of each slice along a dimension, which is the last one of the sums of its pieces."""
    sums = torch.cat(list(parts), -1) if dimension == _longest(whole) else torch.stack(list(parts)).sum(0)
    return sums * (whole.shape[dimension] / whole.numel())
