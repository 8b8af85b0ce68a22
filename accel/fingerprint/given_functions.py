"""The code of functions that are arguments of a block, as those that a model makes for the attention of each call.

It is part of the kind of such a call; what the functions close over is part of the call (`tree_spec`).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from ..signature.tree_spec import Function
from .code_facts import may_keep
from .code_hash import CodeHash, CodeReader, ReadCode
from .code_snapshot import CodeSnapshot
from .plain_values import Indescribable

_MOST_READ = 32
"""Readings for one survey, after which such calls run uncompiled: code that is another in each call is no kind."""


@dataclass(frozen=True, eq=False)
class GivenCode:
    """What functions run: the hash, the code that was read for it, and what stood there."""

    hash: CodeHash
    code: ReadCode
    snapshot: CodeSnapshot


class GivenFunctions:
    """Reads functions for all blocks of one survey. ignored: as for `CodeReader`; traceable: as for `Region`."""

    def __init__(self, ignored: frozenset[tuple[str, str]], traceable: Callable[[], AbstractContextManager[None]]):
        self._ignored, self._traceable = ignored, traceable
        self._known: dict[tuple[Function, ...], GivenCode] = {}
        self._read = 0

    def read(self, functions: tuple[Function, ...]) -> GivenCode:
        """The code of these functions as it stands. Raises Indescribable."""
        known = self._known.get(functions)
        if known is not None and known.snapshot.is_current():
            return known
        if self._read == _MOST_READ:
            raise Indescribable("one function after another")
        self._read += 1
        if any(map(_may_keep, functions)):
            raise Indescribable("a function that may keep something")
        reader = CodeReader(self._ignored)
        bare = list(map(_bare, functions))
        with self._traceable():
            hash = reader.read(frozenset(), bare)
            # It says nothing of which is which, nor do their names.
            hash = replace(hash, digest=" ".join(reader.read(frozenset(), [one]).digest for one in bare))
        known = self._known[functions] = GivenCode(hash, reader.collect_code(), reader.notes.snapshot())
        return known


def _may_keep(function: Function) -> bool:
    codes = [function.code]
    for code in codes:
        codes += (inner for inner in code.co_consts if isinstance(inner, types.CodeType))
    return any(map(may_keep, codes))


def _bare(function: Function) -> types.FunctionType:
    """One without defaults and with empty cells: its code alone counts."""
    code, scope = function.code, function.make.__globals__
    return types.FunctionType(code, scope, closure=tuple(types.CellType() for _ in code.co_freevars))
