"""Which of a transformer's blocks do its work: the lists of blocks that the token streams pass in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)
_CONTAINERS = (*_LISTS, torch.nn.Sequential)


@dataclass(frozen=True)
class BlockList:
    """A list of blocks at `path` in its model, in the order in which they are called."""

    path: str
    blocks: tuple[torch.nn.Module, ...]

    @property
    def weight(self) -> int:
        return sum(matrix_weights(block) for block in self.blocks)


def trunk_of(model: torch.nn.Module) -> tuple[BlockList, ...]:
    """The lists that hold most of the model's work, in the order in which they run; empty when unclear.

    Two lists run in turn where their names say so: `double…` or `joint…` before `single…`, or `x` before `single_x`.
    Otherwise it is the one list that outweighs all others together: beside it stand refiners of the
    text, adapters, encoders, which run as they are on every step.
    """
    lists = {found.path: found for found in _block_lists(model, "")}
    for path, found in lists.items():
        parent, _, name = path.rpartition(".")
        prefix = f"{parent}." if parent else ""
        singles = [f"single_{name}", name.replace("double", "single"), name.replace("joint", "single")]
        for second in [prefix + single for single in singles if single != name]:
            if second in lists:
                return found, lists[second]
    if not lists:
        return ()
    heaviest = max(lists.values(), key=lambda found: found.weight)
    others = sum(found.weight for found in lists.values()) - heaviest.weight
    return (heaviest,) if heaviest.weight > others else ()


def largest_depth_within(share: float, lists: Sequence[BlockList]) -> int:
    """How many blocks at either end hold at most `share` of the blocks' matrix weights, 1 at least.

    What a block costs grows with the tokens as its neighbours' cost does, so the choice is the same
    at every size.
    """
    weights = [matrix_weights(block) for found in lists for block in found.blocks]
    depth = 1
    while 2 * depth + 3 <= len(weights):
        if sum(weights[: depth + 1]) + sum(weights[-depth - 1 :]) > share * sum(weights):
            break
        depth += 1
    return depth


def matrix_weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)


def _block_lists(module: torch.nn.Module, path: str) -> Iterator[BlockList]:
    """The outermost lists whose elements are modules built of layers, not lists themselves."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if not isinstance(child, _LISTS):
            yield from _block_lists(child, inner)
        elif len(child) and all(_is_block(element) for element in child.children()):
            yield BlockList(inner, tuple(child.children()))


def _is_block(module: torch.nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and any(True for _ in module.children())
