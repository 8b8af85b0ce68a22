"""The blocks of a model that are worth compiling, each with its kind, and the others with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ..core.errors import one_line
from ..core.reasons import Reason
from ..modules.blocks import blocks
from ..modules.streamed_weights import Plain, in_place
from ..modules.substitution import drop_restored_forwards, has_foreign_forward
from ..modules.wrapped_layers import Wraps
from .code_hash import CodeReader
from .kinds import Kind, describe, kinds_of
from .plain_values import Indescribable

Traceable = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Region:
    """One block to compile: its path in the model, the module and its kind.

    strings: every string constant in its code; the dict keys that it may read are among them.
    wraps: recognises the wrappers around its layers, which are not part of its kind.
    plain: shows the block with its weights in place.
    traceable: a context to trace the block in, where its code calls functions that can be traced.
    """

    path: str
    block: torch.nn.Module
    kind: Kind
    strings: frozenset[str] = frozenset()
    wraps: Wraps | None = None
    plain: Plain = in_place
    traceable: Traceable = nullcontext


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
    plain: Plain = in_place,
    traceable: Traceable = nullcontext,
) -> Survey:
    """The model's blocks and their kinds.

    min_repetitions: kinds with fewer blocks stay eager, since compiling costs more than it gains.
    ignored: as for `CodeReader`.
    wraps: recognises the wrappers around layers; the result is the same with and without them.
    plain: shows blocks with their weights in place; the result is the same wherever they are.
    traceable: as for `Region`; blocks' code is read in it.
    """
    drop_restored_forwards(model)
    described, left_eager = [], []
    reader = CodeReader(ignored)
    found = list(blocks(model, wraps))
    shown = []
    for path, block in found:
        shown.append(block)
        if has_foreign_forward(block):
            left_eager.append((path, Reason("forward_replaced")))
            continue
        try:
            shown[-1] = plain(block, None)
            with traceable():
                described.append((path, block, describe(shown[-1], reader, wraps)))
        except Indescribable as why:
            left_eager.append((path, Reason("indescribable", what=str(why))))
        except Exception as error:  # of an extension's class, of any type
            left_eager.append((path, Reason("indescribable", what=one_line(error))))
    kinds = kinds_of([description for _, _, description in described], shown, wraps)
    regions = [
        Region(path, block, kind, description.code.strings, wraps, plain, traceable)
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
