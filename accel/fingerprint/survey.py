"""The blocks of a model that are worth compiling, each with its kind, and the others with the reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from ..core.reasons import Reason
from ..modules.blocks import blocks
from ..modules.substitution import has_foreign_forward
from ..modules.wrapped_layers import Wraps
from .code_hash import CodeReader
from .kinds import Kind, describe, kinds_of
from .plain_values import Indescribable


@dataclass(frozen=True)
class Region:
    """One block to compile: its path in the model, the module and its kind.

    strings: every string constant in its code; the dict keys that it may read are among them.
    wraps: recognises the wrappers around its layers, which are not part of its kind.
    """

    path: str
    block: torch.nn.Module
    kind: Kind
    strings: frozenset[str] = frozenset()
    wraps: Wraps | None = None


@dataclass(frozen=True)
class Survey:
    """A model's blocks: those to compile, and the paths of those left eager with the reason."""

    regions: tuple[Region, ...]
    left_eager: tuple[tuple[str, Reason], ...]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(dict.fromkeys(region.kind for region in self.regions))


def survey(
    model: torch.nn.Module,
    min_repetitions: int = 1,
    ignored: frozenset[tuple[str, str]] = frozenset(),
    wraps: Wraps | None = None,
) -> Survey:
    """The model's blocks and their kinds.

    min_repetitions: kinds with fewer blocks stay eager, since compiling costs more than it gains.
    ignored: as for `CodeReader`.
    wraps: recognises the wrappers around layers; the result is the same with and without them.
    """
    described, left_eager = [], []
    reader = CodeReader(ignored)
    found = list(blocks(model, wraps))
    for path, block in found:
        if has_foreign_forward(block):
            left_eager.append((path, Reason("forward_replaced")))
            continue
        try:
            described.append((path, block, describe(block, reader, wraps)))
        except Indescribable as why:
            left_eager.append((path, Reason("indescribable", what=str(why))))
    kinds = kinds_of([description for _, _, description in described], [block for _, block in found], wraps)
    regions = [
        Region(path, block, kind, description.code.strings, wraps)
        for (path, block, description), kind in zip(described, kinds, strict=True)
    ]
    counts = Counter(region.kind for region in regions)
    kept = []
    for region in regions:
        if counts[region.kind] >= min_repetitions:
            kept.append(region)
        else:
            left_eager.append((region.path, Reason("too_few_blocks", least=min_repetitions)))
    return Survey(tuple(kept), tuple(left_eager))
