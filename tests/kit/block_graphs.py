"""Graphs of single blocks, without a cache or a model around them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from comfy_accel.accel.compile.block_compiler import compile_block, load_block
from comfy_accel.accel.compile.compiled_graph import CompiledGraph
from comfy_accel.accel.fingerprint.block_call import Call
from comfy_accel.accel.fingerprint.kinds import describe, kinds_of, template_of, weight_slots
from comfy_accel.accel.signature import tree_spec


def kind_of(*blocks: torch.nn.Module):
    """The kind of the first of these blocks, among all of them."""
    return kinds_of([describe(block) for block in blocks])[0]


def compiled(block, inputs, kind=None, backend="eager", any_size=True, **options):
    """(graph of a call of the block with these inputs, the slots of its weights). options: of `compile_block`."""
    kind = kind or kind_of(block)
    tensors: list[torch.Tensor] = []
    spec = tree_spec.flatten((tuple(inputs), {}), tensors)
    weights = weight_slots(block, kind.weights)
    call = Call(kind, spec, weights.take(), tensors, backend, any_size)
    return compile_block(template_of(block), call, **options), weights


def saved_and_loaded(graph: CompiledGraph, block, inputs, kind=None) -> CompiledGraph:
    """The graph as another process has it that loads what was saved of it."""
    call = Call(kind or kind_of(block), tree_spec.flatten((tuple(inputs), {}), []))
    return load_block(template_of(block), call, graph.save(), graph.facts)


def tensors_of(weights, inputs) -> tuple[torch.Tensor, ...]:
    """What a graph takes for a call of the block. weights: their slots."""
    tensors: list[torch.Tensor] = []
    tree_spec.flatten((tuple(inputs), {}), tensors)
    return (*weights.take(), *tensors)


def on_card(block: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """The block as it is in a run on a card. dtype: of its weights; None leaves them as they are."""
    return block.to("cuda", dtype).eval().requires_grad_(False)


def zeros(*shapes: Iterable[int], dtype: torch.dtype = torch.half) -> list[torch.Tensor]:
    """One on the card for each shape."""
    return [torch.zeros(tuple(shape), dtype=dtype, device="cuda") for shape in shapes]
