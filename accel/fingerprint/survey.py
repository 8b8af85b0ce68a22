"""The blocks of a model that are worth compiling, each with its kind, and the others with the reason."""

from __future__ import annotations

import functools
import hashlib
import types
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex

import torch

from ..core.errors import one_line
from ..core.events import log
from ..core.reasons import Reason, RunEagerly
from ..modules import wrapped_layers
from ..modules.blocks import blocks
from ..modules.code_owner import package_of
from ..modules.opaque_layers import OpaqueLayer, runs_others_code
from ..modules.snapshot import LayoutSnapshot
from ..modules.streamed_weights import Plain, keep_in_place
from ..modules.substitution import drop_restored_forwards, has_foreign_forward
from ..modules.wrapped_forward import WrappedForward
from ..modules.wrapped_layers import Wraps
from ..signature.tree_spec import Function
from .code_facts import may_keep
from .code_hash import CodeHash, CodeReader, ReadCode
from .code_references import find_codes_run_by
from .code_snapshot import CodeNotes, CodeSnapshot
from .kept_state import packages_of
from .kinds import Description, Kind, Read, WeightSlots, describe, kinds_of, weight_slots
from .plain_values import Indescribable, note_part, settings_of

_SLOT = "_accel_surveys"
"""The attribute of a model that has its `KeptSurveys`."""

_MOST_KEPT = 4
"""Surveys kept for one model, which differ in code or settings: programs that replace these take turns."""

_MOST_READ = 32
"""Functions read for one survey; calls with others run uncompiled, since code that changes in each call is no kind."""

Traceable = Callable[..., AbstractContextManager[None]]
"""Makes a context to read code in; where its argument is True, to trace it or run it without values."""


@dataclass(frozen=True, eq=False)
class GivenCode:
    """The code that functions among a call's arguments run, its hash, and a snapshot of where it was read."""

    hash: CodeHash
    code: ReadCode
    snapshot: CodeSnapshot


class GivenFunctions:
    """Reads functions among arguments, for all blocks of one survey. ignored: as for `CodeReader`."""

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
        codes = [function.code for function in functions]
        for code in codes:
            codes += (inner for inner in code.co_consts if isinstance(inner, types.CodeType))
        if any(map(may_keep, codes)):
            raise Indescribable("a function that may keep something")
        reader = CodeReader(self._ignored)
        # Without defaults and with empty cells: their code alone counts.
        bare = []
        for function in functions:
            cells = tuple(types.CellType() for _ in function.code.co_freevars)
            bare.append(types.FunctionType(function.code, function.make.__globals__, closure=cells))
        with self._traceable():
            hash = reader.read(frozenset(), bare)
            # The digest of all together says nothing of their order.
            hash = replace(hash, digest=" ".join(reader.read(frozenset(), [function]).digest for function in bare))
        known = self._known[functions] = GivenCode(hash, reader.collect_code(), reader.notes.snapshot())
        return known


@dataclass(frozen=True, eq=False)
class SurveyContext:
    """What all blocks of one survey have in common.

    wraps: recognises the wrappers around layers, which are not part of a kind. plain: shows blocks with their weights.
    code: all that was read. functions: reads those among a call's arguments. calls: by kind, `KnownCalls`.
    """

    wraps: Wraps | None
    plain: Plain
    traceable: Traceable
    code: ReadCode
    functions: GivenFunctions
    calls: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Region:
    """One block to compile: its path in the model, the module and its kind.

    strings: every string constant in its code; the dict keys that it may read are among them.
    notes: where the block's settings were found. read: the settings that its code reads.
    wrapped: where other programs have wrapped its forward. is_last: of several blocks of its kind.
    given: the functions among its arguments, if its kind is for such calls. known: such regions, by functions.
    """

    path: str
    block: torch.nn.Module
    kind: Kind
    context: SurveyContext
    strings: frozenset[str]
    notes: CodeNotes
    read: Read | None
    wrapped: WrappedForward | None
    is_last: bool
    given: GivenCode | None = None
    known: dict[Any, Any] = field(default_factory=dict)

    def specialize_for_functions(self, functions: tuple[Function, ...]) -> Region:
        """The region for calls of the block with these functions. Raises Indescribable."""
        known = self.known.get(functions)
        if known is None and not {package_of(function.module) for function in functions} <= packages_of(self.block):
            raise Indescribable("a function of another program")
        given = self.context.functions.read(functions)
        if known is None or known.given is not given:
            code, read = given.hash, dict(self.read or ())
            for path, part in wrapped_layers.modules(self.block, self.context.wraps):  # any may be among its arguments
                names = {name for name, _ in settings_of(part)}.difference(read.get(path, ()), ("training",))
                if any(map(code.may_read, names)):
                    raise Indescribable("a function that may read more of the block than its own code does")
            kind = replace(
                self.kind,
                digest=hashlib.sha256(f"{self.kind.digest} {code.digest}".encode()).hexdigest()[:32],
                sources=self.kind.sources | code.sources,
                opaque=self.kind.opaque | code.opaque,
            )
            known = replace(self, kind=kind, strings=self.strings | code.strings, given=given, known={})
            self.known[functions] = known
        return known

    @functools.cached_property
    def code(self) -> ReadCode:
        """All code that was read for it, and where."""
        notes = (*self.context.code.notes, self.notes)
        if self.given is None:
            return replace(self.context.code, notes=notes, read=self.read)
        codes = self.context.code.codes | self.given.code.codes
        return replace(self.context.code, codes=codes, notes=(*notes, *self.given.code.notes), read=self.read)

    @functools.cached_property
    def states(self) -> tuple[dict[str, Any], ...]:
        """The attributes of the modules in the block."""
        return tuple(map(vars, self.block.modules()))

    @functools.cached_property
    def calls_layers(self) -> bool:
        """Whether graphs of the block call some of its layers uncompiled (`opaque_layers`)."""
        return any(isinstance(part, OpaqueLayer) for _, part in wrapped_layers.modules(self.block, self.context.wraps))

    @property
    def runs_others_code(self) -> bool:
        """Whether others' code runs in its graphs now, which must not run twice to be compared."""
        parts = wrapped_layers.modules(self.block, self.context.wraps)
        return any(
            part.is_others or runs_others_code(self.block.get_submodule(path))
            for path, part in parts
            if isinstance(part, OpaqueLayer)
        )

    @functools.cached_property
    def slots(self) -> WeightSlots:
        """Where the block's weights are."""
        return weight_slots(self.block, self.kind.weights, self.context.wraps, self.kind.forms)


