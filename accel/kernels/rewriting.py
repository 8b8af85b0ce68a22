"""Replaces group norms in a traced graph by `group_norm`'s operator, and orders attention's queries.

A block adds a bias and an embedding to each channel of what a convolution gives, and normalises the sum. What is added
goes into the kernels that read it anyway. For one size, inductor's own kernels are as good, and stay.

Attention gives its result in the memory order of its queries. Flux joins text and image by heads, [B, H, L, D], and
reads the result by tokens, [B, L, H * D], for which torch copies all of it. A kernel of the graph computes the queries
anyway, and can write them by tokens at no cost.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from ..core import toolchain, torch_internals

DEVICE = "cuda"
"""The type of the devices that the kernels are for: NVIDIA's, and AMD's."""

_ADD = (operator.add, torch.add)
_REPLACED = (*_ADD, torch.nn.functional.group_norm, torch.nn.functional.silu)
_IN_PLACE = {f"i{name}" for name in dir(operator) if hasattr(operator, f"i{name}")}
_IN_PLACE |= {"setitem", "delitem", "iand", "ior"}


@contextmanager
def rewrite_graphs(device: str | None) -> Iterator[None]:
    """A context in which inductor rewrites graphs before it compiles them for this type of device. Where this torch
    lacks what that takes, or a pass of somebody else's has that place, nothing changes."""
    lacks = torch_internals.find_missing(torch_internals.REWRITING) is not None
    if device != DEVICE or lacks or toolchain.triton_version() is None:
        yield
        return
    from torch._inductor import config

    from .group_norm import define

    if config.pre_grad_custom_pass is not None:
        yield
        return
    define()
    with config.patch(pre_grad_custom_pass=rewrite):
        yield


def rewrite(graph: Graph) -> None:
    """Replace what can be replaced."""
    for node in list(graph.nodes):
        if node.target is torch.nn.functional.scaled_dot_product_attention:
            _order_queries(graph, node)
    writes = any(map(_may_write, graph.nodes))
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.nn.functional.group_norm:
            _replace_norm(graph, node, writes)


def _order_queries(graph: Graph, node: Node) -> None:
    """Have the queries written by tokens if attention's result is read so, and they are read by nothing else."""
    queries = node.args[0] if node.args else None
    value = _value(queries)
    if value is None or value.ndim != 4 or value.device.type != DEVICE or not value.is_contiguous():
        return
    is_swapped = all(
        user.op == "call_method" and user.target == "transpose" and user.args[1:] in ((1, 2), (2, 1))
        for user in node.users
    )
    if len(queries.users) > 1 or not is_swapped:
        return
    with graph.inserting_before(node):
        for method, sizes in (("transpose", (1, 2)), ("contiguous", ()), ("transpose", (1, 2))):
            queries, value = graph.call_method(method, (queries, *sizes)), getattr(value, method)(*sizes)
            queries.meta["example_value"] = value
    node.update_arg(0, queries)


@dataclass
class _Terms:
    """What a sum consists of. planes: [B, C, ...]. by_channel: [C, 1...]. by_image: [B, C, 1...]."""

    planes: list[Node] = field(default_factory=list)
    by_channel: list[Node] = field(default_factory=list)
    by_image: list[Node] = field(default_factory=list)


def _replace_norm(graph: Graph, node: Node, writes: bool) -> None:
    """writes: something in the graph may be written to, so that a term may be another where the sum is read."""
    norm_args = dict(zip(("input", "num_groups", "weight", "bias", "eps"), node.args, strict=False)) | node.kwargs
    x, weight, bias = (norm_args.get(name) for name in ("input", "weight", "bias"))
    has_weights = all(_has_type_of(part, x) for part in (weight, bias))
    if not (isinstance(norm_args["num_groups"], int) and _is_plain(x) and has_weights):
        return
    terms = _Terms()
    fits = not writes and _collect(x, node, terms)
    if not fits or max(map(len, (terms.planes, terms.by_channel, terms.by_image))) > 1:
        terms = _Terms([x])
    after = next(iter(node.users)) if len(node.users) == 1 else None
    has_silu = after is not None and after.target is torch.nn.functional.silu
    with graph.inserting_before(node):
        by_channel = [graph.call_method("flatten", (term,)) for term in terms.by_channel] or [None]
        by_image = [graph.call_method("flatten", (term, 1)) for term in terms.by_image] or [None]
        arguments = (terms.planes[0], weight, bias, norm_args["num_groups"], norm_args.get("eps", 1e-5), has_silu)
        made = graph.call_function(torch.ops.accel.group_norm.default, (*arguments, *by_channel, *by_image))
    replaced = after if has_silu else node
    made.meta = dict(replaced.meta)
    replaced.replace_all_uses_with(made)
    unused = [replaced]
    while unused:
        node = unused.pop()
        if not node.users and node.target in _REPLACED:
            inputs = node.all_input_nodes
            graph.erase_node(node)
            unused += inputs


def _may_write(node: Node) -> bool:
    """Whether a node may write to what it is given."""
    if node.op == "call_method":
        return node.target.endswith("_") and not node.target.endswith("__")
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return any(getattr(node.target, name)._schema.is_mutable for name in node.target.overloads())
    name = getattr(node.target, "__name__", "_")
    in_place = name.endswith("_") or name in _IN_PLACE and getattr(operator, name) is node.target
    return in_place or node.kwargs.get("inplace") or "out" in node.kwargs or any(value is True for value in node.args)


def _collect(node: Any, user: Node, terms: _Terms, like: Node | None = None) -> bool:
    """Add the terms of a sum that only `user` reads; False where one is of none of these shapes."""
    like = like or node
    if not isinstance(node, Node):
        return False
    if _has_shape_of(node, like):
        is_sum = node.op == "call_function" and node.target in _ADD and len(node.args) == 2 and not node.kwargs
        if is_sum and list(node.users) == [user]:
            return all(_collect(term, node, terms, like) for term in node.args)
        terms.planes.append(node)
        return _is_plain(node)
    if not _has_type_of(node, like):
        return False
    value, whole = _value(node), _value(like)
    spatial = whole.ndim - 2
    if not all(_is(size, 1) for size in value.shape[value.ndim - spatial :]):
        return False
    channels = value.shape[: value.ndim - spatial]
    if len(channels) == 2 and _is(channels[0], 1):
        channels = channels[1:]
    if len(channels) not in (1, 2) or not all(map(_is, channels, whole.shape[2 - len(channels) : 2])):
        return False
    (terms.by_channel if len(channels) == 1 else terms.by_image).append(node)
    return True


def _is_plain(node: Any) -> bool:
    """Whether it is an image [B, C, ...] of any size, contiguous, on a GPU."""
    value = _value(node)
    return (
        value is not None
        and value.ndim >= 3
        and value.device.type == DEVICE
        and not all(isinstance(size, int) for size in value.shape)
        and value.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and value.is_contiguous()
    )


def _has_type_of(node: Any, other: Node) -> bool:
    a, b = _value(node), _value(other)
    return a is not None and b is not None and (a.dtype, a.device) == (b.dtype, b.device)


def _has_shape_of(node: Node, other: Node) -> bool:
    a, b = _value(node), _value(other)
    return _has_type_of(node, other) and a.ndim == b.ndim and all(map(_is, a.shape, b.shape))


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _is(size: Any, other: Any) -> bool:
    """Whether two sizes are known to be equal, without a guard."""
    return torch_internals.KNOWN_TRUE.get()(size == other)
