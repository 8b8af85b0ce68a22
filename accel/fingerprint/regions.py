"""Which parts of a model are worth compiling: its repeated blocks, found by structure alone.

No model family is named here. A *block* is the innermost element of the model's module lists that
is built of layers; blocks of one kind (see `kinds`) share one compiled graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..modules import wrapped_layers
from ..modules.substitution import has_foreign_forward
from ..modules.wrapped_layers import Wraps
from .code_reach import CodeReader
from .kinds import Kind, describe, kinds_of
from .plain_values import Indescribable

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


@dataclass(frozen=True)
class Region:
    """One block to compile: where it stands in the model, itself, and its kind.

    strings: every string constant in its code: the dict keys it may look at are among them.
    wraps: tells the wrappers around its layers, which are no part of its kind.
    """

    path: str
    block: torch.nn.Module
    kind: Kind
    strings: frozenset[str] = frozenset()
    wraps: Wraps | None = None


@dataclass(frozen=True)
class Survey:
    """What was found in a model: the blocks to compile, and those left eager with the reason."""

    regions: tuple[Region, ...]
    left_eager: tuple[tuple[str, str], ...]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(dict.fromkeys(region.kind for region in self.regions))


def survey(
    model: torch.nn.Module,
    min_repetitions: int = 1,
    ignored: frozenset[tuple[str, str]] = frozenset(),
    wraps: Wraps | None = None,
) -> Survey:
    """Find a model's blocks and their kinds.

    min_repetitions: kinds with fewer blocks stay eager, since compiling costs more than it gives.
    ignored: as for `code_reach.CodeReader`.
    wraps: tells the wrappers around layers; what is found is the same with and without them.
    """
    described, left_eager = [], []
    reader = CodeReader(ignored)
    found = list(blocks(model, wraps))
    for path, block in found:
        if has_foreign_forward(block):
            left_eager.append((path, "another extension has replaced its forward"))
            continue
        try:
            described.append((path, block, describe(block, reader, wraps)))
        except Indescribable as reason:
            left_eager.append((path, str(reason)))
    kinds = kinds_of([description for _, _, description in described], [block for _, block in found], wraps)
    regions = [
        Region(path, block, kind, description.meaning.strings, wraps)
        for (path, block, description), kind in zip(described, kinds, strict=True)
    ]
    counts: dict[Kind, int] = {}
    for region in regions:
        counts[region.kind] = counts.get(region.kind, 0) + 1
    kept = []
    for region in regions:
        if counts[region.kind] >= min_repetitions:
            kept.append(region)
        else:
            left_eager.append((region.path, f"fewer than {min_repetitions} blocks of its kind"))
    return Survey(tuple(kept), tuple(left_eager))


def blocks(model: torch.nn.Module, wraps: Wraps | None = None) -> Iterator[tuple[str, torch.nn.Module]]:
    """The model's blocks with their paths, in the order of the module tree.

    They are the elements of its lists, and whatever else is of the same class (a VAE's middle block).
    """
    classes = {type(block) for _, block in _blocks(model, "", False, frozenset(), wraps)}
    yield from _blocks(model, "", False, frozenset(classes), wraps)


def _blocks(
    module: torch.nn.Module, path: str, in_list: bool, classes: frozenset[type], wraps: Wraps | None
) -> Iterator[tuple[str, torch.nn.Module]]:
    is_container = isinstance(module, _CONTAINERS)
    if (
        (in_list or type(module) in classes)
        and not is_container
        and _is_composite(module, wraps)
        and not _holds_blocks(module, wraps)
    ):
        yield path, module
        return
    # What stands beside a list of blocks inside a block (the attention beside a mixture of experts) is one too.
    in_list = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)) or (
        in_list and (is_container or _holds_blocks(module, wraps))
    )
    for name, child in wrapped_layers.children(module, wraps):
        yield from _blocks(child, f"{path}.{name}" if path else name, in_list, classes, wraps)


def _is_composite(module: torch.nn.Module, wraps: Wraps | None) -> bool:
    """Built of at least two layers with weights: around a single one there is nothing to fuse."""
    layers = (part for _, part in wrapped_layers.modules(module, wraps) if part is not module and part._parameters)
    return next(layers, None) is not None and next(layers, None) is not None


def _holds_blocks(module: torch.nn.Module, wraps: Wraps | None) -> bool:
    """Whether a list further inside holds composite elements: then those are the blocks."""
    return any(
        _is_composite(element, wraps)
        for _, inner in wrapped_layers.modules(module, wraps)
        if inner is not module and isinstance(inner, torch.nn.ModuleList)
        for _, element in wrapped_layers.children(inner, wraps)
    )