@dataclass(eq=False)
class Passes:
    """Whether code or settings stayed (has_held) or changed (has_changed) between the blocks in a pass over a model."""

    has_held: bool = False
    has_changed: bool = False


@dataclass(frozen=True, eq=False)
class Survey:
    """A model's blocks: those to compile, and the paths of those left eager with the reason.

    code, settings: snapshots of what was read, in the program and on the blocks; compared when blocks are called.
    settings_by_block: those of each block. changed_by_model: the part of them that code around the block may change.
    around: the modules in the model outside of the blocks to compile.
    layout, eager: compared at the start of the next run. eager: snapshot of what may have kept blocks from being
        compiled; None where another program's code has failed.
    known: what runs have learnt of the model's calls.
    """

    regions: tuple[Region, ...]
    left_eager: tuple[tuple[str, Reason], ...]
    code: CodeSnapshot
    settings: CodeSnapshot
    settings_by_block: dict[torch.nn.Module, CodeSnapshot]
    changed_by_model: dict[torch.nn.Module, CodeSnapshot]
    around: tuple[torch.nn.Module, ...]
    layout: LayoutSnapshot
    eager: CodeSnapshot | None
    known: dict[Any, Any] = field(default_factory=dict)
    passes: Passes = field(default_factory=Passes)

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(dict.fromkeys(region.kind for region in self.regions))

    @functools.cached_property
    def is_wrapped(self) -> bool:
        """Whether other programs have wrapped the forward of a block."""
        return any(region.wrapped is not None for region in self.regions)

    @property
    def stands(self) -> bool:
        """Whether code and settings are still as surveyed."""
        return self.code.is_current() and self.settings.is_current()

    def stands_for(self, block: torch.nn.Module) -> bool:
        """Whether code and the block's settings are still as surveyed."""
        settings = self.settings_by_block.get(block)
        return self.code.is_current() and (settings is None or settings.is_current())


class KeptSurveys:
    """The surveys of one model from one run to the next, each used again while its four snapshots are current.

    They are kept on the model, or by a host; copies of the model do not get them, and they do not keep it alive.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: list[tuple[Any, Survey]] = []

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        return type(None), ()

    @classmethod
    def get_or_create(cls, model: torch.nn.Module) -> KeptSurveys:
        """The model's kept surveys; creates the store on first use."""
        surveys = model.__dict__.get(_SLOT)
        if not isinstance(surveys, cls):
            surveys = model.__dict__[_SLOT] = cls()
        return surveys

    def find(self, model: torch.nn.Module, settings: Any, create: Callable[[], Survey]) -> Survey:
        """A kept survey with equal settings that still fits the model, or a new one; drops those of other layouts."""
        known = self._kept  # read once: another thread may find one of the same model
        if known:
            _, newest = known[0]
            drop_restored_forwards((model, *newest.layout.parts))
        changed = [kept.layout.changed_part(model) for _, kept in known]
        if any(changed):
            log.debug("%s has changed: %s", type(model).__name__, changed)
        self._kept = known = [entry for entry, part in zip(known, changed, strict=True) if part is None]
        for known_settings, kept in known:
            if known_settings == settings and kept.stands and kept.eager.is_current():
                return kept
        created = create()
        if created.eager is not None:
            self._kept = [(settings, created), *known[: _MOST_KEPT - 1]]
        return created


