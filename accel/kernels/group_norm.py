"""Group norm of a sum with numbers for each channel, in GPU kernels that are as good at any size as at one.

Inductor's kernels for any size find the channel of each element by divisions, which for one size are products. Here a
program works on part of one channel's plane: it asks for the channel once, and reads 128 bits at a time.

Import it where there is Triton. As in torch, a value is added and normalised in float32 and rounded at the end.
"""

from __future__ import annotations

import math
import threading

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

PART = 1024
"""Elements of a plane that one program works on."""

_defining = threading.Lock()


def define() -> None:
    """Register the operator `accel::group_norm`, once in the process; inductor sees the kernels inside, so that they
    are in a saved graph, compiled."""
    with _defining:
        if not hasattr(torch.ops.accel, "group_norm"):
            triton_op("accel::group_norm", group_norm, mutates_args=())


@triton.jit
def moments_of(x, row, offsets, size, added, count):
    """Of the elements at these offsets of a plane of this size: their mean, and the sum of the squares of the distances
    from it."""
    value = tl.load(x + row.to(tl.int64) * size + offsets, offsets < size, other=0.0).to(tl.float32) + added
    value = tl.where(offsets < size, value, 0.0)
    mean = tl.sum(value) / count
    away = tl.where(offsets < size, value - mean, 0.0)
    return mean, tl.sum(away * away)


@triton.jit
def part_moments(
    x, by_channel, by_image, means, squares, plane, members, parts, groups: tl.constexpr, length: tl.constexpr
):
    """Of each part of a plane: its mean, and the sum of the squares of the distances from it."""
    part, member, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = group * members + member
    added = 0.0
    if by_channel is not None:
        added += tl.load(by_channel + group % groups * members + member).to(tl.float32)
    if by_image is not None:
        added += tl.load(by_image + row).to(tl.float32)
    offsets = part * length + tl.arange(0, length)
    count = tl.minimum(plane - part * length, length).to(tl.float32)
    if plane % 16 == 0:  # a fact that the compiler takes to heart: reads of 128 bits
        mean, square = moments_of(x, row, offsets, plane // 16 * 16, added, count)
    else:
        mean, square = moments_of(x, row, offsets, plane, added, count)
    tl.store(means + row * parts + part, mean)
    tl.store(squares + row * parts + part, square)


@triton.jit
def group_moments(
    means, squares, moments, plane, members, parts, eps, length: tl.constexpr, height: tl.constexpr, width: tl.constexpr
):
    """Of each group: its mean, and one over its standard deviation."""
    group = tl.program_id(0)
    rows, columns = tl.arange(0, height)[:, None], tl.arange(0, width)[None, :]
    total = tl.zeros((height, width), tl.float32)
    for first in range(0, members, height):
        for part in range(0, parts, width):
            inside = (first + rows < members) & (part + columns < parts)
            at = (group * members + first + rows) * parts + part + columns
            count = tl.minimum(plane - (part + columns) * length, length).to(tl.float32)
            total += tl.load(means + at, inside, other=0.0) * count
    size = plane * 1.0 * members
    mean = tl.sum(total) / size
    total = tl.zeros((height, width), tl.float32)
    for first in range(0, members, height):
        for part in range(0, parts, width):
            inside = (first + rows < members) & (part + columns < parts)
            at = (group * members + first + rows) * parts + part + columns
            count = tl.minimum(plane - (part + columns) * length, length).to(tl.float32)
            away = tl.load(means + at, inside, other=0.0) - mean
            total += tl.where(inside, tl.load(squares + at, inside, other=0.0) + away * away * count, 0.0)
    tl.store(moments + group * 2, mean)
    tl.store(moments + group * 2 + 1, tl.rsqrt(tl.sum(total) / size + eps))


@triton.jit
def normalise(
    x,
    by_channel,
    by_image,
    moments,
    weight,
    bias,
    out,
    plane,
    members,
    groups: tl.constexpr,
    silu: tl.constexpr,
    length: tl.constexpr,
):
    """Each plane times its scale plus its shift, and SiLU of that."""
    part, member, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, channel = group * members + member, group % groups * members + member
    added = 0.0
    if by_channel is not None:
        added += tl.load(by_channel + channel).to(tl.float32)
    if by_image is not None:
        added += tl.load(by_image + row).to(tl.float32)
    scale = tl.load(weight + channel).to(tl.float32) * tl.load(moments + group * 2 + 1)
    shift = tl.load(bias + channel).to(tl.float32) + (added - tl.load(moments + group * 2)) * scale
    offsets = part * length + tl.arange(0, length)
    if plane % 16 == 0:
        size = plane // 16 * 16
        start = row.to(tl.int64) * size
        value = tl.load(x + start + offsets, offsets < size).to(tl.float32) * scale + shift
        value = value * tl.sigmoid(value) if silu else value
        tl.store(out + start + offsets, value, offsets < size)
    else:
        start = row.to(tl.int64) * plane
        value = tl.load(x + start + offsets, offsets < plane).to(tl.float32) * scale + shift
        value = value * tl.sigmoid(value) if silu else value
        tl.store(out + start + offsets, value, offsets < plane)


def group_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    eps: float,
    silu: bool,
    by_channel: torch.Tensor | None = None,
    by_image: torch.Tensor | None = None,
) -> torch.Tensor:
    """`silu(group_norm(x + by_channel + by_image))`, without `silu` where that is False. x: [B, C, ...], contiguous.
    weight, bias, by_channel: [C]. by_image: [B, C]."""
    plane = math.prod(x.shape[2:])  # `Size.numel` would fix the sizes
    members, rows, parts = x.shape[1] // groups, x.shape[0] * groups, (plane + PART - 1) // PART
    # Of one dimension: a size of 1 among several makes torch ask for their order.
    means, squares = (x.new_empty(rows * members * parts, dtype=torch.float32) for _ in range(2))
    moments = x.new_empty(rows * 2, dtype=torch.float32)
    # Parts first: of the others a card has no more than 65535, and neighbours in memory run together.
    out, grid = torch.empty_like(x), (parts, members, rows)
    by_channel = None if by_channel is None else by_channel.contiguous()
    by_image = None if by_image is None else by_image.contiguous()
    wrap_triton(part_moments)[grid](x, by_channel, by_image, means, squares, plane, members, parts, groups, PART)
    wrap_triton(group_moments)[(rows,)](means, squares, moments, plane, members, parts, eps, PART, 16, 32)
    wrap_triton(normalise)[grid](
        x, by_channel, by_image, moments, weight, bias, out, plane, members, groups, silu, PART
    )
    return out