def survey(
    model: torch.nn.Module,
    min_repetitions: int = 1,
    ignored: frozenset[tuple[str, str]] = frozenset(),
    wraps: Wraps | None = None,
    plain: Plain = keep_in_place,
    traceable: Traceable = nullcontext,
) -> Survey:
    """The model's blocks and their kinds, the same whatever wraps their layers and wherever their weights are.

    min_repetitions: kinds with fewer blocks stay eager, since compiling costs more than it gains.
    ignored: as for `CodeReader`. wraps, plain: as for `SurveyContext`.
    """
    drop_restored_forwards(model.modules())
    reader = CodeReader(ignored)
    global_hooks = torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks
    for hooks in global_hooks:
        reader.notes.watch_items(hooks)
    found = [
        _Block(path, block, block, CodeNotes(), WrappedForward.find(block)) for path, block in blocks(model, wraps)
    ]
    for block in found:
        try:
            if any(global_hooks):
                raise RunEagerly(Reason("hooks_everywhere"))
            if block.wrapped is None and has_foreign_forward(block.block):
                raise RunEagerly(Reason("forward_replaced"))
            block.shown = plain(block.block)
            with traceable():
                block.description = describe(block.shown, reader, wraps, block.wrapped, block.notes)
        except RunEagerly as refusal:
            block.eager_reason = refusal.reason
        except Exception as error:  # of an extension's class, of any type
            block.is_failed = not isinstance(error, Indescribable)
            what = one_line(error) if block.is_failed else str(error)
            block.eager_reason = Reason("indescribable", what=what)
    described = [block for block in found if block.description is not None]
    eager = [block for block in found if block.description is None]
    descriptions = [block.description for block in found if block.description is not None]
    kinds = kinds_of(descriptions, [block.shown for block in found], wraps)
    inside = {part for block in described for part in block.block.modules()}
    outside = tuple(part for part in model.modules() if part is not model and part not in inside)
    around = find_codes_run_by({model, *outside} - inside, inside)
    context = SurveyContext(wraps, plain, traceable, reader.collect_code(around), GivenFunctions(ignored, traceable))
    changed_around = reader.notes.select_changed(around)
    counts, last = Counter(kinds), dict(zip(kinds, described, strict=True))
    regions, changed_by_model = [], {}
    for block, description, kind in zip(described, descriptions, kinds, strict=True):
        block.notes = _notes_of(block, wraps, description.read)
        if counts[kind] < min_repetitions:
            block.eager_reason = Reason("too_few_blocks", least=min_repetitions)
            continue
        region = Region(
            path=block.path,
            block=block.block,
            kind=kind,
            context=context,
            strings=description.code.strings,
            notes=block.notes,
            read=description.read,
            wrapped=block.wrapped,
            is_last=last[kind] is block and counts[kind] > 1,
        )
        regions.append(region)
        if places := CodeNotes.join(changed_around, region.notes.select_changed(around)):
            changed_by_model[region.block] = places.snapshot()
    eager_notes = CodeNotes.join(*(_notes_of(block, wraps) for block in eager))
    return Survey(
        regions=tuple(regions),
        left_eager=tuple((block.path, block.eager_reason) for block in found if block.eager_reason is not None),
        code=reader.notes.snapshot(),
        settings=CodeNotes.join(*(block.notes for block in described)).snapshot(),
        settings_by_block={region.block: region.notes.snapshot() for region in regions},
        changed_by_model=changed_by_model,
        around=outside,
        layout=LayoutSnapshot(
            model, [(block.block, block.shown) for block in described], [block.block for block in eager]
        ),
        eager=None if any(block.is_failed for block in eager) else eager_notes.snapshot(),
    )


@dataclass(eq=False)
class _Block:
    """A block that is being surveyed.

    shown: the module described for it, itself or a copy with its weights. notes: what to watch. is_failed: it raised.
    """

    path: str
    block: torch.nn.Module
    shown: torch.nn.Module
    notes: CodeNotes
    wrapped: WrappedForward | None
    description: Description | None = None
    eager_reason: Reason | None = None
    is_failed: bool = False


def _notes_of(block: _Block, wraps: Wraps | None, read: Read | None = None) -> CodeNotes:
    """The block's notes, and where its settings and parts are. read: its code's settings; None for all but tensors."""
    notes = CodeNotes.join(block.notes)
    parts = dict(wrapped_layers.modules(block.block, wraps))
    if read is None:
        read = [
            (path, [name for name, value in settings_of(part) if not isinstance(value, torch.Tensor)])
            for path, part in wrapped_layers.modules(block.shown, wraps)
        ]
    for path, names in read:
        part = parts[path]
        for name in names:
            if name in part.__dict__ and name != "training":  # set for a whole model, and before its calls
                notes.watch(part.__dict__, name)
        note_part(part, notes, shown=block.shown is block.block, outermost=not path)
    for part, _ in wrapped_layers.find_wrapped(block.block, wraps):  # called uncompiled once it has one of these
        notes.watch_absent(part.__dict__, "forward")
        notes.watch_len(part._forward_hooks)
        notes.watch_len(part._forward_pre_hooks)
    return notes
